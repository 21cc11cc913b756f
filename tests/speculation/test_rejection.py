"""verify_block against a plain numpy reference, its pieces, and what must not matter to it."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.core.errors import InputError
from dspark_jax.speculation.rejection import (
    Verified,
    acceptance_probability,
    residual,
    slot_uniforms,
    verify_block,
)
from dspark_jax.speculation.sampling import sample
from dspark_jax.testing.reference import reference_verify

B, G, V, VD = 6, 3, 7, 4
SEEDS = st.integers(0, 2**31)
verify, draw = jax.jit(verify_block), jax.jit(sample)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """The arguments of verify_block for a whole block (Lv = G), as numpy arrays."""

    target_probs: np.ndarray
    draft_probs: np.ndarray
    draft_ids: np.ndarray
    draft_to_target: np.ndarray | None
    verify_len: np.ndarray
    keys: jax.Array

    def run(self, *, bucket: int = G, rows: slice = slice(None)) -> Verified:
        return verify(
            self.target_probs[rows, : bucket + 1],
            self.draft_probs[rows],
            self.draft_ids[rows],
            self.draft_to_target,
            self.verify_len[rows],
            self.keys[rows, 0],
            self.keys[rows, 1],
        )


def sparse_laws(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random laws, peaked and with many exact zeros."""
    weights = rng.random(shape) ** 4 * (rng.random(shape) < 0.6)
    weights[..., 0] += (weights.sum(-1) == 0) * 1.0
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def random_round(seed: int, *, reduced: bool) -> Round:
    """A round whose drafter resembles the target, so that every accepted length occurs."""
    rng = np.random.default_rng(seed)
    vocabulary = VD if reduced else V
    draft_to_target = rng.permutation(V)[:VD] if reduced else None
    target_probs = sparse_laws(rng, B, G + 1, V)
    like_target = target_probs[:, :G, draft_to_target] if reduced else target_probs[:, :G]
    draft_probs = 0.6 * like_target + 0.4 * sparse_laws(rng, B, G, vocabulary)
    draft_probs = (draft_probs / draft_probs.sum(-1, keepdims=True)).astype(np.float32)
    # Gumbel-max, as `sample` does it.
    with np.errstate(divide="ignore"):
        draft_ids = np.argmax(np.log(draft_probs) + rng.gumbel(size=draft_probs.shape), axis=-1)
    return Round(
        target_probs=target_probs,
        draft_probs=draft_probs,
        draft_ids=draft_ids.astype(np.int32),
        draft_to_target=draft_to_target,
        verify_len=rng.integers(0, G + 1, B).astype(np.int32),
        keys=jax.random.split(jax.random.key(seed), (B, 2)),
    )


def perfect_round(seed: int) -> Round:
    """A drafter equal to the target, verified in full."""
    case = random_round(seed, reduced=False)
    return dataclasses.replace(
        case,
        draft_probs=case.target_probs[:, :G],
        draft_ids=case.target_probs[:, :G].argmax(-1).astype(np.int32),
        verify_len=np.full(B, G, np.int32),
    )


def assert_same(first: Verified, second: Verified, rows: slice = slice(None)):
    for field in dataclasses.fields(Verified):
        one, other = getattr(first, field.name)[rows], getattr(second, field.name)
        np.testing.assert_array_equal(one, other, field.name)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=SEEDS)
@pytest.mark.parametrize("reduced", [False, True])
def test_agrees_with_the_reference(reduced: bool, seed: int):
    case = random_round(seed, reduced=reduced)
    verified = case.run()
    uniforms_BG = np.asarray(slot_uniforms(case.keys[:, 0], G))
    references = [
        reference_verify(
            case.target_probs[row],
            case.draft_probs[row],
            case.draft_ids[row],
            case.draft_to_target,
            int(case.verify_len[row]),
            uniforms_BG[row],
        )
        for row in range(B)
    ]
    own_B = draw(case.keys[:, 1], np.array([law_V for _, law_V in references], np.float32))
    for row, (accepted, _) in enumerate(references):
        own = int(own_B[row])
        assert verified.tokens_BT[row].tolist() == [*accepted, own] + [-1] * (G - len(accepted))
        assert verified.accepted_B[row] == len(accepted)
        assert verified.anchor_B[row] == own
    np.testing.assert_array_equal(verified.num_committed_B, (np.asarray(verified.tokens_BT) >= 0).sum(1))
    assert (verified.accepted_B <= case.verify_len).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=SEEDS)
@pytest.mark.parametrize("reduced", [False, True])
def test_never_commits_a_token_of_probability_zero(reduced: bool, seed: int):
    case = random_round(seed, reduced=reduced)
    verified = case.run()
    for row in range(B):
        for slot in range(int(verified.num_committed_B[row])):
            assert case.target_probs[row, slot, verified.tokens_BT[row, slot]] > 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS)
@pytest.mark.parametrize("reduced", [False, True])
def test_rows_beyond_the_verified_length_do_not_matter(reduced: bool, seed: int):
    case = random_round(seed, reduced=reduced)
    beyond_BG = np.arange(G) >= case.verify_len[:, None]
    beyond_BT = np.arange(G + 1) > case.verify_len[:, None]
    garbage = dataclasses.replace(
        case,
        target_probs=np.where(beyond_BT[..., None], np.float32(np.nan), case.target_probs),
        draft_probs=np.where(beyond_BG[..., None], np.float32(np.nan), case.draft_probs),
        draft_ids=np.where(beyond_BG, np.int32(-(2**31)), case.draft_ids),
    )
    assert_same(case.run(), garbage.run())


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_batch_mates_and_bucket_do_not_matter(seed: int):
    case = random_round(seed, reduced=True)
    together = case.run()
    for row in range(B):
        rows = slice(row, row + 1)
        assert_same(together, case.run(rows=rows, bucket=int(case.verify_len[row])), rows)


