"""`dspark profile`: what a round costs on this machine, as the scheduler will see it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import SHIPPED, load_engine
from dspark_jax.engine.profile import default_directory, measure_costs, save_costs
from dspark_jax.evaluation.cost_plot import cost_table, plot_costs
from dspark_jax.speculation.schedule import Lagged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Measure the engine's compiled programs: verification by requests, rows and context, and the draft."""

    target: str = "smollm2-135m"
    """Target model: embedded name, .gguf file, Hugging Face directory or hub id."""
    drafter: str = SHIPPED
    """Drafter directory, or "shipped"."""
    slots: int = 4
    """Requests decoded at the same time, as it will be served."""
    max_context: int = 1024
    """Longest prompt plus answer, as it will be served."""
    tensor: int = 1
    """Devices that share every layer of target and drafter (tensor parallelism), as it will be served."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype in which the models run."""
    output: Path | None = None
    """Where to store the table (JSON); by default where engines with the same fingerprint look for it."""
    plot: Path | None = None
    """Also draw the table as a PNG."""
    every_context: bool = False
    """Measure every context bucket instead of the smallest and the largest."""


def run(config: Profile) -> None:
    """Measures, prints, stores."""
    engine_config = EngineConfig(
        slots=config.slots,
        max_context=config.max_context,
        policy=Lagged(),
        tensor=config.tensor,
        dtype=config.dtype,
    )
    loaded = load_engine(target=config.target, drafter=config.drafter, config=engine_config, check=False)
    table = measure_costs(loaded.engine.programs, every_context=config.every_context)
    path = config.output or default_directory() / f"{table.fingerprint}.json"
    save_costs(table, path)
    print(cost_table(table))
    print(f"table: {path}")
    if config.plot:
        plot_costs(table, config.plot)
        print(f"plot: {config.plot}")
