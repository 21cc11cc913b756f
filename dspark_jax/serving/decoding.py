"""The loop of a batch job: keeps the engine full, watches every step, hands out what has ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from dspark_jax.engine.engine import Engine
from dspark_jax.engine.requests import TRANSITIONS
from dspark_jax.serving.records import Job
from dspark_jax.serving.signals import Stop
from dspark_jax.serving.summary import Summary

ENDED = frozenset(status for status, following in TRANSITIONS.items() if not following)


class _InFlight:
    """A submitted job, and what was seen of it last."""

    def __init__(self, job: Job, now_s: float):
        self.job = job
        self.seen_s = now_s
        self.tokens = 0
        self.rounds = 0


def decoding_s(engine: Engine) -> float:
    """A clock that stands still while programs compile."""
    return time.perf_counter() - engine.compile_s


def decode(engine: Engine, jobs: Iterable[Job], stop: Stop, summary: Summary) -> Iterator[Job]:
    """Jobs as they end, whether finished or failed; takes new ones only as slots free up.

    A stop takes no new ones and lets those in flight finish, until it is overdue: then they are cancelled
    and not handed out.
    """
    source = iter(jobs)
    in_flight: list[_InFlight] = []
    while True:
        while not stop.requested and len(in_flight) < engine.config.slots:
            job = next(source, None)
            if job is None:
                break
            engine.submit(job.request)
            in_flight.append(_InFlight(job, decoding_s(engine)))
        summary.in_flight = len(in_flight)
        if not in_flight:
            return
        if stop.overdue:
            for flight in in_flight:
                engine.cancel(flight.job.request)
            return
        engine.step()
        _observe(in_flight, decoding_s(engine), summary)
        # By status, not by what the step returns: failed requests end as well.
        ended = [flight.job for flight in in_flight if flight.job.request.status in ENDED]
        in_flight = [flight for flight in in_flight if flight.job.request.status not in ENDED]
        for job in ended:
            summary.add(job.request)
            yield job


def _observe(in_flight: list[_InFlight], now_s: float, summary: Summary) -> None:
    """Times what a step emitted, and counts the rows that the target verified in it."""
    rows = 0
    for flight in in_flight:
        request = flight.job.request
        rows += sum(1 + verified for verified in request.verified_per_round[flight.rounds :])
        flight.rounds = len(request.verified_per_round)
        new = len(request.emitted) - flight.tokens
        if new:
            wait_s = now_s - flight.seen_s
            if flight.tokens == 0:
                summary.first_token_s.add(wait_s)
            else:
                # A round's tokens come together: each is charged an equal share of the wait for them.
                summary.between_tokens_s.add(wait_s / new, new)
            flight.tokens, flight.seen_s = len(request.emitted), now_s
    if rows:
        summary.budgets[rows] += 1
