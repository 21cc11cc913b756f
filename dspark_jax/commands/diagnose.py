"""`dspark diagnose`: thresholds, calibration and context length, from the rounds of an evaluation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from dspark_jax.core.files import atomic_write
from dspark_jax.evaluation.diagnostics import Diagnosis, diagnose
from dspark_jax.evaluation.provenance import plain_settings, provenance
from dspark_jax.evaluation.rounds_log import SUFFIX, read_rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnose:
    """Compute diagnostics from the rounds of an evaluation; needs no model and takes seconds."""

    rounds: Path
    """NAME.rounds.jsonl, which `dspark evaluate` writes beside its result."""
    output: Path
    """Result file (JSON) for `dspark report`."""
    name: str = ""
    """What tables and figures call this run; by default the name of the rounds' file."""


def run(config: Diagnose) -> None:
    """Reads the rounds, prints tables and writes the result."""
    binding, answers = read_rounds(config.rounds)
    results = []
    for temperature in sorted({answer.temperature for answer in answers}):
        found = diagnose([answer.rounds for answer in answers if answer.temperature == temperature])
        print(f"\ntemperature {temperature:g}\n{table(found)}", flush=True)
        results.append({"temperature": temperature, **dataclasses.asdict(found)})
    report = {
        "kind": "diagnostics",
        "name": config.name or config.rounds.name.removesuffix(SUFFIX),
        **provenance(),
        "config": plain_settings(config),
        "evaluation": binding,
        "results": results,
    }
    with atomic_write(config.output, "w") as file:
        json.dump(report, file, indent=2, allow_nan=False)


def table(found: Diagnosis) -> str:
    """For a terminal."""
    lines = []
    if found.fitted is not None:
        lines.append(f"{'position':>16s}  {'T':>5s}  {'shift':>5s}  {'ECE % raw':>9s}  {'scaled':>6s}")
        raw, scaled = found.figures["raw"]["ece"], found.figures["scaled"]["ece"]
        for k, (T, shift) in enumerate(zip(*found.fitted, strict=True)):
            lines.append(f"{k + 1:16d}  {T:5.2f}  {shift:5.2f}  {100 * raw[k]:9.2f}  {100 * scaled[k]:6.2f}")
        lines.append(f"\n{'threshold':>16s}  {'accepted':>8s}  {'rejected':>8s}  {'acceptance %':>12s}")
        for row in found.thresholds["all"]:
            lines.append(
                f"{row['threshold']:16.1f}  {row['accepted']:8.3f}  {row['rejected']:8.3f}"
                f"  {_percent(row['acceptance']):>12s}"
            )
    if found.shift:
        domains = list(next(iter(found.shift.values())))
        lines.append(f"\n{'ECE %, fitted on':>16s}  " + "  ".join(f"{domain:>10s}" for domain in domains))
        for name, errors in found.shift.items():
            cells = "  ".join(f"{100 * errors[domain]:10.2f}" for domain in domains)
            lines.append(f"{name:>16s}  {cells}")
    lines.append(f"\n{'context tokens':>16s}  {'rounds':>8s}  {'accepted length':>15s}")
    for row in found.context:
        place = f"{row['from_tokens']}-{row['below_tokens'] - 1}"
        lines.append(f"{place:>16s}  {row['rounds']:8d}  {row['accepted_length']:15.2f}")
    return "\n".join(lines)


def _percent(share: Any) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
