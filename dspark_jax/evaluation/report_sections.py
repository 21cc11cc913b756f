"""Result files -> the sections of a report, runs of one kind side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.report_acceptance import comparisons, evaluations
from dspark_jax.evaluation.report_diagnostics import calibrations, diagnostics
from dspark_jax.evaluation.report_parts import Result, Section
from dspark_jax.evaluation.report_speed import loads, speeds

KINDS: dict[str, Callable[[Sequence[Result]], list[Section]]] = {
    "comparison": comparisons,
    "evaluation": evaluations,
    "diagnostics": diagnostics,
    "calibration": calibrations,
    "speed": speeds,
    "load": loads,
}
"""Kind of a result -> the sections that all results of that kind make."""


def read_results(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Reads result files; each gets a `kind` if it has none, and its `path`.

    Raises:
      InputError: a file is not there, is not JSON, or is no result that a report can show.
    """
    results = []
    for path in paths:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(
                given=f"{path}: {error}", expected="a result file (JSON)", fix="check the path"
            ) from error
        kind = _kind(content)
        if kind is None:
            raise InputError(
                given=f"{path}, which is no result that a report can show",
                expected="what evaluate, compare, diagnose, calibrate or benchmarks/*.py write as JSON",
                fix="leave it out",
            )
        results.append({"name": path.stem, **content, "kind": kind, "path": str(path)})
    return results


def _kind(content: Any) -> str | None:
    if not isinstance(content, dict):
        return None
    if content.get("kind") in KINDS:
        return content["kind"]
    if "round_ms" in content:
        return "speed"
    if content.get("rows") and "scheduler" in content["rows"][0]:
        return "load"
    if "temperatures" in content and "evidence" in content:
        return "calibration"
    return "evaluation" if "results" in content and "block_len" in content else None


def sections(results: Sequence[Result]) -> list[Section]:
    """All sections, runs of one kind side by side."""
    made = []
    for kind, make in KINDS.items():
        of_kind = [result for result in results if result["kind"] == kind]
        if of_kind:
            made += make(of_kind)
    return made
