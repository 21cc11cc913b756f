"""distribution() against a sort-based numpy reference, and the Gumbel-max draw."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.speculation.sampling import MAX_STOP_IDS, Draw, SamplingParams, distribution, sample
from dspark_jax.testing.reference import reference_distribution
from dspark_jax.testing.statistics import chi_square_p_value

V = 12
jitted = functools.partial(jax.jit, static_argnames="draw")(distribution)
draw = jax.jit(sample)

Options = tuple[float, int, float, float]
OPTIONS = st.tuples(
    st.sampled_from([0.0, 1e-30, 0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 5, V, V + 7]),
    st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),
)


def params(rows: list[Options]) -> SamplingParams:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingParams.greedy(len(rows)).replace(
        temperature_B=jnp.asarray(temperature, jnp.float32),
        top_k_B=jnp.asarray(top_k, jnp.int32),
        top_p_B=jnp.asarray(top_p, jnp.float32),
        min_p_B=jnp.asarray(min_p, jnp.float32),
    )


def reference(logits_V: np.ndarray, options: Options) -> np.ndarray:
    temperature, top_k, top_p, min_p = options
    return reference_distribution(logits_V, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def test_reference_by_hand():
    logits = np.log([0.5, 0.3, 0.2])
    np.testing.assert_allclose(reference_distribution(logits, temperature=1.0, top_k=2), [0.625, 0.375, 0])
    np.testing.assert_allclose(reference_distribution(logits, temperature=1.0, top_p=0.6), [0.625, 0.375, 0])
    np.testing.assert_allclose(reference_distribution(logits, temperature=1.0, min_p=0.5), [0.625, 0.375, 0])
    np.testing.assert_allclose(reference_distribution(logits, temperature=0.5), np.array([25, 9, 4]) / 38)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(OPTIONS, min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.5, 4.0, 40.0]),
    ties=st.booleans(),
)
def test_agrees_with_sorting_reference(rows: list[Options], seed: int, scale: float, ties: bool):
    logits_BTV = np.random.default_rng(seed).normal(size=(4, 2, V)).astype(np.float32) * scale
    if ties:
        logits_BTV = np.round(logits_BTV)
    probs_BTV = np.asarray(jitted(logits_BTV, params(rows), draw=Draw.FILTERED))
    for logits_TV, probs_TV, options in zip(logits_BTV, probs_BTV, rows, strict=True):
        for logits_V, probs_V in zip(logits_TV, probs_TV, strict=True):
            expected_V = reference(logits_V, options)
            np.testing.assert_allclose(probs_V, expected_V, atol=2e-6)
            # Which tokens survive is compared apart: a small token wrongly kept would pass the tolerance.
            surely_possible = expected_V > 1e-30
            assert (probs_V[surely_possible] > 0).all()
            assert (probs_V[expected_V == 0] == 0).all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows=st.lists(OPTIONS, min_size=4, max_size=4), seed=st.integers(0, 2**31))
def test_greedy_rows_in_a_mixed_batch_are_the_argmax(rows: list[Options], seed: int):
    rows = [(0.0, *rows[0][1:]), *rows[1:]]
    logits_BTV = np.random.default_rng(seed).integers(-3, 3, size=(4, 2, V)).astype(np.float32)
    for draw in Draw:
        probs_BTV = np.asarray(jitted(logits_BTV, params(rows), draw=draw, positions=np.zeros((4, 2), int)))
        assert np.isfinite(probs_BTV).all()
        np.testing.assert_array_equal(probs_BTV[0], np.eye(V)[np.argmax(logits_BTV[0], axis=-1)])


def test_filters_that_are_off_change_nothing():
    logits_BTV = np.random.default_rng(0).normal(size=(4, 2, V)).astype(np.float32) * 5
    off = params([(t, 0, 1.0, 0.0) for t in (0.0, 0.5, 1.0, 3.0)])
    np.testing.assert_array_equal(
        jitted(logits_BTV, off, draw=Draw.FILTERED), jitted(logits_BTV, off, draw=Draw.TEMPERATURE)
    )


def test_extreme_logits_and_temperatures_stay_finite():
    inf = np.inf
    logits_BV = np.array([[1e30, -1e30, 0], [5, -inf, 5], [1e-3, 0, 0], [0, -90, -inf]], np.float32)
    for temperature in (0.0, 1e-38, 1e-4, 1.0, 1e6):
        for top_p in (0.0, 0.999999, 1.0):
            probs = jitted(logits_BV, params([(temperature, 0, top_p, 0.0)] * 4), draw=Draw.FILTERED)
            np.testing.assert_allclose(np.sum(probs, axis=-1), 1.0, rtol=1e-6)
            assert probs[1, 1] == probs[3, 2] == 0


def test_bfloat16_logits_give_float32_probabilities():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, V)), jnp.bfloat16)
    probs = distribution(logits, params([(1.0, 0, 1.0, 0.0)]), draw=Draw.TEMPERATURE)
    assert probs.dtype == jnp.float32
    expected_V = reference(np.asarray(logits[0], np.float32), (1.0, 0, 1.0, 0.0))
    np.testing.assert_allclose(probs[0], expected_V, atol=1e-6)


@pytest.mark.parametrize("filters_only", [(0, 0.8, 0.0), (0, 1.0, 0.3)], ids=["top-p", "min-p"])
def test_filters_before_temperature_would_be_another_law(filters_only: tuple[int, float, float]):
    logits_V = np.log(np.array([0.55, 0.3, 0.1, 0.05], np.float32))
    ours = distribution(jnp.asarray(logits_V)[None], params([(2.0, *filters_only)]), draw=Draw.FILTERED)[0]
    np.testing.assert_allclose(ours, reference(logits_V, (2.0, *filters_only)), atol=1e-6)

    kept_V = reference(logits_V, (1.0, *filters_only)) > 0
    filtered_first_V = reference(np.where(kept_V, logits_V, -np.inf), (2.0, 0, 1.0, 0.0))
    assert np.abs(ours - filtered_first_V).max() > 0.1


def test_top_p_counts_the_mass_that_top_k_left():
    logits_BV = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    ours = distribution(logits_BV, params([(1.0, 2, 0.55, 0.0)]), draw=Draw.FILTERED)[0]
    np.testing.assert_allclose(ours, [1, 0, 0, 0])  # 0.4 of 0.7 is 0.57; of 1.0 it would not be enough.


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_sample_never_draws_probability_zero(seed: int):
    rng = np.random.default_rng(seed)
    probs_BV = rng.random((64, V)) ** 8 * (rng.random((64, V)) < 0.2)
    probs_BV[np.arange(64), rng.integers(0, V, 64)] += 1e-20
    ids_B = np.asarray(draw(jax.random.split(jax.random.key(seed), 64), probs_BV.astype(np.float32)))
    assert (probs_BV[np.arange(64), ids_B] > 0).all()


def test_sample_of_one_hot_is_that_token_for_every_key():
    ids_B = np.arange(64) % V
    for seed in range(20):
        drawn_B = draw(jax.random.split(jax.random.key(seed), 64), np.eye(V, dtype=np.float32)[ids_B])
        np.testing.assert_array_equal(drawn_B, ids_B)


def test_sample_depends_on_its_own_key_only():
    probs_BV = np.random.default_rng(3).dirichlet(np.ones(V), 64).astype(np.float32)
    keys_B = jax.random.split(jax.random.key(4), 64)
    together = draw(keys_B, probs_BV)
    reversed_B = draw(keys_B[::-1], probs_BV[::-1])[::-1]
    alone = [int(draw(keys_B[row : row + 1], probs_BV[row : row + 1])[0]) for row in range(64)]
    np.testing.assert_array_equal(together, reversed_B)
    np.testing.assert_array_equal(together, alone)


def test_sample_follows_the_law():
    """False-alarm rate 1e-4."""
    probs_V = np.random.default_rng(5).dirichlet(np.ones(V) * 0.5).astype(np.float32)
    rows = 2**17
    ids = draw(jax.random.split(jax.random.key(6), rows), jnp.broadcast_to(probs_V, (rows, V)))
    counts_V = np.bincount(ids, minlength=V)
    assert chi_square_p_value(counts_V, probs_V) > 1e-4
    assert chi_square_p_value(counts_V, np.roll(probs_V, 1)) < 1e-4


class TestStopTokens:
    """What cannot be drawn before min_new_tokens."""

    positions_BT = jnp.asarray([[4, 5, 6], [4, 5, 6], [9, 10, 11]])
    logits_BTV = np.random.default_rng(3).normal(size=(3, 3, V)).astype(np.float32) * 2

    @staticmethod
    def masked(options: Options = (0.9, 5, 0.9, 0.01)) -> SamplingParams:
        """Row 0 forbids tokens 2 and 7 before position 6, row 1 nothing, row 2 token 3 before 10."""
        ids = np.full((3, MAX_STOP_IDS), -1, np.int32)
        ids[0, :2], ids[1, 0], ids[2, 0] = (2, 7), 5, 3
        return params([options] * 3).replace(
            stop_ids_BJ=jnp.asarray(ids), stop_from_B=jnp.asarray([6, 0, 10], jnp.int32)
        )

    @pytest.mark.parametrize(
        "options", [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.9, 5, 0.9, 0.01)], ids=str
    )
    def test_they_are_out_before_temperature_and_filters(self, options):
        probs_BTV = jitted(
            self.logits_BTV, self.masked(options), draw=Draw.MASKED, positions=self.positions_BT
        )
        forbidden_BTV = np.zeros((3, 3, V), bool)
        forbidden_BTV[0, :2, [2, 7]] = True
        forbidden_BTV[2, 0, 3] = True
        for place in np.ndindex(3, 3):
            logits_V = np.where(forbidden_BTV[place], -np.inf, self.logits_BTV[place])
            np.testing.assert_allclose(probs_BTV[place], reference(logits_V, options), atol=2e-6)
            assert (np.asarray(probs_BTV[place])[forbidden_BTV[place]] == 0).all()

    def test_columns_of_a_reduced_vocabulary(self):
        draft_to_target_V = jnp.asarray([1, 7, 3, 5, 2])
        columns = np.asarray(draft_to_target_V)
        masked = self.masked((1.0, 0, 1.0, 0.0))
        probs_BTV = jitted(
            self.logits_BTV[..., columns],
            masked,
            draw=Draw.MASKED,
            positions=self.positions_BT,
            draft_to_target_V=draft_to_target_V,
        )
        assert [np.flatnonzero(probs_BTV[0, t] == 0).tolist() for t in range(3)] == [[1, 4], [1, 4], []]
        assert [np.flatnonzero(probs_BTV[2, t] == 0).tolist() for t in range(3)] == [[2], [], []]
        assert (probs_BTV[1] > 0).all()

    def test_a_request_without_them_is_as_before(self):
        options = [(0.7, 4, 0.9, 0.0)] * 3
        np.testing.assert_array_equal(
            jitted(self.logits_BTV, params(options), draw=Draw.MASKED, positions=self.positions_BT),
            jitted(self.logits_BTV, params(options), draw=Draw.FILTERED),
        )
