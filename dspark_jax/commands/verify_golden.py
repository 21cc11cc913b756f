"""`dspark verify-golden`: recorded values of another implementation against ours."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import tyro

from dspark_jax.evaluation.golden import verify
from dspark_jax.evaluation.golden_case import Comparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyGolden:
    """Print the largest error of every recorded field; exit with 1 when one is past its tolerance."""

    directory: tyro.conf.Positional[Path]
    """Golden directory: drafter/, target/, train.npz, greedy_decode.json (docs/checkpoints.md)."""


def run(config: VerifyGolden) -> None:
    """Compares and prints."""
    comparisons = verify(config.directory)
    print(table(comparisons))
    failed = [item.field for item in comparisons if not item.passed]
    print(f"{len(comparisons)} fields compared, {len(failed)} past their tolerance")
    if failed:
        sys.exit(1)


def table(comparisons: list[Comparison]) -> str:
    """One line per field: error, tolerance, verdict."""
    width = max((len(item.field) for item in comparisons), default=0)
    verdict = {True: "ok", False: "FAILED"}
    return "\n".join(
        f"{item.field:{width}s}  {item.error:9.2e}  <= {item.tolerance:7.1e}  {verdict[item.passed]}"
        for item in comparisons
    )
