"""At temperature > 0 the compiled round draws from the target's law: chi-square tests with fixed seeds.

False alarms: each test below asks for p >= 1e-4, so that one in ten thousand choices of its seeds would fail.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.keys import request_key
from dspark_jax.engine import programs
from dspark_jax.speculation.calibration import unscaled
from dspark_jax.speculation.sampling import Draw, SamplingParams
from dspark_jax.speculation.schedule import Algorithm1, Lagged, algorithm1
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength, FullBlock
from dspark_jax.testing.reference import reference_distribution
from dspark_jax.testing.statistics import chi_square_p_value

FALSE_ALARM_RATE = 1e-4
DRAWS = 3000
PROMPT = [1, 4, 0, 2, 2]
OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
]
"""All of them in one batch."""


def law_of_next_token(toy, prefix: list[int], option: dict) -> np.ndarray:
    padded_1T = np.asarray([prefix + [0] * (8 - len(prefix))])
    logits_1TV = toy.forward(padded_1T).logits_BTV
    return reference_distribution(np.asarray(logits_1TV)[0, len(prefix) - 1], **option)


def law_of_two_tokens(toy, option: dict) -> np.ndarray:
    """[V, V]: after the prompt and the first token of the answer, which all draws share."""
    prefix = [*PROMPT, FIRST]
    law_V = law_of_next_token(toy, prefix, option)
    return np.stack([p * law_of_next_token(toy, [*prefix, token], option) for token, p in enumerate(law_V)])


FIRST = 3


def draw_two_tokens(toy, name: str, policy) -> np.ndarray:
    """[options, DRAWS, 2] through the engine's own compiled programs, one slot for each draw."""
    slots = DRAWS * len(OPTIONS)
    engine = toy.engine(name, policy, slots=slots, max_context=16, page_len=32)
    (request,) = toy.requests((1,), max_new_tokens=8)
    request.prompt_tokens = PROMPT
    engine.submit(request)
    engine._allocate()
    engine._admit()

    def for_every_draw(value: float, option: str) -> jax.Array:
        return jnp.repeat(jnp.asarray([given.get(option, value) for given in OPTIONS]), DRAWS)

    state = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), engine._state)
    state = state.replace(
        anchors_B=jnp.full(slots, FIRST, jnp.int32),
        keys_B=jax.vmap(request_key)(jnp.arange(slots)),
        sampling=SamplingParams.greedy(slots).replace(
            temperature_B=for_every_draw(1.0, "temperature"),
            top_k_B=for_every_draw(0, "top_k"),
            top_p_B=for_every_draw(1.0, "top_p"),
            min_p_B=for_every_draw(0.0, "min_p"),
        ),
    )
    places = (np.arange(slots, dtype=np.int32), np.arange(slots, dtype=np.int32)[:, None])
    compiled, drafts = engine._programs, engine._drafts
    G = toy.block_len
    # Every price the same but for a step at half of the tokens: Algorithm 1 stops there.
    round_ms_N = 1 + 0.3 * (np.arange(slots * G + 1) > slots * G / 2).astype(np.float32)
    scaling_R2G = np.tile(unscaled(G).astype(np.float32), (slots, 1, 1))
    prices = (np.int32(slots * G * 0.4), round_ms_N, scaling_R2G)
    tokens_BT = np.full((slots, 0), -1)
    for _ in range(2):  # a round commits at least one token
        drafts = compiled.draft(slots, Draw.FILTERED)(state, drafts, *places)
        lengths = compiled.select(slots)(state, drafts, places[0], np.ones(slots, bool), *prices)
        rows = engine.config.row_buckets(slots, G)[-1]
        state, result = compiled.verify(slots, rows, Draw.FILTERED)(state, drafts, *places, *lengths)
        tokens_BT = np.concatenate([tokens_BT, result.tokens_RT], axis=1)
    committed_first = np.argsort(tokens_BT < 0, axis=1, kind="stable")[:, :2]
    return np.take_along_axis(tokens_BT, committed_first, axis=1).reshape(len(OPTIONS), DRAWS, 2)


