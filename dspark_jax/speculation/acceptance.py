"""Acceptance: what a drafter's conditional rates promise, and what recorded rounds delivered."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from dspark_jax.core.errors import InputError


def survival(conditional_G: Array) -> Array:
    """a_j = prod_{i<=j} c_i over the last axis: the probability that the first j drafts are all accepted."""
    return jnp.cumprod(conditional_G, axis=-1)


def expected_accepted_length(accept_rates_G: Array) -> Array:
    """tau = 1 + sum_k prod_{j<=k} c_j: tokens committed per round, the target's own token included.

    Args:
      accept_rates_G: [..., G], conditional acceptance of each draft token given that all earlier ones passed.

    Returns:
      [...], between 1 and G + 1.
    """
    return 1.0 + jnp.sum(survival(accept_rates_G), axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionStatistics:
    """Acceptance at each draft position k = 1..G; a rate that no round speaks for is NaN.

    With adaptive lengths both rates describe the rounds that chose to verify position k, which are the
    confident ones: compare drafters on full-block rounds.
    """

    survival_np: np.ndarray
    """float64 [G]: share of `survival_rounds_np` in which positions 1..k were all accepted."""
    survival_rounds_np: np.ndarray
    """int64 [G]: rounds that verified position k."""
    conditional_np: np.ndarray
    """float64 [G]: share of `conditional_rounds_np` in which position k was accepted."""
    conditional_rounds_np: np.ndarray
    """int64 [G]: rounds that verified position k and accepted all positions before it."""


def position_statistics(
    accepted_np: np.ndarray, verified_np: np.ndarray, block_len: int, times_np: np.ndarray | None = None
) -> PositionStatistics:
    """Acceptance per position from recorded rounds.

    Args:
      accepted_np: int [rounds], draft tokens accepted.
      verified_np: int [rounds], draft tokens verified; 0 for a round of plain decoding.
      block_len: G.
      times_np: int [rounds], how often each of them occurred; once by default.

    Raises:
      InputError: unless 0 <= accepted <= verified <= block_len in every round.
    """
    accepted_np, verified_np = np.asarray(accepted_np), np.asarray(verified_np)
    impossible_np = (accepted_np < 0) | (accepted_np > verified_np) | (verified_np > block_len)
    if impossible_np.any():
        first = int(np.flatnonzero(impossible_np)[0])
        raise InputError(
            given=f"round {first}: {accepted_np[first]} accepted of {verified_np[first]} verified",
            expected=f"0 <= accepted <= verified <= {block_len}",
            fix="count draft tokens only; the target's own token is neither accepted nor verified",
        )
    positions_G = np.arange(1, block_len + 1)
    reached = verified_np[:, None] >= positions_G
    passed = accepted_np[:, None] >= positions_G
    tried = reached & (accepted_np[:, None] >= positions_G - 1)
    times_np = np.ones(len(accepted_np), np.int64) if times_np is None else np.asarray(times_np, np.int64)
    passed_rounds, reached_rounds, tried_rounds = times_np @ passed, times_np @ reached, times_np @ tried
    return PositionStatistics(
        survival_np=_rate(passed_rounds, reached_rounds),
        survival_rounds_np=reached_rounds,
        conditional_np=_rate(passed_rounds, tried_rounds),
        conditional_rounds_np=tried_rounds,
    )


def _rate(hits_G: np.ndarray, rounds_G: np.ndarray) -> np.ndarray:
    return np.divide(hits_G, rounds_G, out=np.full(hits_G.shape, np.nan), where=rounds_G > 0)
