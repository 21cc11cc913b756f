"""Losslessness: exact enumeration on a tiny vocabulary, and a chi-square through the compiled round.

Everything that must be exact agrees to 1e-6 (float32 pieces, V = 4, G = 2); every mutation must be caught.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.keys import Purpose, round_keys
from dspark_jax.speculation import rejection
from dspark_jax.speculation.sampling import Draw, SamplingParams, distribution, sample
from dspark_jax.speculation.verify_length import (
    ConfidenceThreshold,
    FixedLength,
    FullBlock,
    VerifyPolicy,
    verify_lengths,
)
from dspark_jax.testing import enumeration
from dspark_jax.testing.enumeration import (
    TinyDecoding,
    Tokens,
    continuation_law,
    largest_difference,
    policy_length,
    round_law,
    target_law,
)
from dspark_jax.testing.reference import reference_distribution
from dspark_jax.testing.statistics import chi_square_p_value

V, G, NUM_TOKENS = 4, 2, 3
EXACT = 1e-6
POLICIES: dict[str, VerifyPolicy] = {
    "plain": FixedLength(length=0),
    "one": FixedLength(length=1),
    "full": FullBlock(),
    "threshold": ConfidenceThreshold(threshold=0.5),
    "threshold-off": ConfidenceThreshold(threshold=0.0),
}
Option = dict[str, float]
PLAIN: Option = {"temperature": 1.0}


@functools.cache
def random_logits(*seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=V).astype(np.float32) * 1.5


jitted_distribution = functools.partial(jax.jit, static_argnames="draw")(distribution)


def law_of(logits_V: np.ndarray, option: Option) -> np.ndarray:
    """The float32 law that the engine would use, widened."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | option
    sampling = SamplingParams.greedy(1).replace(
        **{f"{name}_B": np.array([value], np.float32) for name, value in values.items()}
    )
    return np.asarray(jitted_distribution(logits_V[None], sampling, draw=Draw.FILTERED)[0], np.float64)


@functools.cache
def target_of(seed: int, option: tuple[tuple[str, float], ...]) -> Callable[[Tokens], np.ndarray]:
    """A target that looks at the last two tokens."""

    law_after = functools.cache(lambda recent: law_of(random_logits(seed, *recent), dict(option)))
    return lambda tokens: law_after(tokens[-2:])


def confidence(prefix: Tokens, drafted: Tokens) -> float:
    """A head that knows nothing true, but depends on everything that it is allowed to see."""
    return float(random_logits(77, len(drafted), *prefix[-1:], *drafted)[0])


# Drafters: (target law, prefix, drafted) -> law. They look at the target to be adversarial.
Drafter = Callable[[Callable[[Tokens], np.ndarray], Tokens, Tokens], np.ndarray]


def random_drafter(target, prefix, drafted):
    return law_of(random_logits(5, len(drafted), *prefix[-1:], *drafted), PLAIN)


def equal_drafter(target, prefix, drafted):
    return target(prefix + drafted)


def nearly_equal_drafter(target, prefix, drafted):
    """Differs from the target by a few float32 roundings, so that the residual is rounding noise."""
    law = target(prefix + drafted) * (1 + 2e-7 * np.array([1, -1, 1, -1]))
    return law / law.sum()


def near_one_hot_drafter(target, prefix, drafted):
    law = np.full(V, 1e-7)
    law[int(target(prefix + drafted).argmin())] = 1 - 3e-7
    return law


def one_hot_drafter(target, prefix, drafted):
    return np.eye(V)[len(prefix + drafted) % V]


def reversed_drafter(target, prefix, drafted):
    """Likes best what the target likes least."""
    law = target(prefix + drafted)
    return np.sort(law)[::-1][np.argsort(np.argsort(law))]


DRAFTERS: list[Drafter] = [
    random_drafter,
    equal_drafter,
    nearly_equal_drafter,
    near_one_hot_drafter,
    one_hot_drafter,
    reversed_drafter,
]


