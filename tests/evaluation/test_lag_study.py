"""The simulation of the lag against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.accepted_length import PromptRounds
from dspark_jax.evaluation.lag_study import (
    Replay,
    bursty_arrivals_s,
    poisson_arrivals_s,
    replays,
    simulate,
)
from dspark_jax.speculation.calibration import unscaled
from dspark_jax.speculation.cost import CostTable

G = 2
FLAT = CostTable(  # 100 ms whatever is verified, drafting next to nothing
    request_buckets=(1, 2),
    row_buckets=(1, 2, 3, 6),
    context_buckets=(64,),
    verify_ms_np=np.array([[[100.0]] * 4, [[np.inf]] + [[100.0]] * 3]),
    draft_ms_np=np.full((2, 1), 1e-9),
    fingerprint="test",
)
STEEP = CostTable(  # every row costs as much as a whole step of plain decoding
    request_buckets=(1, 2),
    row_buckets=(1, 2, 3, 6),
    context_buckets=(64,),
    verify_ms_np=np.array([[[100.0], [200.0], [300.0], [600.0]], [[np.inf], [200.0], [300.0], [600.0]]]),
    draft_ms_np=np.full((2, 1), 10.0),
    fingerprint="test",
)
SURE = Replay(survival_np=np.ones((4, G)), accepted_np=np.full(4, G), tokens=4 * (G + 1))


@pytest.mark.parametrize("lag", [0, 1, 2, 8])
def test_certain_drafts_at_no_price_commit_whole_blocks(lag):
    alone = simulate([SURE], np.array([0.0]), FLAT, lag=lag, slots=2, context=64)
    assert alone.tokens_per_s == pytest.approx(12 / 0.4)
    assert (alone.budget, alone.concurrency) == (G, 1)


def test_hopeless_drafts_are_given_up_after_the_lag():
    never = Replay(survival_np=np.full((4, G), 1e-3), accepted_np=np.zeros(4, np.int64), tokens=40)
    budgets = [
        simulate([never], np.array([0.0]), STEEP, lag=lag, slots=1, context=64).budget for lag in (0, 1, 4)
    ]
    assert budgets[0] == 0  # knows the present round
    assert budgets[0] <= budgets[1] <= budgets[2]


def test_requests_wait_for_a_slot_and_their_speed_counts_from_their_arrival():
    both = simulate([SURE], np.array([0.0, 0.0]), FLAT, lag=1, slots=1, context=64)
    assert both.tokens_per_s == pytest.approx(24 / 0.8)
    assert both.tokens_per_s_per_request == pytest.approx((12 / 0.4 + 12 / 0.8) / 2)


def test_idle_time_is_no_work():
    apart = simulate([SURE], np.array([0.0, 1000.0]), FLAT, lag=1, slots=1, context=64)
    assert apart.tokens_per_s == pytest.approx(24 / 0.8)


def test_bursts_have_the_same_mean_rate():
    steady, bursty = (draw(2.0, 4000.0, 7) for draw in (poisson_arrivals_s, bursty_arrivals_s))
    # Poisson counts of mean 8,000 stay within five standard deviations.
    assert abs(len(steady) - 8000) < 450 and abs(len(bursty) - 8000) < 450
    assert (bursty % 20.0 < 5.0).all() and (np.diff(bursty) >= 0).all() and bursty[-1] < 4000
    assert 0.15 < (steady % 20.0 < 5.0).mean() < 0.35


def test_replays_leave_out_rounds_that_were_cut():
    record = PromptRounds(
        id="a",
        domain="d",
        new_tokens=6,
        committed_np=np.array([3, 1, 1]),
        accepted_np=np.array([2, 0, 1]),
        verified_np=np.array([2, 2, 1]),
        confidence_np=np.zeros((3, G), np.float32),
    )
    [replay] = replays([record], unscaled(G))
    assert replay.tokens == 4 and replay.accepted_np.tolist() == [2, 0]
    np.testing.assert_allclose(replay.survival_np, [[0.5, 0.25]] * 2)
    with pytest.raises(InputError, match="confidences"):
        replays([], unscaled(G))
