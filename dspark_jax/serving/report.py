"""The figures at the end of a job: as text for people, as JSON for machines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax.engine.engine import Engine
from dspark_jax.serving.summary import Latencies, Summary, Tally
from dspark_jax.speculation.watch import Change

FORMAT = 1
ENGINE_COUNTERS = (
    *("kv_peak_pages", "preemptions", "fallbacks", "faults"),
    *(change.value for change in Change),
)
"""Of `Engine.counters`, what everybody asks for; null where the engine does not count it."""


def engine_counters(engine: Engine) -> dict[str, float]:
    """What an engine counts about itself, by name; an engine that counts nothing has no `counters`."""
    return dict(getattr(engine, "counters", {}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that is known at the end of a run; figures are those of this run, not of the runs before.

    Attributes:
      summary: what was counted.
      block_len: G, draft tokens per round; 0 without a drafter.
      answered_before: records that earlier runs of a resumed job had written.
      refused: lines that could not be answered.
      load_s: seconds of loading the models.
      compile_s: seconds of compiling programs.
      decode_s: seconds of everything else.
      counters: what the engine counts about itself.
      stopped_by: name of the signal that stopped the job, or None.
      replaced_files: model files that are no longer those that were loaded.
    """

    summary: Summary
    block_len: int
    answered_before: int
    refused: int
    load_s: float
    compile_s: float
    decode_s: float
    counters: Mapping[str, float]
    stopped_by: str | None
    replaced_files: Sequence[str]

    @property
    def _groups(self) -> dict[str, Tally]:
        return {"all": self.summary.all, **dict(sorted(self.summary.by_domain.items()))}

    @property
    def _tokens_per_s(self) -> float:
        return self.summary.all.tokens / self.decode_s if self.decode_s > 0 else 0.0

    def as_json(self, *, exit_code: int, job: Mapping[str, Any]) -> dict[str, Any]:
        """The report as plain JSON.

        Args:
          exit_code: of the run.
          job: the job's identity.
        """
        summary, total = self.summary, self.summary.all
        rounds = total.rounds.total()
        return {
            "format": FORMAT,
            "exit_code": exit_code,
            "stopped_by": self.stopped_by,
            "job": job,
            "requests": {
                "answered": total.answers,
                "answered_before": self.answered_before,
                "failed": summary.failed,
                "refused": self.refused,
            },
            "tokens": total.tokens,
            "tokens_per_s": self._tokens_per_s,
            "seconds": {"load": self.load_s, "compile": self.compile_s, "decode": self.decode_s},
            "rounds": rounds,
            "accepted_length": _finite(total.accepted_length),
            "verified_tokens": total.verified,
            "wasted_verifications": total.verified - total.accepted,
            "budget_histogram": {str(rows): steps for rows, steps in sorted(summary.budgets.items())},
            "mode_shares": {
                "speculative": total.speculative_rounds / rounds if rounds else None,
                "plain": 1 - total.speculative_rounds / rounds if rounds else None,
            },
            "first_token_s": _quantiles(summary.first_token_s),
            "between_tokens_s": _quantiles(summary.between_tokens_s),
            **{name: self.counters.get(name) for name in ENGINE_COUNTERS},
            "engine": dict(self.counters),
            "replaced_files": list(self.replaced_files),
            "acceptance": {name: self._acceptance(tally) for name, tally in self._groups.items()},
        }

    def _acceptance(self, tally: Tally) -> dict[str, Any]:
        positions = tally.positions(self.block_len)
        return {
            "answers": tally.answers,
            "tokens": tally.tokens,
            "accepted_length": _finite(tally.accepted_length),
            "survival": [_finite(rate) for rate in positions.survival_np.tolist()],
            "survival_rounds": positions.survival_rounds_np.tolist(),
            "conditional": [_finite(rate) for rate in positions.conditional_np.tolist()],
            "conditional_rounds": positions.conditional_rounds_np.tolist(),
        }

    def as_text(self) -> str:
        """The report as text."""
        summary, total = self.summary, self.summary.all
        before = f", {self.answered_before} answered before" if self.answered_before else ""
        failed = f", {summary.failed} failed" if summary.failed else ""
        facts = {
            "requests": f"{total.answers} answered{failed}, {self.refused} refused{before}",
            "tokens": f"{total.tokens}",
            "seconds": f"{self.decode_s:.2f}, after {self.load_s:.1f} to load and "
            f"{self.compile_s:.1f} to compile",
            "tokens/s": f"{self._tokens_per_s:.1f}",
            "accepted length": f"{total.accepted_length:.2f} in {total.rounds.total()} rounds",
        }
        if total.verified:
            wasted = total.verified - total.accepted
            facts["wasted"] = f"{wasted} of {total.verified} verified draft tokens"
        for name, latencies in (
            ("first token", summary.first_token_s),
            ("between tokens", summary.between_tokens_s),
        ):
            p50, p99 = latencies.quantile_s(0.5), latencies.quantile_s(0.99)
            if p50 is not None and p99 is not None:
                facts[name] = f"p50 {1000 * p50:.1f} ms, p99 {1000 * p99:.1f} ms"
        facts |= {
            name.replace("_", " "): f"{self.counters[name]:g}"
            for name in ENGINE_COUNTERS
            if name in self.counters
        }
        sections = ["".join(f"{name:17s}{value}\n" for name, value in facts.items())]
        if summary.by_domain:
            counts = [
                [name, f"{tally.answers}", f"{tally.tokens}", f"{tally.accepted_length:.2f}"]
                for name, tally in self._groups.items()
            ]
            sections.append(_table(["domain", "requests", "tokens", "accepted length"], counts))
        if self.block_len and total.rounds:
            positions = {name: tally.positions(self.block_len) for name, tally in self._groups.items()}
            header = [f"{k}" for k in range(1, self.block_len + 1)]
            survival = [[name, *_rates(p.survival_np)] for name, p in positions.items()]
            conditional = [[name, *_rates(p.conditional_np)] for name, p in positions.items()]
            sections.append(_table(["accepted up to position", *header], survival))
            sections.append(_table(["accepted, if all before", *header], conditional))
        return "\n".join(sections)


def _quantiles(latencies: Latencies) -> dict[str, float | None]:
    return {f"p{percent}": latencies.quantile_s(percent / 100) for percent in (50, 90, 99)}


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def _rates(rates_np: np.ndarray) -> list[str]:
    return ["-" if np.isnan(rate) else f"{rate:.3f}" for rate in rates_np]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + "\n"
        for row in (header, *rows)
    )
