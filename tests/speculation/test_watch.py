"""The online watch against simulated drafters whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit

from dspark_jax.core.errors import InputError
from dspark_jax.speculation.calibration import expected_calibration_error, predicted, unscaled
from dspark_jax.speculation.watch import (
    MOST_DOMAINS,
    CalibrationWatch,
    Change,
    Rounds,
    Watch,
    refit,
    significant_error,
)

G = 4
RATE = 0.01


def scaling(temperature: float = 1.0, shift: float = 0.0) -> np.ndarray:
    return np.stack([np.full(G, temperature), np.full(G, shift)])


def simulate(
    rng: np.random.Generator, count: int, *, full: bool = False, rate: float | None = None
) -> Rounds:
    """Rounds in which c_k = sigmoid(z_k) is the truth, or `rate` is, whatever z_k says.

    Lengths follow the predictions, as a scheduler's do: the hopeful positions are verified.
    """
    logits_np = rng.normal(1.0, 1.5, (count, G))
    conditional_np = expit(logits_np) if rate is None else np.full_like(logits_np, rate)
    accepted_np = np.cumprod(rng.random((count, G)) < conditional_np, axis=1).sum(1)
    hopeful_np = predicted(logits_np, unscaled(G)) > rng.uniform(0.2, 0.8, (count, 1))
    verified_np = np.full(count, G) if full else hopeful_np.sum(1)
    return Rounds(
        logits_np=logits_np, verified_np=verified_np, accepted_np=np.minimum(accepted_np, verified_np)
    )


def error(rounds: Rounds, scaling_np: np.ndarray, seen_np: np.ndarray | None = None) -> np.ndarray:
    return significant_error(
        predicted(rounds.logits_np, scaling_np),
        rounds.survived_np,
        rounds.seen_np if seen_np is None else seen_np,
        false_alarm_rate=RATE,
    )


def test_true_predictions_raise_no_alarm():
    rng = np.random.default_rng(0)
    alarms = sum(error(simulate(rng, 256), unscaled(G)).any() for _ in range(1000))
    assert alarms <= 1000 * RATE


def test_verified_positions_are_seen_without_bias_and_only_these():
    """Behind a rejection the outcome is known without verification, but only if it is a failure."""
    rounds = simulate(np.random.default_rng(1), 40_000)
    a_np, seen_np = predicted(rounds.logits_np, unscaled(G)), rounds.seen_np
    for k in range(G):
        mean, variance = a_np[seen_np[:, k], k].mean(), (a_np * (1 - a_np))[seen_np[:, k], k].mean()
        deviation = np.sqrt(variance / seen_np[:, k].sum())
        assert abs(rounds.survived_np[seen_np[:, k], k].mean() - mean) < 4 * deviation

    known_np = seen_np | (rounds.accepted_np < rounds.verified_np)[:, None]
    assert (error(rounds, unscaled(G), known_np)[0, 1:] > 0).all()


@pytest.mark.parametrize("wrong", [(0.4, 0.0), (2.5, 0.0), (1.0, 1.0), (1.0, -1.0)], ids=str)
def test_a_wrong_scaling_is_found_and_mended(wrong):
    rng = np.random.default_rng(2)
    present_np = scaling(*wrong)
    rounds = simulate(rng, 1024)
    assert error(rounds, present_np).sum(0).max() > Watch().margin
    mended_np = refit(rounds, present_np)

    later = simulate(rng, 20_000)

    def true_error(scaling_np: np.ndarray) -> float:
        a_np = predicted(later.logits_np, scaling_np)
        of_positions = [
            expected_calibration_error(a_np[seen_N, k], later.survived_np[seen_N, k])
            for k, seen_N in enumerate(later.seen_np.T)
        ]
        return float(np.mean(of_positions))

    assert true_error(mended_np) < true_error(present_np) / 2


def test_a_position_that_is_hardly_seen_keeps_its_scaling():
    rounds = simulate(np.random.default_rng(3), 512, full=True)
    short = Rounds(
        logits_np=rounds.logits_np,
        verified_np=np.full(512, 2),
        accepted_np=np.minimum(rounds.accepted_np, 2),
    )
    mended_np = refit(short, scaling(0.3, 0.5))
    np.testing.assert_array_equal(mended_np[:, 2:], scaling(0.3, 0.5)[:, 2:])
    assert (mended_np[:, 0] != scaling(0.3, 0.5)[:, 0]).any()


SMALL = Watch(window=256, probe_every=2, starved_after=20)


def told(watch: CalibrationWatch, domain: str | None, rounds: Rounds) -> list[Change]:
    """What a watch finds in these rounds, told eight at a time."""
    found = []
    for start in range(0, len(rounds.logits_np), 8):
        findings = watch.note([domain] * 8, rounds.at(range(start, start + 8)))
        assert all(finding.domain == domain for finding in findings)
        found += [finding.change for finding in findings]
    return found


def test_a_domain_falls_back_and_comes_back():
    """Its truth changes with every window, so that no fit helps; then it stays what it was."""
    rng = np.random.default_rng(4)
    watch = CalibrationWatch(SMALL, block_len=G)
    found = []
    while Change.FALLBACK not in found:
        rate = 0.9 if len(found) % 2 else 0.1
        found += told(watch, "odd", simulate(rng, 256, full=True, rate=rate))
        assert told(watch, "even", simulate(rng, 256)) == []
        assert len(found) < 8
    # Promises that were more than kept are no reason to fall back.
    assert found.count(Change.REFIT) >= 3
    trusted_np, _ = watch.who_may(["odd", "even", None, "odd"])
    assert trusted_np.tolist() == [False, True, True, False]

    probes = [bool(watch.who_may(["odd", "even"])[1][0]) for _ in range(9)]
    assert probes.count(True) == 3
    while Change.RECOVERY not in found:
        found += told(watch, "odd", simulate(rng, 64, full=True))
        assert len(found) < 12
    assert watch.who_may(["odd"])[0].all()
    assert not np.array_equal(watch.scaling("odd"), watch.scaling("even"))


def test_probes_of_a_domain_that_stays_wrong_become_rare():
    rng = np.random.default_rng(5)
    watch = CalibrationWatch(SMALL, block_len=G)
    rates = [0.9, 0.1] * 10
    while watch.who_may([None])[0].all():
        told(watch, None, simulate(rng, 256, full=True, rate=rates.pop()))

    def gap() -> int:
        probes = np.flatnonzero([watch.who_may([None])[1][0] for _ in range(60)])
        return int(np.diff(probes)[0])

    before = gap()
    for rate in (0.95, 0.05, 0.95, 0.05, 0.95):
        told(watch, None, simulate(rng, 64, full=True, rate=rate))
    assert gap() > before


def test_who_never_verifies_is_tried_now_and_then():
    """Predictions that are far too low would let nothing be verified, and never be found out."""
    watch = CalibrationWatch(SMALL, block_len=G)
    watch.calibrate(scaling(1.0, -5.0))
    probes = [bool(watch.who_may([None, None])[1].all()) for _ in range(64)]
    assert np.flatnonzero(probes).tolist() == [20, 41, 62]
    found = told(watch, None, simulate(np.random.default_rng(6), 256, full=True))
    assert found == [Change.REFIT]
    assert (watch.scaling(None)[1] > -3.0).all()


def test_a_new_calibration_begins_again_and_crowds_share_a_watch():
    watch = CalibrationWatch(SMALL, block_len=G)
    for number in range(2 * MOST_DOMAINS):
        watch.who_may([f"{number}"])
    rounds = simulate(np.random.default_rng(7), 256, full=True, rate=0.05)
    assert told(watch, None, rounds) == [Change.REFIT]
    assert not np.array_equal(watch.scaling("another"), watch.scaling("3"))
    watch.calibrate(scaling(2.0))
    np.testing.assert_array_equal(watch.scaling("another"), scaling(2.0))


@pytest.mark.parametrize("bad", [{"window": 0}, {"margin": 0.0}, {"false_alarm_rate": 1.0}], ids=str)
def test_impossible_settings(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        Watch(**bad)
