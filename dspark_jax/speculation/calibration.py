"""Sequential temperature scaling, and how far predicted survival is from the truth (DSpark section 3.3).

A scaling [2, G] holds temperatures and shifts: the conditional acceptance is sigmoid(z / T + shift).
Sequential Temperature Scaling has no shifts. They are for what a temperature cannot mend: a head that was
trained to predict acceptance at temperature 1 is wrong by a constant where decoding is greedy.

Figures are of rounds in which the FULL block was verified; shorter ones would show the confident rounds only.
A fit takes what was verified (`watch.py` says why that is right). N rounds, G positions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
from scipy.special import expit

from dspark_jax.core.errors import InputError

BINS = 20
TEMPERATURES = np.geomspace(0.2, 5.0, 161)
"""What the fit tries; 1 is among them."""
SHIFTS = np.linspace(-3.0, 3.0, 61)
"""What the fit tries for each temperature, if it may; 0 is among them."""
COARSE = 5
"""Only every so many values of both are tried at first; those that change nothing are among them."""


def survived(accepted_np: np.ndarray, block_len: int) -> np.ndarray:
    """bool [N, G]: whether the first k drafts were all accepted, from accepted counts [N]."""
    return np.asarray(accepted_np)[:, None] >= np.arange(1, block_len + 1)


def unscaled(block_len: int) -> np.ndarray:
    """The scaling [2, G] that changes nothing."""
    return np.stack([np.ones(block_len), np.zeros(block_len)])


def scaled(logits_np: np.ndarray, scaling_np: np.ndarray) -> np.ndarray:
    """z / T + shift, [N, G]."""
    return logits_np / scaling_np[0] + scaling_np[1]


def predicted(logits_np: np.ndarray, scaling_np: np.ndarray) -> np.ndarray:
    """prod_{i<=k} sigmoid(z_i / T_i + shift_i), [N, G]."""
    return np.cumprod(expit(scaled(logits_np, scaling_np)), axis=1)


def fit_scaling(
    logits_np: np.ndarray,
    survived_np: np.ndarray,
    *,
    shifted: bool = True,
    bins: int = BINS,
    seen_np: np.ndarray | None = None,
    fewest: int = 1,
) -> np.ndarray:
    """Position by position from the left: each minimises its own ECE, the earlier ones being fixed.

    Among equal errors the scaling that changes least wins.

    Args:
      logits_np: [N, G], confidence logits.
      survived_np: bool [N, G].
      shifted: also fit shifts; without them this is Sequential Temperature Scaling.
      bins: bins of the ECE.
      seen_np: bool [N, G], where there is an outcome; everywhere by default.
      fewest: outcomes that a position needs to be scaled at all.

    Returns:
      float64 [2, G].

    Raises:
      InputError: no rounds, or shapes that differ.
    """
    if logits_np.shape != survived_np.shape or not len(logits_np):
        raise InputError(
            given=f"logits of shape {logits_np.shape} and outcomes of shape {survived_np.shape}",
            expected="the same [rounds, G], with at least one round",
            fix="collect full-block rounds on held-out prompts first",
        )
    seen_np = np.ones(survived_np.shape, bool) if seen_np is None else seen_np
    before_N = np.ones(len(logits_np))
    scaling = []
    for logits_N, survived_N, seen_N in zip(logits_np.T, survived_np.T, seen_np.T, strict=True):
        T, shift = 1.0, 0.0
        if seen_N.sum() >= fewest:
            best_of = functools.partial(_best, logits_N[seen_N], before_N[seen_N], survived_N[seen_N], bins)
            if shifted:  # roughly everywhere, then finely around the best
                T, shift = best_of(TEMPERATURES[::COARSE], SHIFTS[::COARSE])
                T, shift = best_of(_around(TEMPERATURES, T), _around(SHIFTS, shift))
            else:
                T, shift = best_of(TEMPERATURES, (0.0,))
        scaling.append((T, shift))
        before_N = before_N * expit(logits_N / T + shift)
    return np.array(scaling).T


def _best(logits_N, before_N, survived_N, bins: int, temperatures, shifts) -> tuple[float, float]:
    """The temperature and the shift of the smallest ECE."""
    grid = sorted(itertools.product(temperatures, shifts), key=lambda at: abs(np.log(at[0])) + abs(at[1]))
    errors = [
        expected_calibration_error(before_N * expit(logits_N / T + shift), survived_N, bins=bins)
        for T, shift in grid
    ]
    return grid[int(np.argmin(errors))]


def _around(values: np.ndarray, centre: float) -> np.ndarray:
    at = int(np.argmin(np.abs(values - centre)))
    return values[max(at - COARSE, 0) : at + COARSE + 1]


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
    """ECE of predictions [N] in equal-width bins: `Reliability.error`, in one pass for whoever fits."""
    bin_N = np.minimum((np.asarray(probs_np) * bins).astype(np.int64), bins - 1)
    return float(np.abs(np.bincount(bin_N, np.asarray(probs_np) - happened_np)).sum() / len(bin_N))


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
