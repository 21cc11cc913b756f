"""Calibration metrics against scikit-learn and by hand; STS finds temperatures that are really there."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.speculation import calibration

G = 3


def test_ece_by_hand():
    probs, happened = np.array([0.1, 0.12, 0.9, 1.0]), np.array([0, 1, 1, 1])
    # Bins of width 0.5: (0.11 predicted, 0.5 observed) and (0.95, 1.0).
    assert calibration.expected_calibration_error(probs, happened, bins=2) == pytest.approx(
        0.5 * (0.39 + 0.05)
    )
    diagram = calibration.reliability(probs, happened, bins=4)
    assert diagram.count_np.tolist() == [2, 0, 0, 2]
    assert np.isnan(diagram.predicted_np[1])


def test_auroc_and_brier_agree_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    probs = np.round(rng.random(500), 2)  # with ties
    happened = rng.random(500) < probs
    assert calibration.auroc(probs, happened) == pytest.approx(
        metrics.roc_auc_score(happened, probs), abs=1e-12
    )
    assert calibration.brier_score(probs, happened) == pytest.approx(
        metrics.brier_score_loss(happened, probs), abs=1e-12
    )


def test_ece_agrees_with_scikit_learns_calibration_curve():
    curve = pytest.importorskip("sklearn.calibration").calibration_curve
    rng = np.random.default_rng(1)
    probs = rng.random(2000)
    happened = rng.random(2000) < probs**2
    observed, predicted = curve(happened, probs, n_bins=calibration.BINS)
    counts = np.bincount((probs * calibration.BINS).astype(int), minlength=calibration.BINS)
    wanted = np.sum(np.abs(observed - predicted) * counts) / counts.sum()
    assert calibration.expected_calibration_error(probs, happened) == pytest.approx(wanted, abs=1e-12)


def test_without_both_outcomes_there_is_no_auroc():
    assert np.isnan(calibration.auroc(np.array([0.1, 0.9]), np.array([1, 1])))


def test_sequential_temperatures_are_found_again():
    rng = np.random.default_rng(2)
    true = np.array([2.0, 0.5, 1.5])
    logits = rng.normal(1.0, 2.0, (40_000, G))
    conditional = 1 / (1 + np.exp(-logits / true))
    survived = np.cumprod(rng.random((len(logits), G)) < conditional, axis=1).astype(bool)
    found = calibration.fit_scaling(logits, survived, shifted=False)
    np.testing.assert_allclose(found, [true, np.zeros(G)], rtol=0.12)
    for k in range(G):
        before = calibration.expected_calibration_error(
            calibration.predicted(logits, calibration.unscaled(G))[:, k], survived[:, k]
        )
        after = calibration.expected_calibration_error(
            calibration.predicted(logits, found)[:, k], survived[:, k]
        )
        assert after < min(0.01, before / 2)


def test_the_fit_is_sequential():
    """An error at one position must not be repaired at the next one."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0.5, 2.0, (40_000, 2))
    conditional = 1 / (1 + np.exp(-logits / np.array([3.0, 1.0])))
    survived = np.cumprod(rng.random(logits.shape) < conditional, axis=1).astype(bool)
    found = calibration.fit_scaling(logits, survived, shifted=False)
    np.testing.assert_allclose(found[0], [3.0, 1.0], rtol=0.15)


def test_a_constant_error_is_mended_by_a_shift():
    rng = np.random.default_rng(4)
    logits = rng.normal(0.5, 2.0, (20_000, 2))
    conditional = 1 / (1 + np.exp(-(logits / 2 - np.array([1.0, 0.5]))))
    survived = np.cumprod(rng.random(logits.shape) < conditional, axis=1).astype(bool)
    found = calibration.fit_scaling(logits, survived)
    np.testing.assert_allclose(found, [[2.0, 2.0], [-1.0, -0.5]], rtol=0.3)
    after, without = (
        calibration.expected_calibration_error(calibration.predicted(logits, scaling)[:, 0], survived[:, 0])
        for scaling in (found, calibration.fit_scaling(logits, survived, shifted=False))
    )
    assert after < without / 10


def test_outcomes_from_accepted_counts():
    assert calibration.survived(np.array([0, 2, 3]), G).tolist() == [
        [False, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_nothing_to_fit_is_refused():
    with pytest.raises(InputError, match="full-block rounds"):
        calibration.fit_scaling(np.zeros((0, G)), np.zeros((0, G), bool))
