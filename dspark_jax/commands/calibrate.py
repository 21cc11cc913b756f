"""`dspark calibrate`: make the confidence head's numbers mean what they say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np

from dspark_jax.checkpoints.calibration import Calibration, CalibrationIdentity
from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.core.errors import InputError
from dspark_jax.data.sources import Prompt
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import SHIPPED, drafter_directory, load_engine
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.evaluation.calibration_report import (
    calibration_figures,
    calibration_table,
    full_block_rounds,
    plot_reliability,
)
from dspark_jax.evaluation.prompts import choose_prompts, prompt_hash, read_evaluation_prompts
from dspark_jax.evaluation.provenance import provenance
from dspark_jax.evaluation.runner import measure
from dspark_jax.speculation.calibration import fit_temperatures
from dspark_jax.speculation.verify_length import FullBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Fit Sequential Temperature Scaling on held-out prompts, and check it on others of them."""

    prompts: tuple[Path, ...]
    """Prompt files (only their held-out prompts are used) or evaluation sets with lines {"turns": [...]}."""
    output: Path
    """Calibration file (JSON)."""
    plot: Path | None = None
    """Also draw reliability diagrams, before and after, as a PNG."""
    target: str = "smollm2-135m"
    """Target model: embedded name, .gguf file, Hugging Face directory or hub id."""
    drafter: str = SHIPPED
    """Drafter directory, or "shipped"."""
    temperature: float = 1.0
    """Sampling temperature that the calibration is for; 0 is greedy."""
    num_prompts_per_domain: int = 32
    """Prompts of every domain; half of them fit, the other half check."""
    max_new_tokens: int = 128
    """Longest answer."""
    max_prompt_tokens: int = 256
    """Longer prompts are left out."""
    slots: int = 16
    """Requests decoded at the same time."""
    seed: int = 0
    """Decides the draws at temperatures above 0."""
    dtype: str = "float32"
    """dtype in which the models run."""
    self_check: bool = True
    """Try first whether the drafter fits the target."""

    def __post_init__(self):
        if self.num_prompts_per_domain < 2:
            raise InputError(
                given=f"num_prompts_per_domain={self.num_prompts_per_domain}",
                expected="at least 2: half of the prompts fit, the other half check",
                fix="raise num_prompts_per_domain",
            )


def run(config: Calibrate) -> None:
    """Decodes full blocks, fits, prints the errors before and after, and writes the file."""
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
    measured = measure(
        loaded,
        prompts,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )
    # By prompt, not by round: rounds of one answer resemble one another.
    halves = [
        [record for record in measured.records if prompt_hash(record.id, "dspark-calibrate") % 2 == half]
        for half in (0, 1)
    ]
    to_fit, to_check = map(full_block_rounds, halves)
    temperatures_np = fit_temperatures(to_fit.logits_np, to_fit.survived_np)
    before = calibration_figures(to_check, np.ones_like(temperatures_np))
    after = calibration_figures(to_check, temperatures_np)
    print(
        f"\nfitted on {len(to_fit.logits_np)} rounds, checked on {len(to_check.logits_np)} of other prompts"
    )
    print(calibration_table(before, after, temperatures_np))

    identity = CalibrationIdentity(
        target=loaded.target.identity,
        drafter=SafetensorsDirectory(drafter_directory(config.target, config.drafter)).identity(),
        sampling=str(dataclasses.replace(SamplingOptions(temperature=config.temperature), seed=0)),
        numerics=f"{config.dtype} on {jax.default_backend()}",
    )
    Calibration(
        identity=identity,
        temperatures=tuple(temperatures_np.tolist()),
        evidence={
            **provenance(),
            "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
            "rounds": {"fitted": len(to_fit.logits_np), "checked": len(to_check.logits_np)},
            "before": before.as_json(),
            "after": after.as_json(),
        },
    ).save(config.output)
    if config.plot:
        plot_reliability(to_check, temperatures_np, config.plot)
