"""Accepted length and acceptance per position, from recorded rounds: records in, numbers out.

The accepted length of a domain is all tokens that its rounds committed over the number of its rounds: what
decides the speed. Prompts are the independent unit (rounds of one answer resemble one another), so intervals
come from drawing prompts again with replacement.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.speculation.acceptance import PositionStatistics, position_statistics

CONFIDENCE_LEVEL = 0.95
TAILS = ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2)
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PromptRounds:
    """What decoding one prompt delivered."""

    id: str
    domain: str
    new_tokens: int
    """Tokens of the answer."""
    committed_np: np.ndarray
    """int [rounds]: tokens committed, the target's own included."""
    accepted_np: np.ndarray
    """int [rounds]: draft tokens accepted."""
    verified_np: np.ndarray
    """int [rounds]: draft tokens verified."""
    confidence_np: np.ndarray
    """float32 [rounds, G]: confidence logits of the drafted blocks; [0] without a round or the head."""
    prompt_tokens: int = 0
    """Tokens of the rendered prompt: where the answer's context starts."""
    repeat: int = 0
    """Which of several answers to the same prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval; NaN where the data say nothing."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float | None]:
        """Plain JSON, null for NaN."""
        return {name: _number(value) for name, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DomainAcceptance:
    """Acceptance in one domain."""

    prompts: int
    rounds: int
    new_tokens: int
    accepted_length: Estimate
    positions: PositionStatistics
    conditional_low_np: np.ndarray
    """float64 [G]: lower ends of the 95 % intervals of the conditional acceptance."""
    conditional_high_np: np.ndarray
    """float64 [G]: their upper ends."""
    accepted_tokens: int
    """Draft tokens accepted."""
    verified_tokens: int
    """Draft tokens verified."""
    drafted_tokens: int
    """Draft tokens proposed: G in every round."""
    per_prompt: dict[str, tuple[int, int]]
    """Prompt -> (rounds, tokens committed): what a paired comparison of two runs needs."""

    @property
    def verify_rate(self) -> float:
        """Share of the drafted tokens that was verified."""
        return self.verified_tokens / self.drafted_tokens if self.drafted_tokens else np.nan

    @property
    def accept_rate(self) -> float:
        """Share of the verified tokens that was accepted."""
        return self.accepted_tokens / self.verified_tokens if self.verified_tokens else np.nan

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, null for NaN."""
        positions = vars(self.positions).items()
        return {
            "prompts": self.prompts,
            "rounds": self.rounds,
            "new_tokens": self.new_tokens,
            "accepted_length": self.accepted_length.as_json(),
            "verify_rate": _number(self.verify_rate),
            "accept_rate": _number(self.accept_rate),
            "conditional_low": [_number(x) for x in self.conditional_low_np.tolist()],
            "conditional_high": [_number(x) for x in self.conditional_high_np.tolist()],
            "per_prompt": {name: list(sums) for name, sums in self.per_prompt.items()},
            **{name.removesuffix("_np"): [_number(x) for x in array.tolist()] for name, array in positions},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance by domain, and the macro average in which every domain counts the same."""

    domains: dict[str, DomainAcceptance]
    macro: Estimate
    whole: DomainAcceptance
    """All rounds together, whatever their domain."""
    groups: dict[str, Estimate]
    """Averages over the domains of a group, such as math, code and chat of the paper's suites."""


def accepted_length(records: Sequence[PromptRounds]) -> float:
    """tau: tokens committed per round; NaN without a round."""
    rounds = sum(len(record.committed_np) for record in records)
    return sum(int(record.committed_np.sum()) for record in records) / rounds if rounds else np.nan


def resampled_accepted_lengths(
    records: Sequence[PromptRounds], seed: Sequence[int], resamples: int = RESAMPLES
) -> np.ndarray:
    """Accepted lengths [resamples] of as many sets of prompts, drawn with replacement.

    Args:
      records: at least two prompts with rounds, else every draw is NaN: one prompt knows no spread. Repeated
        answers to one prompt stay together.
      seed: decides the draws.
      resamples: number of sets.
    """
    sums_PX = np.array([sums for sums in per_prompt_sums(records).values() if sums[0]])
    if len(sums_PX) < 2:
        return np.full(resamples, np.nan)
    sums = times_drawn(len(sums_PX), seed, resamples) @ sums_PX
    return sums[:, 1] / sums[:, 0]


def per_prompt_sums(records: Iterable[PromptRounds]) -> dict[str, tuple[int, int]]:
    """Prompt -> (rounds, tokens committed), over all its answers."""
    sums: dict[str, tuple[int, int]] = {}
    for record in records:
        rounds, committed = sums.get(record.id, (0, 0))
        sums[record.id] = (rounds + len(record.committed_np), committed + int(record.committed_np.sum()))
    return sums


def times_drawn(prompts: int, seed: Sequence[int], resamples: int = RESAMPLES) -> np.ndarray:
    """int64 [resamples, prompts]: how often each prompt is in each set drawn with replacement."""
    drawn = np.random.default_rng(seed).integers(prompts, size=(resamples, prompts))
    return np.stack([np.bincount(row, minlength=prompts) for row in drawn])


def _conditional_interval(
    records: Sequence[PromptRounds], block_len: int, seed: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), float64 [G] each, of the conditional acceptance."""
    by_prompt: dict[str, list[PromptRounds]] = {}
    for record in records:
        by_prompt.setdefault(record.id, []).append(record)
    if len(by_prompt) < 2:
        return np.full(block_len, np.nan), np.full(block_len, np.nan)
    passed, tried = [], []
    for of_prompt in by_prompt.values():
        accepted_np = np.concatenate([record.accepted_np for record in of_prompt])
        verified_np = np.concatenate([record.verified_np for record in of_prompt])
        positions = np.arange(1, block_len + 1)
        reached = (verified_np[:, None] >= positions) & (accepted_np[:, None] >= positions - 1)
        tried.append(reached.sum(0))
        passed.append((reached & (accepted_np[:, None] >= positions)).sum(0))
    times = times_drawn(len(by_prompt), seed)
    tried_XG, passed_XG = times @ np.array(tried), times @ np.array(passed)
    rates_XG = np.divide(passed_XG, tried_XG, out=np.full(tried_XG.shape, np.nan), where=tried_XG > 0)
    # A position that some draws never reach is too rare for an interval.
    return tuple(np.quantile(rates_XG, TAILS, axis=0))


def summarise(
    records: Iterable[PromptRounds],
    block_len: int,
    *,
    seed: int = 0,
    groups: Mapping[str, Collection[str]] | None = None,
) -> Acceptance:
    """Acceptance of every domain, and the macro average over domains.

    The interval of a domain depends on its own prompts and on the seed, not on which other domains there are.

    Args:
      records: one for each answer, in any order.
      block_len: G.
      seed: of the bootstrap.
      groups: domains to be averaged as well; those that were not measured are left out.

    Raises:
      InputError: no records.
    """
    by_domain: dict[str, list[PromptRounds]] = {}
    for record in sorted(records, key=lambda record: (record.id, record.repeat)):
        by_domain.setdefault(record.domain, []).append(record)
    if not by_domain:
        raise InputError(given="no prompts", expected="at least one", fix="check the prompt files")
    domains, draws = {}, []
    for domain in sorted(by_domain):
        draw_seed = [seed, zlib.crc32(domain.encode())]
        draws.append(resampled_accepted_lengths(by_domain[domain], draw_seed))
        domains[domain] = _acceptance(by_domain[domain], block_len, draws[-1], draw_seed)
    whole = [record for of_domain in by_domain.values() for record in of_domain]
    draws_of_all = resampled_accepted_lengths(whole, [seed])
    values = [domain.accepted_length.value for domain in domains.values()]
    averages = {}
    for group, members in (groups or {}).items():
        chosen = [place for place, domain in enumerate(domains) if domain in members]
        if chosen:
            group_draws = np.mean([draws[place] for place in chosen], axis=0)
            averages[group] = _estimate(float(np.mean([values[place] for place in chosen])), group_draws)
    macro = _estimate(float(np.mean(values)), np.mean(draws, axis=0))
    return Acceptance(
        domains=domains,
        macro=macro,
        groups=averages,
        whole=_acceptance(whole, block_len, draws_of_all, [seed]),
    )


def _acceptance(
    records: Sequence[PromptRounds], block_len: int, draws: np.ndarray, seed: Sequence[int]
) -> DomainAcceptance:
    """Acceptance over some records, whose accepted lengths were resampled already."""
    rounds = sum(len(record.committed_np) for record in records)
    low_np, high_np = _conditional_interval(records, block_len, seed)
    return DomainAcceptance(
        prompts=len({record.id for record in records}),
        rounds=rounds,
        new_tokens=sum(record.new_tokens for record in records),
        accepted_length=_estimate(accepted_length(records), draws),
        positions=position_statistics(
            np.concatenate([record.accepted_np for record in records]),
            np.concatenate([record.verified_np for record in records]),
            block_len,
        ),
        conditional_low_np=low_np,
        conditional_high_np=high_np,
        accepted_tokens=sum(int(record.accepted_np.sum()) for record in records),
        verified_tokens=sum(int(record.verified_np.sum()) for record in records),
        drafted_tokens=rounds * block_len,
        per_prompt=per_prompt_sums(records),
    )


def _estimate(value: float, draws: np.ndarray) -> Estimate:
    """The percentile interval of resampled values."""
    low, high = np.quantile(draws, TAILS)
    return Estimate(value=value, low=float(low), high=float(high))


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
