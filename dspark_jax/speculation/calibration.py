"""Sequential temperature scaling, and how far predicted survival is from the truth (DSpark section 3.3).

All functions take rounds in which the FULL block was verified; shorter ones would show the confident rounds
only. N rounds, G positions.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dspark_jax.core.errors import InputError

BINS = 20
GRID = np.geomspace(0.2, 5.0, 161)
"""Temperatures that the fit tries; 1 is among them."""


def survived(accepted_np: np.ndarray, block_len: int) -> np.ndarray:
    """bool [N, G]: whether the first k drafts were all accepted, from accepted counts [N]."""
    return np.asarray(accepted_np)[:, None] >= np.arange(1, block_len + 1)


def predicted(logits_np: np.ndarray, temperatures_np: np.ndarray) -> np.ndarray:
    """prod_{i<=k} sigmoid(z_i / T_i), [N, G]."""
    return np.cumprod(_sigmoid(logits_np / temperatures_np), axis=1)


def fit_temperatures(logits_np: np.ndarray, survived_np: np.ndarray, *, bins: int = BINS) -> np.ndarray:
    """T_1 .. T_G, left to right: each minimises the ECE of its position, the earlier ones being fixed.

    Among equal errors the temperature nearest to 1 wins.

    Args:
      logits_np: [N, G], confidence logits.
      survived_np: bool [N, G].
      bins: bins of the ECE.

    Returns:
      float64 [G].

    Raises:
      InputError: no rounds, or shapes that differ.
    """
    if logits_np.shape != survived_np.shape or not len(logits_np):
        raise InputError(
            given=f"logits of shape {logits_np.shape} and outcomes of shape {survived_np.shape}",
            expected="the same [rounds, G], with at least one round",
            fix="collect full-block rounds on held-out prompts first",
        )
    by_distance = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    before_N = np.ones(len(logits_np))
    temperatures = []
    for logits_N, survived_N in zip(logits_np.T, survived_np.T, strict=True):
        errors = [
            expected_calibration_error(before_N * _sigmoid(logits_N / T), survived_N, bins=bins)
            for T in by_distance
        ]
        temperatures.append(by_distance[int(np.argmin(errors))])
        before_N = before_N * _sigmoid(logits_N / temperatures[-1])
    return np.asarray(temperatures)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reliability:
    """Predictions in equal-width bins of [0, 1]: the points of a reliability diagram."""

    predicted_np: np.ndarray
    """float64 [bins]: mean prediction; NaN in an empty bin."""
    observed_np: np.ndarray
    """float64 [bins]: share that happened."""
    count_np: np.ndarray
    """int64 [bins]."""

    @property
    def error(self) -> float:
        """Expected calibration error: mean |predicted - observed|, weighted by count."""
        filled = self.count_np > 0
        gap_np = np.abs(self.predicted_np - self.observed_np)[filled]
        return float(np.sum(gap_np * self.count_np[filled]) / self.count_np.sum())


def reliability(probs_np: np.ndarray, happened_np: np.ndarray, *, bins: int = BINS) -> Reliability:
    """Bins predictions [N] with their outcomes [N]; 1.0 belongs to the last bin."""
    bin_N = np.minimum((np.asarray(probs_np) * bins).astype(np.int64), bins - 1)
    count_np = np.bincount(bin_N, minlength=bins)

    def mean(values_np: np.ndarray) -> np.ndarray:
        sums_np = np.bincount(bin_N, weights=values_np, minlength=bins)
        return np.divide(sums_np, count_np, out=np.full(bins, np.nan), where=count_np > 0)

    return Reliability(
        predicted_np=mean(np.asarray(probs_np, np.float64)),
        observed_np=mean(np.asarray(happened_np, np.float64)),
        count_np=count_np,
    )


def expected_calibration_error(probs_np: np.ndarray, happened_np: np.ndarray, *, bins: int = BINS) -> float:
    """ECE of predictions [N] in equal-width bins."""
    return reliability(probs_np, happened_np, bins=bins).error


def brier_score(probs_np: np.ndarray, happened_np: np.ndarray) -> float:
    """Mean squared error of predictions [N]."""
    return float(np.mean((np.asarray(probs_np) - np.asarray(happened_np, np.float64)) ** 2))


def auroc(scores_np: np.ndarray, happened_np: np.ndarray) -> float:
    """Chance that a random positive scores above a random negative, ties counting half; NaN without both."""
    happened_np = np.asarray(happened_np, bool)
    positives, negatives = int(happened_np.sum()), int((~happened_np).sum())
    if not positives or not negatives:
        return float("nan")
    _, inverse_np, count_np = np.unique(scores_np, return_inverse=True, return_counts=True)
    mean_rank_np = np.cumsum(count_np) - (count_np - 1) / 2
    rank_sum = mean_rank_np[inverse_np][happened_np].sum()
    return float((rank_sum - positives * (positives + 1) / 2) / (positives * negatives))


def _sigmoid(x_np: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x_np))
