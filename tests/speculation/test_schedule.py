"""The scheduler: who is admitted, what budget is best, and that output stays the target's."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.core.errors import InputError
from dspark_jax.speculation.cost import CostTable
from dspark_jax.speculation.schedule import (
    Lagged,
    ScheduleMemory,
    admit,
    algorithm1,
    choose,
    predicted_survival,
)
from dspark_jax.testing.enumeration import TinyDecoding, continuation_law, largest_difference, target_law

G = 3
CONTEXT = 100


def table_of(verify_ms, *, draft_ms=(0.0001,), requests=(1,)) -> CostTable:
    """A table whose row buckets are R .. R + len(verify_ms) - 1 for the largest R; one context bucket."""
    rows = tuple(range(requests[-1], requests[-1] + len(verify_ms)))
    return CostTable(
        request_buckets=requests,
        row_buckets=rows,
        context_buckets=(CONTEXT,),
        verify_ms_np=np.broadcast_to(np.asarray(verify_ms, float)[:, None], (len(requests), len(rows), 1)),
        draft_ms_np=np.broadcast_to(np.asarray(draft_ms, float)[:, None], (len(requests), 1)),
        fingerprint="test",
    )


def random_survival(rng, requests: int) -> np.ndarray:
    return np.cumprod(rng.uniform(0.1, 1.0, (requests, G)), axis=1)


everyone = jnp.ones


def test_survival_by_hand():
    logits = jnp.asarray([[0.0, 2.0, jnp.nan]])
    ours = predicted_survival(logits, jnp.asarray([[1.0, 2.0, 1.0], [0.0, 0.5, 0.0]]))
    np.testing.assert_allclose(ours, [[0.5, 0.5 / (1 + np.exp(-1.5)), 0.0]], rtol=1e-6)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), budget=st.integers(0, 14))
def test_admits_the_most_certain_tokens(seed: int, budget: int):
    rng = np.random.default_rng(seed)
    survival, drafted = random_survival(rng, 4), rng.random(4) < 0.7
    lengths = np.asarray(admit(jnp.asarray(survival), jnp.asarray(drafted), budget))
    assert lengths.sum() == min(budget, G * drafted.sum())
    assert (lengths[~drafted] == 0).all()
    taken = [survival[r, j] for r in range(4) for j in range(lengths[r])]
    left = [survival[r, j] for r in range(4) if drafted[r] for j in range(lengths[r], G)]
    assert not taken or not left or min(taken) >= max(left) - 1e-6  # float32 ties


def test_ties_go_to_the_earlier_position_then_to_the_lower_request():
    certain = jnp.ones((3, G))  # a saturated sigmoid is exactly 1
    lengths = [np.asarray(admit(certain, everyone(3, bool), budget)).tolist() for budget in range(6)]
    assert lengths == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1]]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), slot=st.integers(0, G - 1), budget=st.integers(0, 2 * G))
def test_whether_a_token_is_admitted_ignores_what_it_is(seed: int, slot: int, budget: int):
    """c_{j+1}.. depend on x_j: changing them must not change whether x_j is verified."""
    rng = np.random.default_rng(seed)
    conditional, round_ms = rng.uniform(0, 1, (2, G)), jnp.asarray(rng.uniform(1, 9, 2 * G + 1))
    conditional[rng.random((2, G)) < 0.3] = 1.0
    other = conditional.copy()
    other[0, slot + 1 :] = rng.uniform(0, 1, G - slot - 1)
    kept = []
    for rates in (conditional, other):
        survival = jnp.cumprod(jnp.asarray(rates, jnp.float32), axis=1)
        lengths = (
            admit(survival, everyone(2, bool), budget),
            algorithm1(survival, everyone(2, bool), 2, round_ms),
        )
        kept.append([int(length_B[0]) > slot for length_B in lengths])
    assert kept[0] == kept[1]


def law_of(verify_length) -> dict:
    target, drafter = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    decoding = TinyDecoding(
        target=lambda prefix: target,
        drafter=lambda prefix, drafted: drafter,
        verify_length=verify_length,
        block_len=2,
    )
    return {"ours": continuation_law(decoding, (), 3), "target": target_law(decoding.target, (), 3)}


def test_the_papers_counterexample():
    """R=1, G=2, a_1 = 0.8; after x_1 = A c_2 is 0.9, after B it is 0. SPS = 1, 0.5, 0.45."""
    round_ms = 1 / np.array([1.0, 0.5, 0.45])

    def survival_after(block) -> np.ndarray:
        return np.array([[0.8, 0.8 * (0.9 if block[0] == 0 else 0.0)]])

    def retrospective(prefix, block) -> int:
        theta = (1 + np.concatenate([[0.0], np.cumsum(survival_after(block)[0])])) / round_ms
        return int(np.argmax(theta))

    def synchronous(prefix, block) -> int:
        lengths = algorithm1(jnp.asarray(survival_after(block)), everyone(1, bool), 1, jnp.asarray(round_ms))
        return int(lengths[0])

    assert [retrospective((), block) for block in ((0, 0), (1, 0))] == [2, 0]
    biased = law_of(retrospective)
    assert largest_difference(biased["ours"], biased["target"]) > 0.05
    for block in itertools.product(range(2), repeat=2):
        assert synchronous((), block) == 0
    for verify_length in (synchronous, *(lambda prefix, block, n=n: n for n in range(3))):
        law = law_of(verify_length)
        assert largest_difference(law["ours"], law["target"]) < 1e-6


def test_admission_by_present_survival_is_lossless():
    """Two requests share a budget; the survival of this one depends on its tokens."""

    def verify_length(prefix, block) -> int:
        own = [0.9, 0.9 * (0.95 if block[0] == 0 else 0.1)]
        survival = jnp.asarray([own, [0.88, 0.5]])
        return int(admit(survival, everyone(2, bool), 2)[0])

    assert {verify_length((), block) for block in itertools.product(range(2), repeat=2)} == {1}
    law = law_of(verify_length)
    assert largest_difference(law["ours"], law["target"]) < 1e-6


STAIRCASE_MS = (10.0, 18.0, 18.5, 19.0, 30.0, 30.5, 31.0)
"""One request or two with six draft tokens at most: steps at 1 and at 4."""


def test_on_a_staircase_algorithm1_stops_early_and_the_search_does_not():
    survival = np.array([[0.7, 0.65, 0.6]])
    table = table_of(STAIRCASE_MS[:4])
    theta = (1 + np.concatenate([[0.0], np.cumsum(survival[0])])) / np.asarray(STAIRCASE_MS[:4])
    assert np.argmax(theta) == 3 and theta[1] < theta[0]
    assert np.asarray(
        algorithm1(jnp.asarray(survival), everyone(1, bool), 1, jnp.asarray(STAIRCASE_MS[:4]))
    ).tolist() == [0]
    decision = choose(survival, table, CONTEXT)
    assert decision.budget == 3 and decision.tokens_per_ms == pytest.approx(theta[3], rel=1e-3)


def brute_force(survival: np.ndarray, table: CostTable) -> float:
    """The best tokens per ms over every set of drafting requests and every set of lengths."""
    R = len(survival)
    best = R / table.verify_ms(R, R, CONTEXT)
    for lengths in itertools.product(range(G + 1), repeat=R):
        tokens = R + sum(survival[r, :length].sum() for r, length in enumerate(lengths))
        drafting = sum(length > 0 for length in lengths)
        ms = table.verify_ms(R, R + sum(lengths), CONTEXT) + table.draft_ms(drafting, CONTEXT)
        best = max(best, tokens / ms)
    return best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), requests=st.integers(1, 3))
def test_the_search_equals_brute_force_when_drafting_has_one_price(seed: int, requests: int):
    rng = np.random.default_rng(seed)
    survival = random_survival(rng, requests)
    rows_ms = 10 + np.cumsum(rng.choice([0.0, 0.1, 6.0], G * requests + 1))
    table = table_of(rows_ms, draft_ms=(rng.uniform(0.1, 5),), requests=(requests,))
    assert choose(survival, table, CONTEXT).tokens_per_ms == pytest.approx(
        brute_force(survival, table), rel=1e-9
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), requests=st.integers(1, 3))
def test_algorithm1_is_optimal_when_every_token_costs_the_same(seed: int, requests: int):
    """Concave gains over an affine cost: Theta is unimodal."""
    rng = np.random.default_rng(seed)
    survival = random_survival(rng, requests)
    round_ms = 10 + rng.uniform(0.1, 5) * np.arange(requests * G + 1)
    lengths = np.asarray(
        algorithm1(jnp.asarray(survival), everyone(requests, bool), requests, jnp.asarray(round_ms))
    )
    gains = np.concatenate([[0.0], np.cumsum(np.sort(survival.ravel())[::-1])])
    theta = (requests + gains) / round_ms
    assert theta[lengths.sum()] == pytest.approx(theta.max(), rel=1e-5)


def test_a_request_that_does_not_pay_is_left_out_of_the_draft():
    survival = np.array([[0.9, 0.85, 0.8], [0.05, 0.01, 0.0]])
    table = table_of([10.0] * 7, draft_ms=(1.0, 8.0), requests=(1, 2))
    decision = choose(survival, table, CONTEXT)
    assert decision.drafted_np.tolist() == [True, False] and decision.budget == 3


def test_nothing_is_drafted_where_nothing_pays():
    decision = choose(np.full((1, G), 0.2), table_of([10.0, 20.0, 30.0, 40.0]), CONTEXT)
    assert decision.budget == 0 and not decision.drafted_np.any()


def rounds_until_drafting(memory: ScheduleMemory, table: CostTable, limit: int) -> int:
    for number in range(limit):
        decision = memory.decide(np.ones(1, bool), table, CONTEXT)
        if decision.drafted_np[0]:
            return number
        memory.note(decision.drafted_np, np.zeros((1, G)))
    return limit


def test_survivals_are_used_two_rounds_later_and_the_first_request_counts_as_certain():
    table = table_of([10.0, 16.0, 22.0, 28.0])
    memory = ScheduleMemory(Lagged(freshness=1.0, probe_every=5), slots=1, block_len=G)
    poor = np.full((1, G), 0.1)
    budgets = []
    for _ in range(4):
        decision = memory.decide(np.ones(1, bool), table, CONTEXT)
        budgets.append(decision.budget)
        memory.note(decision.drafted_np, poor)
    # Certain at first; the first poor round is visible to the third one.
    assert budgets == [3, 3, 0, 0]
    assert rounds_until_drafting(memory, table, 20) == 3  # the probe


def test_a_later_request_counts_as_what_is_usual():
    table = table_of([10.0, 16.0, 22.0, 28.0])
    memory = ScheduleMemory(Lagged(), slots=1, block_len=G)
    for survival, budget in ((0.1, 0), (0.9, 3)):
        for _ in range(20):
            memory.note(np.ones(1, bool), np.full((1, G), survival))
        memory.forget(0)
        assert memory.decide(np.ones(1, bool), table, CONTEXT).budget == budget


def test_probes_verify_nothing_come_together_and_become_rare():
    table = table_of([10.0] + [40.0] * 12, requests=(1, 2, 4), draft_ms=(1.0, 1.0, 1.0))
    memory = ScheduleMemory(Lagged(probe_every=4), slots=4, block_len=G)
    poor = np.full((4, G), 0.1)
    for _ in range(3):
        memory.note(np.ones(4, bool), poor)
    active = np.array([True, True, True, False])
    memory.forget(2)
    probes = []
    for number in range(80):
        decision = memory.decide(active, table, CONTEXT)
        assert decision.budget == 0
        if decision.drafted_np.any():
            assert decision.drafted_np.tolist() == active.tolist()
            probes.append(number)
        memory.note(decision.drafted_np, poor)
    assert np.diff(probes).tolist() == [9, 17, 33]


def test_a_late_round_does_not_reach_the_next_occupant():
    table = table_of([10.0, 16.0, 22.0, 28.0])
    memory = ScheduleMemory(Lagged(freshness=1.0), slots=1, block_len=G)
    memory.note(np.ones(1, bool), np.zeros((1, G)))
    memory.forget(0)
    for _ in range(2):
        memory.note(np.zeros(1, bool), np.zeros((1, G)))
    assert memory.decide(np.ones(1, bool), table, CONTEXT).budget == 3


def test_same_lengths_under_jit():
    survival = jnp.asarray(random_survival(np.random.default_rng(0), 4))
    drafted = jnp.asarray([True, False, True, True])
    np.testing.assert_array_equal(jax.jit(admit)(survival, drafted, 5), admit(survival, drafted, 5))


@pytest.mark.parametrize("bad", [{"lag": 0}, {"freshness": 0.0}, {"probe_every": 0}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(InputError, match="lossless"):
        Lagged(**bad)
