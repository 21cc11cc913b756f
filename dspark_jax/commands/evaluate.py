"""`dspark evaluate`: accepted length on prompts that no drafter was trained on."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.core.errors import require
from dspark_jax.core.files import atomic_write
from dspark_jax.engine.load import NONE, LoadedEngine, drafter_directory
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.evaluation.accepted_length import CONFIDENCE_LEVEL, RESAMPLES, Acceptance, Estimate, summarise
from dspark_jax.evaluation.held_out import EvaluationPrompts, HeldOutRun
from dspark_jax.evaluation.provenance import plain_settings, provenance
from dspark_jax.evaluation.rounds_log import RoundsLog, prompts_digest, rounds_path
from dspark_jax.evaluation.runner import Measurement, measure
from dspark_jax.evaluation.suites import GROUPS, PAPER_NEW_TOKENS, PAPER_TEMPERATURE, SUITES

# What may change when an interrupted evaluation goes on: it decides neither prompts nor rounds.
MAY_CHANGE = ("output", "slots", "self_check", "name")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(HeldOutRun):
    """Measure accepted length and acceptance per position over full blocks, per domain, with intervals.

    Repeating the command continues an interrupted run.
    """

    output: Path
    """Result file (JSON). A table (.csv) and the rounds behind it (.rounds.jsonl) are written beside it."""
    name: str = ""
    """What tables and figures call this run; by default the name of the result file."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""
    repeats: int = 1
    """Answers to every prompt, from seeds seed, seed + 1, ...; greedy ones would all be the same."""
    paper_protocol: bool = False
    """As the paper evaluates: temperature 1 only, answers of up to 2048 tokens."""

    def __post_init__(self):
        super().__post_init__()
        require(
            self.repeats >= 1 and len(self.temperatures) > 0,
            given=f"repeats={self.repeats}, temperatures={self.temperatures}",
            expected="at least one answer to every prompt",
            fix="raise repeats, or pass a temperature",
        )


def run(config: Evaluate) -> dict[str, Any]:
    """Decodes at every temperature, prints tables, writes the result files and returns the result."""
    if config.paper_protocol:
        config = dataclasses.replace(
            config, temperatures=(PAPER_TEMPERATURE,), max_new_tokens=PAPER_NEW_TOKENS
        )
    loaded, chosen = config.load()
    results = []
    with contextlib.closing(RoundsLog(rounds_path(config.output), _binding(config, loaded, chosen))) as log:
        for temperature in config.temperatures:
            repeats = config.repeats if temperature > 0 else 1
            measured = measure(
                loaded,
                chosen.prompts,
                temperature=temperature,
                max_new_tokens=config.max_new_tokens,
                seed=config.seed,
                repeats=repeats,
                log=log,
            )
            groups = {group: [name for name in SUITES if SUITES[name].group == group] for group in GROUPS}
            acceptance = summarise(
                measured.records, loaded.engine.models.block_len, seed=config.seed, groups=groups
            )
            print(table(temperature, measured, acceptance), flush=True)
            if chosen.missing_suites:
                print(f"the averages lack {', '.join(chosen.missing_suites)}: no file", flush=True)
            results.append(_result(temperature, repeats, config.seed, measured, acceptance))
    report = {
        "kind": "evaluation",
        "name": config.name or config.output.stem,
        **provenance(),
        "config": plain_settings(config),
        "target_identity": loaded.target.identity,
        "template": loaded.chat.name,
        "block_len": loaded.engine.models.block_len,
        "missing_suites": list(chosen.missing_suites),
        "interval": {
            "level": CONFIDENCE_LEVEL,
            "method": "percentile bootstrap over prompts",
            "resamples": RESAMPLES,
        },
        "results": results,
    }
    with atomic_write(config.output, "w") as file:
        json.dump(report, file, indent=2, allow_nan=False)
    _write_csv(config.output.with_suffix(".csv"), report)
    return report


def _binding(config: Evaluate, loaded: LoadedEngine, chosen: EvaluationPrompts) -> dict[str, Any]:
    """What decides the rounds."""
    settings = {name: value for name, value in plain_settings(config).items() if name not in MAY_CHANGE}
    drafter = NONE
    if config.drafter != NONE:
        drafter = SafetensorsDirectory(drafter_directory(config.target, config.drafter)).identity()
    return {
        **settings,
        "target_identity": loaded.target.identity,
        "drafter_identity": drafter,
        "prompts_digest": prompts_digest(chosen.prompts),
    }


def _result(
    temperature: float, repeats: int, seed: int, measured: Measurement, acceptance: Acceptance
) -> dict[str, Any]:
    sampler = dataclasses.asdict(SamplingOptions(temperature=temperature))
    del sampler["seed"], sampler["sample"]
    whole = acceptance.whole.as_json()
    del whole["per_prompt"]  # the domains have it
    return {
        "temperature": temperature,
        "sampler": sampler if temperature > 0 else "greedy",
        "seeds": [seed + repeat for repeat in range(repeats)],
        "seconds": measured.seconds,
        "new_tokens": measured.new_tokens,
        "tokens_per_s": measured.tokens_per_s,
        "macro": {"accepted_length": acceptance.macro.as_json()},
        "groups": {name: estimate.as_json() for name, estimate in acceptance.groups.items()},
        "all": whole,
        "domains": {name: domain.as_json() for name, domain in acceptance.domains.items()},
    }


def _write_csv(path: Path, report: dict[str, Any]) -> None:
    """One line for every temperature and domain."""
    G = report["block_len"]
    columns = ["name", "temperature", "domain", "prompts", "rounds", "new_tokens", "accepted_length"]
    columns += ["low", "high", "verify_rate", "accept_rate"]
    columns += [f"{kind}_{k}" for kind in ("survival", "conditional") for k in range(1, G + 1)]
    with atomic_write(path, "w") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for result in report["results"]:
            for name, domain in result["domains"].items():
                tau = domain["accepted_length"]
                row = [report["name"], result["temperature"], name]
                row += [domain[column] for column in ("prompts", "rounds", "new_tokens")]
                row += [tau["value"], tau["low"], tau["high"], domain["verify_rate"], domain["accept_rate"]]
                writer.writerow([*row, *domain["survival"], *domain["conditional"]])
            tau = result["macro"]["accepted_length"]
            whole = [report["name"], result["temperature"], "macro", "", "", result["new_tokens"]]
            writer.writerow([*whole, tau["value"], tau["low"], tau["high"]])


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
    rows += [
        (f"mean of {name}", "", "", _interval(estimate), "", "")
        for name, estimate in acceptance.groups.items()
    ]
    rows.append(("macro", *counts, _interval(acceptance.macro), "", ""))

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    template = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<>><<<", widths, strict=True))
    head, *body = [template.format(*row).rstrip() for row in rows]
    averages = body[len(domains) :]
    title = f"temperature {temperature:g}: {measured.new_tokens} tokens, {measured.tokens_per_s:.1f} tokens/s"
    rule = "-" * max(map(len, (head, *body)))
    return "\n".join(["", title, rule, head, rule, *body[: len(domains)], rule, *averages])


def _interval(estimate: Estimate) -> str:
    if np.isnan(estimate.low):
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _rates(rates_np: np.ndarray) -> str:
    return " ".join(" -" if np.isnan(rate) else f"{100 * rate:2.0f}" for rate in rates_np)