def decoding_of(
    drafter: Drafter, policy: VerifyPolicy, *, seed: int = 1, option: Option = PLAIN
) -> TinyDecoding:
    target = target_of(seed, tuple(option.items()))
    return TinyDecoding(
        target=target,
        drafter=functools.cache(functools.partial(drafter, target)),
        verify_length=functools.cache(policy_length(policy, confidence, G)),
        block_len=G,
    )


def error_of(decoding: TinyDecoding) -> float:
    law = continuation_law(decoding, (0,), NUM_TOKENS)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    return largest_difference(law, target_law(decoding.target, (0,), NUM_TOKENS))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.__name__)
def test_output_law_is_the_target_law(drafter: Drafter, policy: VerifyPolicy):
    assert error_of(decoding_of(drafter, policy)) < EXACT


@pytest.mark.parametrize("seed", range(4))
def test_random_targets(seed: int):
    assert error_of(decoding_of(random_drafter, POLICIES["threshold"], seed=100 + seed)) < EXACT


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_disjoint_support(policy: VerifyPolicy):
    """The target never says 2 or 3; the drafter says nothing else."""
    decoding = TinyDecoding(
        target=lambda tokens: np.array([0.3, 0.7, 0.0, 0.0]),
        drafter=lambda prefix, drafted: np.array([0.0, 0.0, 0.9, 0.1]),
        verify_length=policy_length(policy, confidence, G),
        block_len=G,
    )
    assert error_of(decoding) < EXACT
    lengths = {len(tokens) for tokens, probability in round_law(decoding, (0,)).items() if probability > 0}
    assert lengths == {1}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("missing", ["top", "bottom"])
