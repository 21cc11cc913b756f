"""What the next round does: who drafts, how much is verified, in which declared shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from dspark_jax.core.buckets import bucket_for
from dspark_jax.engine.config import EngineConfig
from dspark_jax.speculation.cost import CostTable
from dspark_jax.speculation.schedule import Algorithm1, Lagged, ScheduleMemory
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength
from dspark_jax.speculation.watch import PROBE_TOKENS, CalibrationWatch, Finding, Rounds, Watch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A round.

    Attributes:
      drafted_np: bool [n], which of its requests draft.
      budget: drafted tokens to verify over all requests; None: as many as the device says, for which the host
        waits.
    """

    drafted_np: np.ndarray
    budget: int | None


class Planner:
    """Plans rounds for a scheduler.

    Args:
      config: shapes and scheduler.
      block_len: G.
      table: gives the measured times when a scheduler first asks for prices.
    """

    def __init__(self, config: EngineConfig, block_len: int, table: Callable[[], CostTable]):
        self._config, self._block_len, self._table = config, block_len, table
        self._watch = CalibrationWatch(config.watch or Watch(), block_len=block_len)
        self._memory = None
        if isinstance(config.policy, Lagged):
            self._memory = ScheduleMemory(config.policy, slots=config.slots, block_len=block_len)

    @property
    def watches(self) -> bool:
        """Whether predictions are held against what comes."""
        return self._config.watch is not None and self._config.predicts

    def calibrate(self, scaling_np: np.ndarray) -> None:
        """Predicts by this scaling [2, G] from now on."""
        self._watch.calibrate(scaling_np)

    def scaling(self, domains: Sequence[str | None], requests: int) -> np.ndarray:
        """The scalings [R, 2, G] by which survivals of a step of R requests are predicted.

        Args:
          domains: of its n requests; the others are padding.
          requests: R.
        """
        padded = [*domains, *[None] * (requests - len(domains))]
        return np.array([self._watch.scaling(domain) for domain in padded], np.float32)

    def plan(
        self,
        slots: Sequence[int],
        drafting_np: np.ndarray,
        context: int,
        domains: Sequence[str | None],
    ) -> Plan:
        """The next round.

        Args:
          slots: of its n requests.
          drafting_np: bool [n], requests whose drafts can be used.
          context: longest context among them, in tokens.
          domains: of its requests.
        """
        probing_np = np.zeros(len(slots), bool)
        if self.watches and drafting_np.any():
            trusted_np, probing_np = self._watch.who_may(domains)
            probing_np &= drafting_np
            drafting_np = drafting_np & (trusted_np | probing_np)
        nobody = Plan(drafted_np=np.zeros(len(slots), bool), budget=0)
        if self._block_len == 0 or not drafting_np.any():
            return nobody
        match self._config.policy:
            case FixedLength(length=0):
                return nobody
            case ConfidenceThreshold() | Algorithm1():
                return Plan(drafted_np=drafting_np, budget=None)
            case Lagged():
                return self._lagged(slots, drafting_np, probing_np, context)
            case _:
                length = self._config.longest(self._block_len)
                return Plan(drafted_np=drafting_np, budget=length * int(drafting_np.sum()))

    def _lagged(
        self, slots: Sequence[int], drafting_np: np.ndarray, probing_np: np.ndarray, context: int
    ) -> Plan:
        assert self._memory is not None
        active_np, able_np = np.zeros((2, self._config.slots), bool)
        active_np[list(slots)], able_np[list(slots)] = True, drafting_np
        decision = self._memory.decide(active_np, self._table(), context, able_np=able_np)
        drafted_np = decision.drafted_np[list(slots)] | probing_np
        wanted = decision.budget + PROBE_TOKENS * int(probing_np.sum())
        budget = min(wanted, self._block_len * int(drafted_np.sum()))
        return Plan(drafted_np=drafted_np, budget=budget)

    def round_ms(self, requests: int, active: int, context: int) -> np.ndarray:
        """[R G + 1], ms of a round in which n drafted tokens are verified; what Algorithm 1 walks over."""
        lengths_np = np.arange(requests * self._block_len + 1)
        if not isinstance(self._config.policy, Algorithm1):
            return np.zeros(len(lengths_np), np.float32)
        table = self._table()
        rows_np, ms_np = table.verify_curve(active, context)
        at_np = np.minimum(np.searchsorted(rows_np, active + lengths_np), len(rows_np) - 1)
        return (ms_np[at_np] + table.draft_ms(active, context)).astype(np.float32)

    def rows(self, requests: int, active: int, budget: int) -> int:
        """M for so many active requests out of R and drafted tokens."""
        buckets = self._config.row_buckets(requests, self._block_len)
        return buckets[0] if budget == 0 else bucket_for(active + budget, buckets[1:] or buckets)

    def forget(self, slot: int) -> None:
        """A new request sits there."""
        if self._memory is not None:
            self._memory.forget(slot)

    def note(self, slots: Sequence[int], drafted_np: np.ndarray, survival_np: np.ndarray) -> None:
        """Takes in what a round predicted.

        Args:
          slots: of its requests.
          drafted_np: bool [n], which of them drafted and are still there.
          survival_np: [n, G].
        """
        if self._memory is None:
            return
        drafted_B_np = np.zeros(self._config.slots, bool)
        survival_BG_np = np.zeros((self._config.slots, self._block_len))
        drafted_B_np[list(slots)], survival_BG_np[list(slots)] = drafted_np, survival_np
        self._memory.note(drafted_B_np, survival_BG_np)

    def judge(self, domains: Sequence[str | None], rounds: Rounds) -> list[Finding]:
        """Takes in what verification made of a round's predictions; returns what changes by it."""
        return self._watch.note(domains, rounds) if self.watches else []
