"""`dspark evaluate`: accepted length on prompts that no drafter was trained on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.core.files import atomic_write
from dspark_jax.data.sources import Prompt
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import SHIPPED, load_engine
from dspark_jax.evaluation.accepted_length import CONFIDENCE_LEVEL, RESAMPLES, Acceptance, Estimate, summarise
from dspark_jax.evaluation.prompts import choose_prompts, read_evaluation_prompts
from dspark_jax.evaluation.provenance import provenance
from dspark_jax.evaluation.runner import Measurement, measure
from dspark_jax.speculation.verify_length import FullBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure accepted length and acceptance per position over full blocks, per domain, with intervals."""

    prompts: tuple[Path, ...]
    """Prompt files (only their held-out prompts are used) or evaluation sets with lines {"turns": [...]}."""
    output: Path
    """Result file (JSON)."""
    target: str = "smollm2-135m"
    """Target model: embedded name, .gguf file, Hugging Face directory or hub id."""
    drafter: str = SHIPPED
    """Drafter directory, "shipped", or "none" for the speed of plain decoding."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""
    num_prompts_per_domain: int = 32
    """Prompts of every domain, always the same ones."""
    max_new_tokens: int = 128
    """Longest answer."""
    max_prompt_tokens: int = 256
    """Longer prompts are left out."""
    slots: int = 16
    """Requests decoded at the same time."""
    seed: int = 0
    """Decides the draws at temperatures above 0, and the bootstrap."""
    dtype: str = "float32"
    """dtype in which the models run."""
    self_check: bool = True
    """Try whether the drafter fits the target, and stop if it does not."""


def run(config: Evaluate) -> None:
    """Decodes the prompts at every temperature, prints a table and writes the result file."""
    candidates = read_evaluation_prompts(config.prompts)
    loaded = load_engine(
        target=config.target,
        drafter=config.drafter,
        config=EngineConfig(
            slots=config.slots,
            max_context=config.max_prompt_tokens + config.max_new_tokens,
            policy=FullBlock(),
            dtype=config.dtype,
        ),
        check=config.self_check,
    )

    def fits(prompt: Prompt) -> bool:
        tokens = loaded.chat.render_prompt([{"role": "user", "content": prompt.text}])
        return len(tokens) <= config.max_prompt_tokens

    prompts = choose_prompts(candidates, config.num_prompts_per_domain, fits)
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
        "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
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
