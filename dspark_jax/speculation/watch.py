"""A calibration, watched while it is used: predicted survival against what verification really accepted.

What counts as seen. The scheduler acts on survivals a_k, and the offline fit is one of survivals, so a_k is
held against "the first k were all accepted", at every position k that was VERIFIED:

- Whether k is verified depends on a_1 .. a_k, on other requests and on earlier rounds, never on the outcome:
  where predictions mean what they say, the differences a_k - survived_k at verified positions are a
  martingale, whatever the scheduler prefers. Sums of them need no correction.
- A position that was not verified is not seen, even where a rejection before it tells how it would have
  ended: only failures would ever be known there, and every calibration would look too hopeful.
- Outcomes at k given that all before k were accepted could be watched as well. But those are not what the
  scheduler adds up, and after a fit of survivals they need not be true position by position: at temperatures
  above 0, c_k depends on the drafted tokens, and these tell something about their own acceptance.

Differences within a round depend on each other, so every position has its own sums; Freedman's inequality
("On tail probabilities for martingales", 1975) bounds each without asking for many rounds or for outcomes of
both kinds. Everything here looks at finished rounds only, so the law of the tokens stays what it is.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from dspark_jax.core.errors import require
from dspark_jax.speculation.calibration import (
    fit_scaling,
    predicted,
    scaled,
    survived,
    unscaled,
)

PARTS = 3
"""What is judged at each position: predictions below 1/2, those above, and all of them."""
FIT_BINS = 10
FEWEST_TO_FIT = 16
"""Rounds that must have verified a position before its scaling is changed."""
MOST_REFITS = 2
"""In a row: a domain that is wrong once more falls back."""
MOST_DOMAINS = 64
"""Domains that are watched apart; those that come later share the watch of requests without one."""
PROBE_SHARE = 4
"""A window of a domain that has fallen back is this much shorter: probes are rare."""
MOST_PATIENCE = 8
PROBE_TOKENS = 2
"""Drafted tokens that a probe verifies, per request on average: the likeliest of them all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """When a calibration counts as wrong, and what it costs to find that out."""

    window: int = 1024
    """Rounds of requests with something verified, after which a domain's predictions are judged."""
    margin: float = 0.05
    """Mean error of survival at a position that is put up with, however sure it is."""
    false_alarm_rate: float = 0.01
    """Most windows in which predictions that are true seem wrong, as a share."""
    probe_every: int = 32
    """Rounds between the probes of a domain that has fallen back; twice as many after every probe window in
    vain, up to MOST_PATIENCE times as many."""
    starved_after: int = 512
    """Rounds without any verification after which a few tokens are verified all the same: predictions that
    are much too low would otherwise never be found out."""

    def __post_init__(self):
        for name in ("window", "probe_every", "starved_after"):
            require(
                getattr(self, name) >= 1,
                given=f"{name}={getattr(self, name)}",
                expected="at least 1 round",
                fix=f"raise {name}",
            )
        for name in ("margin", "false_alarm_rate"):
            require(
                0 < getattr(self, name) < 1,
                given=f"{name}={getattr(self, name)}",
                expected="a share between 0 and 1",
                fix=f"correct {name}",
            )


