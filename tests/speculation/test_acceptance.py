"""Expected accepted length, survival, and statistics of recorded rounds."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.core.errors import InputError
from dspark_jax.speculation.acceptance import expected_accepted_length, position_statistics, survival
from dspark_jax.testing.enumeration import TinyDecoding, round_law


def test_survival_and_expected_length_by_hand():
    rates = jnp.array([[0.5, 0.5, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    np.testing.assert_allclose(survival(rates), [[0.5, 0.25, 0], [1, 1, 1], [0, 0, 0]])
    np.testing.assert_allclose(expected_accepted_length(rates), [1.75, 4, 1])
    assert expected_accepted_length(jnp.zeros((5, 0))).tolist() == [1.0] * 5


@pytest.mark.parametrize("block_len", [0, 1, 2, 3])
def test_expected_length_is_the_mean_of_the_exact_round(block_len: int):
    """With laws that ignore the past, acceptance is the overlap sum(min(p, q)) = 1 - TV in every slot."""
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.5, 0.1, 0.3, 0.1])
    decoding = TinyDecoding(
        target=lambda prefix: p,
        drafter=lambda prefix, drafted: q,
        verify_length=lambda prefix, block: block_len,
        block_len=block_len,
    )
    mean = sum(len(tokens) * probability for tokens, probability in round_law(decoding, ()).items())
    overlap = np.minimum(p, q).sum()
    np.testing.assert_allclose(mean, expected_accepted_length(jnp.full(block_len, overlap)), rtol=1e-6)


def test_statistics_by_hand():
    # (accepted, verified): full, cut by a rejection, rejected at once, short and kept whole, plain decoding.
    accepted, verified = np.array([3, 1, 0, 1, 0]), np.array([3, 3, 3, 1, 0])
    statistics = position_statistics(accepted, verified, 4)
    np.testing.assert_array_equal(statistics.survival_rounds_np, [4, 3, 3, 0])
    np.testing.assert_allclose(statistics.survival_np, [3 / 4, 1 / 3, 1 / 3, np.nan])
    np.testing.assert_array_equal(statistics.conditional_rounds_np, [4, 2, 1, 0])
    np.testing.assert_allclose(statistics.conditional_np, [3 / 4, 1 / 2, 1, np.nan])


def test_no_rounds_give_nan_and_no_warning():
    empty = position_statistics(np.array([], int), np.array([], int), 2)
    assert np.isnan([empty.survival_np, empty.conditional_np]).all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), block_len=st.integers(1, 5))
def test_full_blocks_survival_is_the_product_of_conditionals(seed: int, block_len: int):
    accepted = np.random.default_rng(seed).integers(0, block_len + 1, 50)
    statistics = position_statistics(accepted, np.full(50, block_len), block_len)
    known = ~np.isnan(statistics.conditional_np)
    np.testing.assert_allclose(np.cumprod(statistics.conditional_np)[known], statistics.survival_np[known])
    tau = expected_accepted_length(jnp.asarray(np.nan_to_num(statistics.conditional_np)))
    np.testing.assert_allclose(tau, accepted.mean() + 1, rtol=1e-5)


def test_impossible_rounds_are_refused():
    for accepted, verified in [(2, 1), (-1, 0), (5, 5)]:
        with pytest.raises(InputError, match="round 1"):
            position_statistics(np.array([0, accepted]), np.array([0, verified]), 4)
