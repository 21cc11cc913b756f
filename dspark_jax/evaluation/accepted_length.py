"""Accepted length and acceptance per position, from recorded rounds: records in, numbers out.

The accepted length of a domain is all tokens that its rounds committed over the number of its rounds: what
decides the speed. Prompts are the independent unit (rounds of one answer resemble one another), so intervals
come from drawing prompts again with replacement.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.speculation.acceptance import PositionStatistics, position_statistics

CONFIDENCE_LEVEL = 0.95
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
    """float32 [rounds, G]: confidence logits of the drafted blocks; [0] without a round."""


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

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, null for NaN."""
        positions = vars(self.positions).items()
        return {
            "prompts": self.prompts,
            "rounds": self.rounds,
            "new_tokens": self.new_tokens,
            "accepted_length": self.accepted_length.as_json(),
            **{name.removesuffix("_np"): [_number(x) for x in array.tolist()] for name, array in positions},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance by domain, and the macro average in which every domain counts the same."""

    domains: dict[str, DomainAcceptance]
    macro: Estimate


def accepted_length(records: Sequence[PromptRounds]) -> float:
    """tau: tokens committed per round; NaN without a round."""
    rounds = sum(len(record.committed_np) for record in records)
    return sum(int(record.committed_np.sum()) for record in records) / rounds if rounds else np.nan


def resampled_accepted_lengths(
    records: Sequence[PromptRounds], seed: Sequence[int], resamples: int = RESAMPLES
) -> np.ndarray:
    """Accepted lengths [resamples] of as many sets of prompts, drawn with replacement.

    Args:
      records: at least two prompts with rounds, else every draw is NaN: one prompt knows no spread.
      seed: decides the draws.
      resamples: number of sets.
    """
    records = [record for record in records if len(record.committed_np)]
    if len(records) < 2:
        return np.full(resamples, np.nan)
    drawn = np.random.default_rng(seed).integers(len(records), size=(resamples, len(records)))
    committed_P = np.array([record.committed_np.sum() for record in records])
    rounds_P = np.array([len(record.committed_np) for record in records])
    return committed_P[drawn].sum(1) / rounds_P[drawn].sum(1)


def summarise(records: Iterable[PromptRounds], block_len: int, *, seed: int = 0) -> Acceptance:
    """Acceptance of every domain, and the macro average over domains.

    The interval of a domain depends on its own prompts and on the seed, not on which other domains there are.

    Args:
      records: one for each prompt, in any order.
      block_len: G.
      seed: of the bootstrap.

    Raises:
      InputError: no records.
    """
    by_domain: dict[str, list[PromptRounds]] = {}
    for record in sorted(records, key=lambda record: record.id):
        by_domain.setdefault(record.domain, []).append(record)
    if not by_domain:
        raise InputError(given="no prompts", expected="at least one", fix="check the prompt files")
    domains, draws = {}, []
    for domain in sorted(by_domain):
        of_domain = by_domain[domain]
        draws.append(resampled_accepted_lengths(of_domain, [seed, zlib.crc32(domain.encode())]))
        domains[domain] = DomainAcceptance(
            prompts=len(of_domain),
            rounds=sum(len(record.committed_np) for record in of_domain),
            new_tokens=sum(record.new_tokens for record in of_domain),
            accepted_length=_estimate(accepted_length(of_domain), draws[-1]),
            positions=position_statistics(
                np.concatenate([record.accepted_np for record in of_domain]),
                np.concatenate([record.verified_np for record in of_domain]),
                block_len,
            ),
        )
    macro = float(np.mean([domain.accepted_length.value for domain in domains.values()]))
    return Acceptance(domains=domains, macro=_estimate(macro, np.mean(draws, axis=0)))


def _estimate(value: float, draws: np.ndarray) -> Estimate:
    """The percentile interval of resampled values."""
    low, high = np.quantile(draws, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return Estimate(value=value, low=float(low), high=float(high))


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