def test_reduced_vocabulary(policy: VerifyPolicy, missing: str):
    """The draft vocabulary lacks the target's two likeliest (or least likely) tokens, and is not sorted."""
    target = target_of(9, tuple(PLAIN.items()))
    by_probability = np.argsort(target((0,)))
    draft_to_target = by_probability[:2] if missing == "top" else by_probability[:1:-1]
    decoding = TinyDecoding(
        target=target,
        drafter=lambda prefix, drafted: np.array([0.25, 0.75]) if drafted else np.array([0.9, 0.1]),
        verify_length=policy_length(policy, confidence, G),
        block_len=G,
        draft_to_target_np=draft_to_target,
    )
    assert error_of(decoding) < EXACT


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 2},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 0.8, "min_p": 0.3},
        {"temperature": 2.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_sampling_parameters_reach_the_law(option: Option):
    """Against float64 numpy on the raw logits, so that an error in distribution() shows as well."""
    decoding = decoding_of(random_drafter, FullBlock(), option=option)
    law = continuation_law(decoding, (0,), NUM_TOKENS)

    def reference(tokens: Tokens) -> np.ndarray:
        return reference_distribution(random_logits(1, *tokens[-2:]), **option)

    assert largest_difference(law, target_law(reference, (0,), NUM_TOKENS)) < EXACT


# What must be caught


def replacement_from_p(p, q):
    return p


def unclipped_excess(p, q):
    excess = jnp.abs(p - q)
    return excess / jnp.maximum(excess.sum(-1, keepdims=True), 1e-30)


def accept_by_square_root(p, q):
    return jnp.sqrt(rejection.acceptance_probability(p, q))


def accept_if_target_is_likelier(p, q):
    return (p >= q).astype(jnp.float32)


@pytest.mark.parametrize(
    ("piece", "mutant"),
    [
        ("residual", replacement_from_p),
        ("residual", unclipped_excess),
        ("acceptance_probability", accept_by_square_root),
        ("acceptance_probability", accept_if_target_is_likelier),
    ],
)
def test_enumeration_catches_a_wrong_piece(monkeypatch, piece: str, mutant):
    monkeypatch.setattr(enumeration, piece, mutant)
    assert error_of(decoding_of(random_drafter, FullBlock())) > 1e-3


def test_retrospective_scheduler_is_biased_and_causal_policies_are_not():
    """The worked example of DSpark's non-anticipation rule: (0.7, 0.3) becomes (0.85, 0.15)."""
    p, q, steps_per_s = np.array([0.7, 0.3]), np.array([0.5, 0.5]), (1.0, 0.5, 0.45)

    def conditional(prefix: Tokens, drafted: Tokens) -> float:
        """c_1 = 0.8; c_2 = 0.9 after token 0 and 0 after token 1."""
        return {(): 0.8, (0,): 0.9, (1,): 0.0}[drafted]

    def throughputs(block: Tokens) -> list[float]:
        survivals = np.cumprod([conditional((), block[:slot]) for slot in range(2)])
        return [(1 + survivals[:length].sum()) * steps_per_s[length] for length in range(3)]

    def retrospective(prefix: Tokens, block: Tokens) -> int:
        return int(np.argmax(throughputs(block)))

    def early_stopping(prefix: Tokens, block: Tokens) -> int:
        """Algorithm 1: stops at the first length that does not improve, so it never looks past it."""
        values = throughputs(block)
        return next((length for length in range(2) if values[length + 1] <= values[length]), 2)

    def confidence_logit(prefix: Tokens, drafted: Tokens) -> float:
        with np.errstate(divide="ignore"):
            return float(np.log(conditional(prefix, drafted)) - np.log1p(-conditional(prefix, drafted)))

    def first_token(verify_length: Callable[[Tokens, Tokens], int]) -> list[float]:
        laws = {"target": lambda tokens: p, "drafter": lambda prefix, drafted: q}
        law = continuation_law(TinyDecoding(**laws, verify_length=verify_length, block_len=2), (), 1)
        return [law[0,], law[1,]]

    assert throughputs((0, 0))[2] == pytest.approx(1.134)
    assert [retrospective((), block) for block in ((0, 0), (1, 0))] == [2, 0]
    np.testing.assert_allclose(first_token(retrospective), [0.85, 0.15], atol=EXACT)

    np.testing.assert_allclose(first_token(early_stopping), [0.7, 0.3], atol=EXACT)
    for policy in (*POLICIES.values(), ConfidenceThreshold(threshold=0.85)):
        causal = policy_length(policy, confidence_logit, 2)
        np.testing.assert_allclose(first_token(causal), [0.7, 0.3], atol=EXACT)


# The compiled round

ROUNDS = 2**18
FALSE_ALARM = 1e-4
"""Of each chi-square below, if its seed had been drawn after the code was written."""
FILTERED: Option = {"temperature": 1.3, "top_k": 3, "top_p": 0.95}


def bigram_logits(seed: int) -> np.ndarray:
    return np.stack([random_logits(seed, previous) for previous in range(V)])


def simulate(
    policy: VerifyPolicy, *, option: Option = PLAIN, draft_to_target: tuple[int, ...] | None = None
) -> float:
    """p-value of ROUNDS compiled rounds after token 0, each continued by plain decoding to NUM_TOKENS tokens.

    Target, drafter and confidence look at the previous token. All randomness comes from per-request keys.
    """
    ids_np = np.arange(V) if draft_to_target is None else np.array(draft_to_target)
    to_target_V = None if draft_to_target is None else jnp.asarray(ids_np)
    target_VV = np.stack([law_of(row, option) for row in bigram_logits(1)]).astype(np.float32)
    draft_VV = np.stack([law_of(row[ids_np], option) for row in bigram_logits(2)]).astype(np.float32)
    confidence_V = jnp.asarray(bigram_logits(3)[:, 0])

    @jax.jit
    def tokens_BT():
        requests_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(11), jnp.arange(ROUNDS))
        anchors_B = jnp.zeros(ROUNDS, jnp.int32)
        keys = lambda purpose, position=0: round_keys(requests_B, anchors_B + position, purpose)  # noqa: E731
        target, draft, ids = jnp.asarray(target_VV), jnp.asarray(draft_VV), jnp.asarray(ids_np)

        context, draft_ids = [anchors_B], []
        for slot in range(G):
            slot_keys = jax.vmap(jax.random.fold_in, (0, None))(keys(Purpose.DRAFT), slot)
            draft_ids.append(sample(slot_keys, draft[context[-1]]))
            context.append(ids[draft_ids[-1]])
        verified = rejection.verify_block(
            target[jnp.stack(context, 1)],
            draft[jnp.stack(context[:G], 1)],
            jnp.stack(draft_ids, 1),
            to_target_V,
            verify_lengths(policy, confidence_V[jnp.stack(context[:G], 1)], G),
            keys(Purpose.ACCEPT),
            keys(Purpose.TARGET),
        )
        tokens = [verified.tokens_BT[:, 0]]
        for position in range(1, NUM_TOKENS):
            plain_B = sample(keys(Purpose.TARGET, position), target[tokens[-1]])
            committed_B = verified.tokens_BT[:, position]
            tokens.append(jnp.where(committed_B >= 0, committed_B, plain_B))
        return jnp.stack(tokens, 1)

    cells = np.asarray(tokens_BT()) @ V ** np.arange(NUM_TOKENS)[::-1]
    law = target_law(lambda tokens: law_of(bigram_logits(1)[tokens[-1]], option), (0,), NUM_TOKENS)
    probs = np.array([law[tokens] for tokens in np.ndindex(*[V] * NUM_TOKENS)])
    return chi_square_p_value(np.bincount(cells, minlength=probs.size), probs)