def p_values(toy, tokens_ND2: np.ndarray) -> list[float]:
    values = []
    for option, tokens_D2 in zip(OPTIONS, tokens_ND2, strict=True):
        counts_VV = np.zeros((toy.vocab_size, toy.vocab_size), int)
        np.add.at(counts_VV, tuple(tokens_D2.T), 1)
        values.append(chi_square_p_value(counts_VV.ravel(), law_of_two_tokens(toy, option).ravel()))
    return values


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("markov", FullBlock()),
        ("rnn", ConfidenceThreshold(threshold=0.5)),
        ("markov", Lagged()),
        ("markov", Algorithm1()),
        ("reduced", FullBlock()),
        ("gated", FixedLength(length=1)),
        ("eagle3-reduced", FullBlock()),
        ("mtp", FixedLength(length=2)),
    ],
    ids=str,
)
def test_two_tokens_follow_the_targets_law(toy, name, policy):
    values = p_values(toy, draw_two_tokens(toy, name, policy))

    assert min(values) > FALSE_ALARM_RATE, values


def test_the_first_token_follows_the_targets_law(toy):
    """The one that prefill draws, through the host: seeds, options and all."""
    engine = toy.engine("markov", slots=4, max_context=16)
    for option in (OPTIONS[0], OPTIONS[-1]):
        requests = toy.requests((1,) * 800, max_new_tokens=1, **option)
        for request in requests:
            request.prompt_tokens = PROMPT
        tokens = itertools.chain.from_iterable(toy.answers(engine, requests).values())
        counts_V = np.bincount(list(tokens), minlength=toy.vocab_size)

        assert chi_square_p_value(counts_V, law_of_next_token(toy, PROMPT, option)) > FALSE_ALARM_RATE


# Each of these engines is broken on purpose, and must be found out by the same test.


def q_before_the_head(weights, state, drafts, *places, drafter, draw, right=programs.draft):
    """Claims that the tokens were drawn from another distribution than they were."""
    drafts = right(weights, state, drafts, *places, drafter=drafter, draw=draw)
    share = 1 / drafts.probs_BGV.shape[-1]
    return drafts.replace(
        q_BG=jnp.full_like(drafts.q_BG, share), probs_BGV=jnp.full_like(drafts.probs_BGV, share)
    )


def cut_where_tokens_look_bad(active_B, drafts, slots_R, *rest, scheduler, right=programs.select):
    """Decides after the draw: verifies token k only if it is token 0, 1 or 2."""
    lengths_R, survival_RG = right(active_B, drafts, slots_R, *rest, scheduler=scheduler)
    good_RG = jnp.cumprod(drafts.tokens_BG[slots_R] < 3, axis=1)
    return jnp.minimum(lengths_R, good_RG.sum(axis=1)), survival_RG


# Spec section 8's counterexample: how confident the drafter is of x_2 depends on what x_1 turned out to be.
SPEEDS = jnp.array([1.0, 0.5, 0.45, 0.4])


def survivals_of_the_counterexample(drafts, slots_R):
    second_R = jnp.where(drafts.tokens_BG[slots_R, 0] < 2, 0.9, 0.0)
    return jnp.stack([jnp.full(second_R.shape, 0.8), 0.8 * second_R, jnp.zeros(second_R.shape)], axis=1)


def retrospective(active_B, drafts, slots_R, *rest, scheduler):
    """Each request takes the best length for the survivals of this very round."""
    survival_RG = survivals_of_the_counterexample(drafts, slots_R)
    expected_RT = 1 + jnp.pad(jnp.cumsum(survival_RG, axis=1), ((0, 0), (1, 0)))
    return jnp.argmax(expected_RT * SPEEDS, axis=1).astype(jnp.int32), survival_RG


def stopping_early(active_B, drafts, slots_R, *rest, scheduler):
    """Algorithm 1 on the same survivals, for each request on its own."""
    survival_RG = survivals_of_the_counterexample(drafts, slots_R)
    alone = jax.vmap(lambda survival_G: algorithm1(survival_G[None], jnp.ones(1, bool), 1, 1 / SPEEDS)[0])
    return alone(survival_RG), survival_RG


def test_an_early_stop_is_no_bias_where_a_later_look_is_one(toy, monkeypatch):
    monkeypatch.setattr(programs, "select", stopping_early)

    assert min(p_values(toy, draw_two_tokens(toy, "markov", FullBlock()))) > FALSE_ALARM_RATE


@pytest.mark.parametrize(
    ("stage", "fault"),
    [("draft", q_before_the_head), ("select", cut_where_tokens_look_bad), ("select", retrospective)],
)
def test_a_bias_is_caught(toy, monkeypatch, stage, fault):
    monkeypatch.setattr(programs, stage, fault)

    assert min(p_values(toy, draw_two_tokens(toy, "markov", FullBlock()))) < FALSE_ALARM_RATE
