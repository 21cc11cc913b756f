"""Several drafters on the same prompts: what each was trained on, and differences with their intervals."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.accepted_length import TAILS, Estimate, times_drawn
from dspark_jax.evaluation.training_curve import read_metrics

Result = Mapping[str, Any]
"""One temperature of an evaluation's result file."""


def paired_difference(result: Result, baseline: Result, *, seed: int = 0) -> Estimate:
    """Macro accepted length of one run minus that of another, with the interval over their common prompts.

    The same prompts are drawn for both: what makes a prompt hard for both of them cancels.

    Raises:
      InputError: the runs have no domain in common.
    """
    common = sorted(set(result["domains"]) & set(baseline["domains"]))
    if not common:
        raise InputError(
            given=f"runs over {sorted(result['domains'])} and over {sorted(baseline['domains'])}",
            expected="a domain in common",
            fix="evaluate both on the same prompts",
        )
    values, draws = [], []
    for domain in common:
        pair = [run["domains"][domain]["per_prompt"] for run in (result, baseline)]
        prompts = sorted(set(pair[0]) & set(pair[1]))
        sums_PX = np.array([[*pair[0][name], *pair[1][name]] for name in prompts]).reshape(-1, 4)
        sums_PX = sums_PX[(sums_PX[:, 0] > 0) & (sums_PX[:, 2] > 0)]
        values.append(_difference(sums_PX.sum(0)) if len(sums_PX) else np.nan)
        if len(sums_PX) < 2:
            draws.append(np.full(1, np.nan))
        else:
            times = times_drawn(len(sums_PX), [seed, zlib.crc32(domain.encode())])
            draws.append(_difference(times @ sums_PX))
    low, high = np.quantile(np.mean(np.broadcast_arrays(*draws), axis=0), TAILS)
    return Estimate(value=float(np.mean(values)), low=float(low), high=float(high))


def _difference(sums: np.ndarray) -> np.ndarray:
    return sums[..., 1] / sums[..., 0] - sums[..., 3] / sums[..., 2]


def training_budget(run_dir: Path) -> dict[str, float]:
    """What a run was given: steps, block positions predicted, and seconds of its steps."""
    rows = read_metrics(run_dir)
    steps_np = np.diff([row["step"] for row in rows], prepend=0)
    return {
        "steps": rows[-1]["step"],
        "predictions": float(sum(row["rows"] * steps for row, steps in zip(rows, steps_np, strict=True))),
        "seconds": float(sum(steps / row["steps_per_s"] for row, steps in zip(rows, steps_np, strict=True))),
    }


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For a terminal: one line for each row and temperature.

    Args:
      rows: as `dspark compare` writes them.
    """
    lines = []
    for place, temperature in enumerate(result["temperature"] for result in rows[0]["results"]):
        head = f"{'':16s}  {'steps':>6s}  {'minutes':>7s}  {'accepted length':>20s}  {'minus first row':>22s}"
        lines += ["", f"temperature {temperature:g}", head]
        for row in rows:
            result = row["results"][place]
            budget = row["training"]
            lines.append(
                f"{row['name']:16s}  {budget['steps']:6.0f}  {budget['seconds'] / 60:7.1f}"
                f"  {_interval(result['macro']):>20s}  {_interval(result['difference'], sign='+'):>22s}"
            )
    return "\n".join(lines)


def _interval(estimate: Mapping[str, float | None], sign: str = "") -> str:
    if estimate["value"] is None:
        return "-"
    if estimate["low"] is None or estimate["high"] is None:
        return f"{estimate['value']:{sign}.2f}"
    return f"{estimate['value']:{sign}.2f} [{estimate['low']:{sign}.2f}, {estimate['high']:{sign}.2f}]"
