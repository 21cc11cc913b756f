"""Goodness of fit of sampled tokens (needs scipy)."""

from __future__ import annotations

import numpy as np
from scipy import stats


def chi_square_p_value(counts: np.ndarray, probs: np.ndarray, *, min_expected: float = 5.0) -> float:
    """Pearson's chi-square test of counts against a law known in full.

    Cells expected fewer than `min_expected` times are pooled into one (with the smallest of the others, if
    the pool itself stays too small), in the order of their expectation, which does not look at the counts.
    A count in a cell of probability 0 is impossible, not unlikely, and gives 0.

    False alarms: if the counts do come from `probs`, the value is below alpha in a share alpha of all seeds,
    up to the chi-square approximation (good for `min_expected` of 5 or more and alpha of 1e-4 or more). A
    test with a fixed seed either always passes or always fails; alpha is the chance that the seed chosen is a
    bad one, and k such tests together have k times that.

    Args:
      counts: int [cells], independent draws.
      probs: float [cells], the law; normalised here.
      min_expected: smallest expected count of a cell that stands alone.

    Returns:
      The p-value; 1 when pooling leaves a single cell.
    """
    counts, probs = np.asarray(counts, np.float64), np.asarray(probs, np.float64)
    possible = probs > 0
    if counts[~possible].any():
        return 0.0
    counts, expected = counts[possible], probs[possible] / probs.sum() * counts.sum()

    order = np.argsort(expected, kind="stable")
    counts, expected = counts[order], expected[order]
    enough = int(np.searchsorted(np.cumsum(expected), min_expected)) + 1
    pooled = max(enough, int(np.sum(expected < min_expected)))
    cells, cells_expected = _pool(counts, pooled), _pool(expected, pooled)
    statistic = np.sum((cells - cells_expected) ** 2 / cells_expected)
    return float(stats.chi2.sf(statistic, cells.size - 1)) if cells.size > 1 else 1.0


def _pool(values: np.ndarray, pooled: int) -> np.ndarray:
    """The first `pooled` values added up, then the others."""
    return np.concatenate([[values[:pooled].sum()], values[pooled:]])
