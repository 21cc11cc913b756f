"""What the scheduler's lag costs: recorded rounds replayed under load, on a table of measured times.

A simulation, not a measurement of the engine: it allows lag 0, which no lossless engine can run, and it can
afford hours of arrivals. Every request replays the rounds that an evaluation recorded for it with whole
blocks verified, in order: with l tokens verified, min(accepted, l) + 1 tokens are committed. When fewer
tokens were committed than in the recording, it starts again with the first round.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.accepted_length import PromptRounds
from dspark_jax.speculation.calibration import scaled
from dspark_jax.speculation.cost import CostTable
from dspark_jax.speculation.schedule import Decision, Lagged, ScheduleMemory, admit, choose

ORACLE = 0
"""The lag at which the budget comes from the present round's survivals: a bound, and not lossless."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """One recorded answer.

    Attributes:
      survival_np: float [rounds, G], predicted survivals.
      accepted_np: int [rounds], drafts that the target would have accepted.
      tokens: length of the answer.
    """

    survival_np: np.ndarray
    accepted_np: np.ndarray
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated:
    """What a simulation came to."""

    tokens_per_s: float
    """Tokens of all requests over the time in which any was there."""
    tokens_per_s_per_request: float
    """Mean over requests of tokens over the time from arrival to the last token."""
    budget: float
    """Draft tokens verified in a round."""
    concurrency: float
    """Requests in a round."""


def replays(records: Sequence[PromptRounds], scaling_np: np.ndarray) -> list[Replay]:
    """Answers to replay, without rounds that a stop token cut.

    Args:
      records: full-block rounds with confidence logits.
      scaling_np: [2, G], of the confidence logits.

    Raises:
      InputError: no record has confidences.
    """
    found = []
    for record in records:
        if not len(record.confidence_np):
            continue
        whole = record.verified_np == record.confidence_np.shape[1]
        if whole.any():
            logits_NG = scaled(record.confidence_np[whole].astype(np.float64), scaling_np)
            survival_np = np.cumprod(1 / (1 + np.exp(-logits_NG)), axis=1)
            accepted_np = record.accepted_np[whole]
            found.append(
                Replay(survival_np=survival_np, accepted_np=accepted_np, tokens=int((accepted_np + 1).sum()))
            )
    if not found:
        raise InputError(
            given="no full-block round with confidences",
            expected="rounds of a drafter with a confidence head",
            fix="evaluate a DSpark drafter first",
        )
    return found


def poisson_arrivals_s(rate_per_s: float, seconds: float, seed: int) -> np.ndarray:
    """Arrival times of a Poisson process."""
    generator = np.random.default_rng(seed)
    gaps_np = generator.exponential(1 / rate_per_s, size=int(2 * rate_per_s * seconds) + 64)
    times_np = np.cumsum(gaps_np)
    return times_np[times_np < seconds]


def bursty_arrivals_s(
    rate_per_s: float, seconds: float, seed: int, *, period_s: float = 20.0, share: float = 0.25
) -> np.ndarray:
    """Arrivals at the same mean rate, all of them in the first `share` of every period."""
    times_np = poisson_arrivals_s(rate_per_s / share, seconds * share, seed)
    busy_s = period_s * share
    return times_np // busy_s * period_s + times_np % busy_s


@dataclasses.dataclass(kw_only=True)
class _Running:
    replay: Replay
    arrival_s: float
    round: int = 0
    tokens: int = 0


def simulate(
    answers: Sequence[Replay],
    arrivals_s: np.ndarray,
    table: CostTable,
    *,
    lag: int,
    slots: int,
    context: int,
    seed: int = 0,
) -> Simulated:
    """Runs the lagged scheduler over these arrivals.

    Args:
      answers: what requests replay, drawn at random.
      arrivals_s: ascending times.
      table: ms of every shape.
      lag: rounds between a survival and its use; 0 is `ORACLE`.
      slots: requests decoded at the same time; the others wait.
      context: tokens of context that rounds are priced at.
      seed: which answer each arrival replays.
    """
    block_len = answers[0].survival_np.shape[1]
    drawn = np.random.default_rng(seed).integers(len(answers), size=len(arrivals_s))
    waiting = collections.deque(
        _Running(replay=answers[i], arrival_s=float(at)) for i, at in zip(drawn, arrivals_s, strict=True)
    )
    memory = ScheduleMemory(Lagged(lag=max(lag, 1)), slots=slots, block_len=block_len)
    seats: dict[int, _Running] = {}
    now_s = busy_s = 0.0
    speeds, budgets, present = [], [], []
    while waiting or seats:
        if not seats:
            now_s = max(now_s, waiting[0].arrival_s)
        for slot in range(slots):
            if slot not in seats and waiting and waiting[0].arrival_s <= now_s:
                seats[slot] = waiting.popleft()
                memory.forget(slot)
        active_np = np.isin(np.arange(slots), list(seats))
        survival_np = np.ones((slots, block_len))
        for slot, seat in seats.items():
            survival_np[slot] = seat.replay.survival_np[seat.round % len(seat.replay.survival_np)]
        decision = _decide(memory, active_np, survival_np, table, context, lag)
        lengths_np = np.zeros(slots, np.int64)
        if decision.budget:
            drafted_B = jnp.asarray(decision.drafted_np)
            lengths_np = np.asarray(admit(jnp.asarray(survival_np), drafted_B, decision.budget))
        round_ms = table.verify_ms(len(seats), len(seats) + int(lengths_np.sum()), context)
        round_ms += table.draft_ms(int(decision.drafted_np.sum()), context)
        now_s, busy_s = now_s + round_ms / 1000, busy_s + round_ms / 1000
        budgets.append(int(lengths_np.sum()))
        present.append(len(seats))
        memory.note(decision.drafted_np & active_np, survival_np)
        for slot, seat in list(seats.items()):
            accepted = int(seat.replay.accepted_np[seat.round % len(seat.replay.accepted_np)])
            seat.tokens += min(accepted, int(lengths_np[slot])) + 1
            seat.round += bool(decision.drafted_np[slot])
            if seat.tokens >= seat.replay.tokens:
                speeds.append((seat.replay.tokens, seat.replay.tokens / (now_s - seat.arrival_s)))
                del seats[slot]
    return Simulated(
        tokens_per_s=sum(tokens for tokens, _ in speeds) / busy_s,
        tokens_per_s_per_request=float(np.mean([speed for _, speed in speeds])),
        budget=float(np.mean(budgets)),
        concurrency=float(np.mean(present)),
    )


def _decide(
    memory: ScheduleMemory,
    active_np: np.ndarray,
    survival_np: np.ndarray,
    table: CostTable,
    context: int,
    lag: int,
) -> Decision:
    if lag != ORACLE:
        return memory.decide(active_np, table, context)
    slots_np = np.flatnonzero(active_np)
    best = choose(survival_np[slots_np], table, context)
    drafted_np = np.zeros(len(active_np), bool)
    drafted_np[slots_np] = best.drafted_np
    return dataclasses.replace(best, drafted_np=drafted_np)
