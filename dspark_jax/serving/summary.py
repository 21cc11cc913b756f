"""What a batch job did: counted while it runs, printed at its end."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from dspark_jax.engine.requests import Request
from dspark_jax.speculation.acceptance import PositionStatistics, position_statistics


class Tally:
    """Answers, tokens and rounds of one kind of prompt, or of all.

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
        accepted = sum(accepted * times for (accepted, _), times in self.rounds.items())
        return 1 + accepted / self.rounds.total() if self.rounds else float("nan")

    def positions(self, block_len: int) -> PositionStatistics:
        """Acceptance at each draft position."""
        pairs_np = np.array(list(self.rounds), np.int32).reshape(-1, 2)
        accepted_np, verified_np = np.repeat(pairs_np, list(self.rounds.values()), axis=0).T
        return position_statistics(accepted_np, verified_np, block_len)


class Summary:
    """The tallies of a job: of all its answers, and of each domain that its lines name."""

    def __init__(self):
        self.all = Tally()
        self.by_domain: dict[str, Tally] = collections.defaultdict(Tally)

    def add(self, request: Request, domain: str | None) -> None:
        """Counts a finished request."""
        self.all.add(request)
        if domain is not None:
            self.by_domain[domain].add(request)

    def report(
        self, *, block_len: int, refused: int, load_s: float, compile_s: float, decode_s: float
    ) -> str:
        """The summary as text.

        Args:
          block_len: G, draft tokens per round; 0 without a drafter.
          refused: lines that could not be answered.
          load_s: seconds of loading the models.
          compile_s: seconds of compiling programs.
          decode_s: seconds of everything else.
        """
        facts = {
            "requests": f"{self.all.answers} answered, {refused} refused",
            "tokens": f"{self.all.tokens}",
            "seconds": f"{decode_s:.2f}, after {load_s:.1f} to load and {compile_s:.1f} to compile",
            "tokens/s": f"{self.all.tokens / decode_s:.1f}",
            "accepted length": f"{self.all.accepted_length:.2f} in {self.all.rounds.total()} rounds",
        }
        sections = ["".join(f"{name:17s}{value}\n" for name, value in facts.items())]
        groups = {"all": self.all, **dict(sorted(self.by_domain.items()))}
        if self.by_domain:
            counts = [
                [name, f"{tally.answers}", f"{tally.tokens}", f"{tally.accepted_length:.2f}"]
                for name, tally in groups.items()
            ]
            sections.append(_table(["domain", "requests", "tokens", "accepted length"], counts))
        if block_len and self.all.rounds:
            positions = {name: tally.positions(block_len) for name, tally in groups.items()}
            header = [f"{k}" for k in range(1, block_len + 1)]
            survival = [[name, *_rates(p.survival_np)] for name, p in positions.items()]
            conditional = [[name, *_rates(p.conditional_np)] for name, p in positions.items()]
            sections.append(_table(["accepted up to position", *header], survival))
            sections.append(_table(["accepted, if all before", *header], conditional))
        return "\n".join(sections)


def _rates(rates_np: np.ndarray) -> list[str]:
    return ["-" if np.isnan(rate) else f"{rate:.3f}" for rate in rates_np]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + "\n"
        for row in (header, *rows)
    )
