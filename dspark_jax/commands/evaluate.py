"""`dspark evaluate`: accepted length on prompts that no drafter was trained on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.core.files import atomic_write
from dspark_jax.evaluation.accepted_length import CONFIDENCE_LEVEL, RESAMPLES, Acceptance, Estimate, summarise
from dspark_jax.evaluation.held_out import HeldOutRun
from dspark_jax.evaluation.provenance import plain_settings, provenance
from dspark_jax.evaluation.runner import Measurement, measure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(HeldOutRun):
    """Measure accepted length and acceptance per position over full blocks, per domain, with intervals."""

    output: Path
    """Result file (JSON)."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""


def run(config: Evaluate) -> None:
    """Decodes the prompts at every temperature, prints a table and writes the result file."""
    loaded, prompts = config.load()
    results = []
    for temperature in config.temperatures:
        measured = measure(
            loaded, prompts, temperature=temperature, max_new_tokens=config.max_new_tokens, seed=config.seed
        )
        acceptance = summarise(measured.records, loaded.engine.models.block_len, seed=config.seed)
        print(table(temperature, measured, acceptance), flush=True)
        results.append(_result(temperature, measured, acceptance))
    report = {
        **provenance(),
        "config": plain_settings(config),
        "target_identity": loaded.target.identity,
        "block_len": loaded.engine.models.block_len,
        "interval": {
            "level": CONFIDENCE_LEVEL,
            "method": "percentile bootstrap over prompts",
            "resamples": RESAMPLES,
        },
        "results": results,
    }
    with atomic_write(config.output, "w") as file:
        json.dump(report, file, indent=2, allow_nan=False)


def _result(temperature: float, measured: Measurement, acceptance: Acceptance) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "seconds": measured.seconds,
        "new_tokens": measured.new_tokens,
        "tokens_per_s": measured.tokens_per_s,
        "macro": {"accepted_length": acceptance.macro.as_json()},
        "domains": {name: domain.as_json() for name, domain in acceptance.domains.items()},
    }


def table(temperature: float, measured: Measurement, acceptance: Acceptance) -> str:
    """The result of one temperature, aligned for a terminal."""
    rows: list[tuple[str, ...]] = [
        ("domain", "prompts", "rounds", "accepted length", "survival %", "conditional acceptance %")
    ]
    for name, domain in acceptance.domains.items():
        rates = [_rates(rates) for rates in (domain.positions.survival_np, domain.positions.conditional_np)]
        counts = (str(domain.prompts), str(domain.rounds))
        rows.append((name, *counts, _interval(domain.accepted_length), *rates))
    domains = acceptance.domains.values()
    counts = (str(sum(domain.prompts for domain in domains)), str(sum(domain.rounds for domain in domains)))
    rows.append(("macro", *counts, _interval(acceptance.macro), "", ""))

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    template = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<>><<<", widths, strict=True))
    head, *body, macro = [template.format(*row).rstrip() for row in rows]
    title = f"temperature {temperature:g}: {measured.new_tokens} tokens, {measured.tokens_per_s:.1f} tokens/s"
    rule = "-" * max(map(len, (head, *body)))
    return "\n".join(["", title, rule, head, rule, *body, rule, macro])


def _interval(estimate: Estimate) -> str:
    if np.isnan(estimate.low):
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _rates(rates_np: np.ndarray) -> str:
    return " ".join(" -" if np.isnan(rate) else f"{100 * rate:2.0f}" for rate in rates_np)