class Change(enum.Enum):
    """What a judgement changed; the values are names of counters."""

    REFIT = "refits"
    FALLBACK = "calibration_fallbacks"
    RECOVERY = "calibration_recoveries"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A change, for counters and logs.

    Attributes:
      domain: whose; None for requests without one.
      change: what.
      error: the largest mean error of a position, before the change.
    """

    domain: str | None
    change: Change
    error: float

    def __str__(self) -> str:
        consequence = {
            Change.REFIT: "its scaling is fitted again",
            Change.FALLBACK: "and goes on being so: plain decoding until probes say otherwise",
            Change.RECOVERY: "it speculates again",
        }[self.change]
        whose = "requests" if self.domain is None else f"requests of domain {self.domain!r}"
        return f"predicted survival of {whose} is off by {self.error:.1%}: {consequence}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """N finished rounds with something verified.

    Attributes:
      logits_np: float [N, G], confidence logits.
      verified_np: int [N], drafted tokens verified.
      accepted_np: int [N], of these accepted.
    """

    logits_np: np.ndarray
    verified_np: np.ndarray
    accepted_np: np.ndarray

    def at(self, rows: Sequence[int]) -> Rounds:
        """Some of them."""
        return Rounds(
            logits_np=self.logits_np[rows],
            verified_np=self.verified_np[rows],
            accepted_np=self.accepted_np[rows],
        )

    @property
    def survived_np(self) -> np.ndarray:
        """bool [N, G]: whether the first k were all accepted; means something at `seen_np` only."""
        return survived(self.accepted_np, self.logits_np.shape[1])

    @property
    def seen_np(self) -> np.ndarray:
        """bool [N, G]: whether position k was verified."""
        return survived(self.verified_np, self.logits_np.shape[1])


def significant_error(
    predicted_np: np.ndarray, survived_np: np.ndarray, seen_np: np.ndarray, *, false_alarm_rate: float
) -> np.ndarray:
    """The mean error of predicted survivals at each position, as far as chance does not explain it.

    Predictions below 1/2, those above and all together are judged apart: the sum of a - survived over them
    may reach t = L / 3 + sqrt(L^2 / 9 + 2 L V) by chance, with V the sum of a (1 - a) (Freedman), and counts
    where it is beyond t.

    Args:
      predicted_np: a, float [N, G].
      survived_np: bool [N, G].
      seen_np: bool [N, G]: where there is an outcome at all.
      false_alarm_rate: chance that anything counts though the predictions are true, at most.

    Returns:
      float [2, G]: too high, too low; 0 where nothing is sure.
    """
    excess_NG = np.where(seen_np, predicted_np - survived_np, 0)
    variance_NG = np.where(seen_np, predicted_np * (1 - predicted_np), 0)
    high_NG = predicted_np >= 0.5

    def parts(values_NG: np.ndarray) -> np.ndarray:
        above_G, all_G = (values_NG * high_NG).sum(0), values_NG.sum(0)
        return np.stack([all_G - above_G, above_G, all_G])

    log_tests = np.log(2 * PARTS * predicted_np.shape[1] / false_alarm_rate)
    chance_3G = log_tests / 3 + np.sqrt(log_tests**2 / 9 + 2 * log_tests * parts(variance_NG))
    excess_3G = parts(excess_NG)
    low_G, high_G, all_G = np.where(np.abs(excess_3G) > chance_3G, excess_3G, 0)
    too_high_G = np.maximum(np.maximum(low_G, 0) + np.maximum(high_G, 0), all_G)
    too_low_G = np.maximum(np.maximum(-low_G, 0) + np.maximum(-high_G, 0), -all_G)
    return np.stack([too_high_G, too_low_G]) / np.maximum(seen_np.sum(0), 1)


def refit(rounds: Rounds, scaling_np: np.ndarray) -> np.ndarray:
    """The scaling [2, G] that the offline fit finds on top of the present one, on a coarser grid.

    Args:
      rounds: of a window.
      scaling_np: [2, G], the present one; it stays where hardly anything was seen.
    """
    temperatures_G, shifts_G = fit_scaling(
        scaled(rounds.logits_np, scaling_np),
        rounds.survived_np,
        seen_np=rounds.seen_np,
        fewest=FEWEST_TO_FIT,
        bins=FIT_BINS,
    )
    return np.stack([scaling_np[0] * temperatures_G, scaling_np[1] / temperatures_G + shifts_G])


@dataclasses.dataclass(kw_only=True, eq=False)
class _Domain:
    """What is known of one kind of request.

    Attributes:
      scaling_np: [2, G] of its predictions.
      patience: rounds between probes once it has fallen back.
      rounds: of the window so far.
      num_rounds: how many these are.
      trusted: whether it speculates.
      alarms: windows in a row in which it was wrong.
      idle: steps since something of it was verified.
    """

    scaling_np: np.ndarray
    patience: int
    rounds: list[Rounds] = dataclasses.field(default_factory=list)
    num_rounds: int = 0
    trusted: bool = True
    alarms: int = 0
    idle: int = 0

    def window(self) -> Rounds:
        """Takes out what was collected."""
        parts, self.rounds, self.num_rounds = self.rounds, [], 0
        return Rounds(
            logits_np=np.concatenate([part.logits_np for part in parts]),
            verified_np=np.concatenate([part.verified_np for part in parts]),
            accepted_np=np.concatenate([part.accepted_np for part in parts]),
        )


class CalibrationWatch:
    """Judges the predictions of every domain, window by window.

    A domain whose predictions are wrong gets its scaling fitted again. If windows go on being wrong, and
    promise too much, the domain falls back to plain decoding; probes tell when to trust it again. Promises
    that are more than kept cost nothing: those are only fitted again.

    Args:
      config: when a calibration counts as wrong.
      block_len: G.
    """

    def __init__(self, config: Watch, *, block_len: int):
        self._config = config
        self._scaling_np = unscaled(block_len).astype(np.float32)
        self._domains: dict[str | None, _Domain] = {}

    def calibrate(self, scaling_np: np.ndarray) -> None:
        """Begins again with this scaling [2, G], everywhere."""
        self._scaling_np = scaling_np
        self._domains.clear()

    def scaling(self, domain: str | None = None) -> np.ndarray:
        """The scaling [2, G] of a domain's predictions."""
        known = self._domains.get(self._name(domain))
        return self._scaling_np if known is None else known.scaling_np

    def who_may(self, domains: Sequence[str | None]) -> tuple[np.ndarray, np.ndarray]:
        """For a step of n requests: (who may speculate, who probes), bool [n]; a probe verifies a little."""
        trusted, probing = {}, {}
        for name in {self._name(name) for name in domains}:
            domain = self._of(name)
            domain.idle += 1
            patience = self._config.starved_after if domain.trusted else domain.patience
            trusted[name], probing[name] = domain.trusted, domain.idle > patience
            if probing[name]:
                domain.idle = 0
        names = [self._name(name) for name in domains]
        return np.array([trusted[name] for name in names]), np.array([probing[name] for name in names])

    def note(self, domains: Sequence[str | None], rounds: Rounds) -> list[Finding]:
        """Takes in a step that was read, of n requests; those without a verified token say nothing."""
        rows = collections.defaultdict(list)
        for row, (name, verified) in enumerate(zip(domains, rounds.verified_np.tolist(), strict=True)):
            if verified:
                rows[self._name(name)].append(row)
        findings = []
        for name, mine in rows.items():
            domain = self._of(name)
            domain.rounds.append(rounds.at(mine))
            domain.num_rounds += len(mine)
            if domain.trusted:
                domain.idle = 0
            if domain.num_rounds >= self._config.window // (1 if domain.trusted else PROBE_SHARE):
                error, changes = self._judge(domain)
                findings += [Finding(domain=name, change=change, error=error) for change in changes]
        return findings

    def _judge(self, domain: _Domain) -> tuple[float, list[Change]]:
        """(the largest mean error of a position, what follows from it)."""
        rounds = domain.window()
        errors_2G = significant_error(
            predicted(rounds.logits_np, domain.scaling_np),
            rounds.survived_np,
            rounds.seen_np,
            false_alarm_rate=self._config.false_alarm_rate,
        )
        error = float(errors_2G.sum(0).max())
        if error <= self._config.margin:
            if domain.trusted:
                domain.alarms, domain.patience = 0, self._config.probe_every
                return error, []
            domain.trusted = True
            return error, [Change.RECOVERY]
        domain.scaling_np = refit(rounds, domain.scaling_np)
        domain.alarms += 1
        if not domain.trusted:
            domain.patience = min(2 * domain.patience, MOST_PATIENCE * self._config.probe_every)
            return error, [Change.REFIT]
        too_high, too_low = errors_2G @ rounds.seen_np.sum(0)
        if domain.alarms <= MOST_REFITS or too_high < too_low:
            return error, [Change.REFIT]
        domain.trusted, domain.idle = False, 0
        return error, [Change.REFIT, Change.FALLBACK]

    def _name(self, name: str | None) -> str | None:
        """Under which name a domain is watched."""
        return name if name in self._domains or len(self._domains) < MOST_DOMAINS else None

    def _of(self, name: str | None) -> _Domain:
        if name not in self._domains:
            self._domains[name] = _Domain(scaling_np=self._scaling_np, patience=self._config.probe_every)
        return self._domains[name]
