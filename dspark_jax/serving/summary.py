"""What a batch job did: counted while it runs, in constant memory."""

from __future__ import annotations

import collections
import math

import numpy as np

from dspark_jax.engine.requests import Request, Status
from dspark_jax.speculation.acceptance import PositionStatistics, position_statistics


class Latencies:
    """Times in seconds, counted in bins of 2 %: quantiles are right to 1 %."""

    _LOG_STEP = math.log(1.02)

    def __init__(self):
        self._bins: collections.Counter[int] = collections.Counter()

    def add(self, latency_s: float, times: int = 1) -> None:
        """Counts a time."""
        self._bins[round(math.log(max(latency_s, 1e-9)) / self._LOG_STEP)] += times

    def quantile_s(self, share: float) -> float | None:
        """The time that `share` of all are at most; None where there are none."""
        wanted, seen = share * self._bins.total(), 0
        for number, times in sorted(self._bins.items()):
            seen += times
            if seen >= wanted:
                return math.exp(number * self._LOG_STEP)
        return None


class Tally:
    """Answers, tokens and rounds of one kind of prompt, or of all.

    Another thread may read the properties: counters are copied before they are walked through.

    Attributes:
      answers: finished requests.
      tokens: tokens that they emitted.
      rounds: how often each (accepted, verified) number of draft tokens occurred in a round.
    """

    def __init__(self):
        self.answers = 0
        self.tokens = 0
        self.rounds: collections.Counter[tuple[int, int]] = collections.Counter()

    def add(self, request: Request) -> None:
        """Counts a finished request."""
        self.answers += 1
        self.tokens += len(request.emitted)
        self.rounds.update(zip(request.accepted_per_round, request.verified_per_round, strict=True))

    @property
    def accepted_length(self) -> float:
        """Mean tokens committed per round, the target's own included; NaN without a round."""
        return 1 + self.accepted / self.rounds.total() if self.rounds else float("nan")

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(accepted * times for (accepted, _), times in list(self.rounds.items()))

    @property
    def verified(self) -> int:
        """Draft tokens that the target scored."""
        return sum(verified * times for (_, verified), times in list(self.rounds.items()))

    @property
    def speculative_rounds(self) -> int:
        """Rounds in which at least one draft token was verified; the others were plain decoding."""
        return sum(times for (_, verified), times in list(self.rounds.items()) if verified)

    def positions(self, block_len: int) -> PositionStatistics:
        """Acceptance at each draft position."""
        accepted_np, verified_np = np.array(list(self.rounds), np.int32).reshape(-1, 2).T
        return position_statistics(accepted_np, verified_np, block_len, np.array(list(self.rounds.values())))


class Summary:
    """The tallies of a job: of all its answers, and of each domain that its lines name.

    Attributes:
      all: of all answers.
      by_domain: of each domain.
      failed: requests that the engine gave up.
      in_flight: requests that it is working on.
      budgets: how often each number of target rows was verified in one step, over all requests in it.
      first_token_s: from submission to the first token.
      between_tokens_s: per token after the first, a round's tokens sharing the wait for them.
    """

    def __init__(self):
        self.all = Tally()
        self.by_domain: dict[str, Tally] = collections.defaultdict(Tally)
        self.failed = 0
        self.in_flight = 0
        self.budgets: collections.Counter[int] = collections.Counter()
        self.first_token_s = Latencies()
        self.between_tokens_s = Latencies()

    def add(self, request: Request) -> None:
        """Counts a request that has ended."""
        if request.status is not Status.FINISHED:
            self.failed += 1
            return
        self.all.add(request)
        if request.domain is not None:
            self.by_domain[request.domain].add(request)

    @property
    def mean_budget(self) -> float:
        """Target rows verified per step; 0 without a step."""
        rows = sum(rows * steps for rows, steps in list(self.budgets.items()))
        return rows / self.budgets.total() if self.budgets else 0.0