def test_length_beyond_the_bucket_counts_as_the_bucket():
    """The bucket is accepted whole; its bonus must not be taken for the replacement of a third draft."""
    case = perfect_round(0)
    draft_probs = case.draft_probs.copy()
    draft_probs[:, 2] = np.roll(draft_probs[:, 2], 1, axis=-1)
    case = dataclasses.replace(case, draft_probs=draft_probs)
    shorter = dataclasses.replace(case, verify_len=np.full(B, 2, np.int32))
    assert_same(case.run(bucket=2), shorter.run(bucket=2))
    assert (shorter.run(bucket=2).accepted_B == 2).all()


@pytest.mark.parametrize("drafted", [0, G])
def test_nothing_verified_is_plain_decoding(drafted: int):
    """Also with no drafter at all (G = 0)."""
    case = random_round(1, reduced=False)
    drafts = {"draft_probs": case.draft_probs[:, :drafted], "draft_ids": case.draft_ids[:, :drafted]}
    case = dataclasses.replace(case, **drafts)
    verified = case.run(bucket=0)
    np.testing.assert_array_equal(verified.tokens_BT[:, 0], draw(case.keys[:, 1], case.target_probs[:, 0]))
    assert verified.tokens_BT.shape == (B, drafted + 1)
    assert (verified.tokens_BT[:, 1:] == -1).all()
    assert (verified.accepted_B == 0).all()


def test_greedy_target_accepts_exactly_its_own_tokens():
    """One-hot laws: the committed tokens are the target's argmax chain, in a batch with sampled rows."""
    case = random_round(2, reduced=False)
    greedy_rows = np.arange(B) % 2 == 0
    argmax_BT = case.target_probs.argmax(-1)
    right_until = np.arange(B) % (G + 1)
    drafts = np.where(np.arange(G) < right_until[:, None], argmax_BT[:, :G], (argmax_BT[:, :G] + 1) % V)
    one_hot = lambda ids: np.eye(V, dtype=np.float32)[ids]  # noqa: E731
    mixed = dataclasses.replace(
        case,
        target_probs=np.where(greedy_rows[:, None, None], one_hot(argmax_BT), case.target_probs),
        draft_probs=np.where(greedy_rows[:, None, None], one_hot(drafts), case.draft_probs),
        draft_ids=np.where(greedy_rows[:, None], drafts, case.draft_ids).astype(np.int32),
        verify_len=np.full(B, G, np.int32),
    )
    verified = mixed.run()
    for row in np.flatnonzero(greedy_rows):
        committed = int(verified.num_committed_B[row])
        assert committed == right_until[row] + 1
        np.testing.assert_array_equal(verified.tokens_BT[row, :committed], argmax_BT[row, :committed])


def test_perfect_drafter_is_always_accepted():
    assert (perfect_round(3).run().accepted_B == G).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_accepted_and_replaced_mass_add_up_to_the_target(seed: int):
    """The identity that makes rejection sampling exact: q a + (1 - sum q a) residual = p."""
    rng = np.random.default_rng(seed)
    p, q = sparse_laws(rng, 32, V), sparse_laws(rng, 32, V)
    accepted = q * np.asarray(acceptance_probability(jnp.asarray(p), jnp.asarray(q)))
    rejected = 1 - accepted.sum(-1, keepdims=True)
    np.testing.assert_allclose(accepted + rejected * residual(jnp.asarray(p), jnp.asarray(q)), p, atol=1e-6)


def test_degenerate_residual_is_the_target():
    p = jnp.array([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    np.testing.assert_array_equal(residual(p, p), p)
    np.testing.assert_array_equal(residual(p, p * 1.0000002), p)
    np.testing.assert_array_equal(residual(p, jnp.zeros_like(p)), p)
    np.testing.assert_array_equal(residual(p, jnp.array([[1.0, 0.0]] * 3))[:2], [[0.0, 1.0]] * 2)


def test_acceptance_at_probability_zero():
    p, q = jnp.array([0.0, 0.0, 0.5, 0.2]), jnp.array([0.5, 0.0, 0.0, 0.4])
    np.testing.assert_array_equal(acceptance_probability(p, q), jnp.array([0.0, 0.0, 1.0, 0.5], jnp.float32))


def test_uniforms_are_independent_between_slots_and_in_range():
    uniforms = np.asarray(slot_uniforms(jax.random.split(jax.random.key(0), 20_000), G))
    assert ((uniforms >= 0) & (uniforms < 1)).all()
    assert np.abs(np.corrcoef(uniforms.T) - np.eye(G)).max() < 4 / np.sqrt(20_000)


def test_no_noise_as_wide_as_the_vocabulary():
    vocabulary, batch = 10_000, 2
    laws = jnp.full((batch, 3, vocabulary), 1 / vocabulary)
    ids, keys = jnp.zeros((batch, 2), jnp.int32), jax.random.split(jax.random.key(0), batch)
    program = str(jax.make_jaxpr(verify_block)(laws, laws[:, :2], ids, None, ids[:, 0], keys, keys))
    drawn = [
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"u32\[([\d,]+)\] = random_bits", program)
    ]
    assert drawn and max(drawn) < vocabulary


def test_more_rows_than_the_block_are_refused():
    case = random_round(5, reduced=False)
    with pytest.raises(InputError, match="between 1 and 3 rows"):
        verify_block(
            case.target_probs, case.draft_probs[:, :2], case.draft_ids[:, :2], None, case.verify_len,
            case.keys[:, 0], case.keys[:, 1],
        )  # fmt: skip
