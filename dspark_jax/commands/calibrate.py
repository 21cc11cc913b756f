"""`dspark calibrate`: make the confidence head's numbers mean what they say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from dspark_jax.checkpoints.calibration import Calibration, CalibrationIdentity
from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.core.errors import InputError
from dspark_jax.engine.load import drafter_directory
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.evaluation.calibration_report import (
    calibration_figures,
    calibration_table,
    full_block_rounds,
    plot_reliability,
)
from dspark_jax.evaluation.diagnostics import halves
from dspark_jax.evaluation.held_out import HeldOutRun
from dspark_jax.evaluation.provenance import plain_settings, provenance
from dspark_jax.evaluation.runner import measure
from dspark_jax.speculation.calibration import fit_scaling, unscaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate(HeldOutRun):
    """Fit Sequential Temperature Scaling, with a shift, on held-out prompts, and check it on others of them.

    Half of the prompts fit, the other half check.
    """

    output: Path
    """Calibration file (JSON)."""
    plot: Path | None = None
    """Also draw reliability diagrams, before and after, as a PNG."""
    temperature: float = 1.0
    """Sampling temperature that the calibration is for; 0 is greedy."""

    def __post_init__(self):
        super().__post_init__()
        if self.num_prompts_per_domain is not None and self.num_prompts_per_domain < 2:
            raise InputError(
                given=f"num_prompts_per_domain={self.num_prompts_per_domain}",
                expected="at least 2: half of the prompts fit, the other half check",
                fix="raise num_prompts_per_domain",
            )


def run(config: Calibrate) -> None:
    """Decodes full blocks, fits, prints the errors before and after, and writes the file."""
    loaded, chosen = config.load()
    measured = measure(
        loaded,
        chosen.prompts,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )
    to_fit, to_check = map(full_block_rounds, halves(measured.records))
    scaling_np = fit_scaling(to_fit.logits_np, to_fit.survived_np)
    before = calibration_figures(to_check, unscaled(scaling_np.shape[1]))
    after = calibration_figures(to_check, scaling_np)
    print(
        f"\nfitted on {len(to_fit.logits_np)} rounds, checked on {len(to_check.logits_np)} of other prompts"
    )
    print(calibration_table(before, after, scaling_np))

    identity = CalibrationIdentity(
        target=loaded.target.identity,
        drafter=SafetensorsDirectory(drafter_directory(config.target, config.drafter)).identity(),
        template=loaded.chat.name,
        sampling=SamplingOptions(temperature=config.temperature).law,
        numerics=f"{config.dtype} on {jax.default_backend()}",
    )
    Calibration(
        identity=identity,
        temperatures=tuple(scaling_np[0].tolist()),
        shifts=tuple(scaling_np[1].tolist()),
        evidence={
            **provenance(),
            "config": plain_settings(config),
            "rounds": {"fitted": len(to_fit.logits_np), "checked": len(to_check.logits_np)},
            "before": before.as_json(),
            "after": after.as_json(),
        },
    ).save(config.output)
    if config.plot:
        plot_reliability(to_check, scaling_np, config.plot)