@pytest.mark.parametrize("policy", [POLICIES["one"], POLICIES["full"], POLICIES["threshold"]], ids=repr)
def test_compiled_round_follows_the_target(policy: VerifyPolicy):
    assert simulate(policy) > FALSE_ALARM


def test_compiled_round_with_filters_and_reduced_vocabulary():
    assert simulate(POLICIES["threshold"], option=FILTERED, draft_to_target=(3, 1)) > FALSE_ALARM


def one_uniform_for_all_slots(keys_B, num_slots):
    return jnp.broadcast_to(jax.vmap(jax.random.uniform)(keys_B)[:, None], (keys_B.shape[0], num_slots))


def test_chi_square_catches_a_shared_uniform(monkeypatch):
    monkeypatch.setattr(rejection, "slot_uniforms", one_uniform_for_all_slots)
    assert simulate(FullBlock()) < FALSE_ALARM


def test_shared_uniform_is_biased_by_exact_count():
    """Two slots tested with one u: both pass with min(a_1, a_2) instead of a_1 a_2."""
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    accept = np.asarray(rejection.acceptance_probability(jnp.asarray(p), jnp.asarray(q)), np.float64)
    replaced = np.asarray(rejection.residual(jnp.asarray(p), jnp.asarray(q)), np.float64)

    def first_two(both: np.ndarray) -> np.ndarray:
        """The law [V, V] of the first two tokens, given the probability [V, V] that both drafts pass."""
        drafted = np.outer(q, q)
        second_replaced = (drafted * (accept[:, None] - both)).sum(1)
        first_replaced = (q * (1 - accept)).sum()
        return drafted * both + np.outer(second_replaced, replaced) + first_replaced * np.outer(replaced, p)

    np.testing.assert_allclose(first_two(np.outer(accept, accept)), np.outer(p, p), atol=EXACT)
    assert np.abs(first_two(np.minimum.outer(accept, accept)) - np.outer(p, p)).max() > 1e-2


# The statistic itself


def test_chi_square_has_its_stated_false_alarm_rate():
    """2,000 honest samples with small cells: the share below 0.05 is 0.05 within four standard errors."""
    probs = np.array([0.4, 0.3, 0.2, 0.09, 0.006, 0.003, 0.001, 0.0])
    counts = np.random.default_rng(0).multinomial(500, probs, size=2000)
    alarms = np.mean([chi_square_p_value(row, probs) < 0.05 for row in counts])
    assert abs(alarms - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 2000)


def test_chi_square_corner_cases():
    assert chi_square_p_value(np.array([10, 0, 1]), np.array([0.5, 0.5, 0.0])) == 0
    assert chi_square_p_value(np.array([3, 1]), np.array([0.5, 0.5])) == 1
    assert chi_square_p_value(np.array([50, 50, 0]), np.array([0.5, 0.499, 0.001])) > 0.9
    assert chi_square_p_value(np.array([900, 100]), np.array([0.5, 0.5])) < 1e-100
