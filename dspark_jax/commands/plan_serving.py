"""`dspark plan-serving`: will an engine fit a TPU slice, answered by the TPU compiler without a TPU."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path

import jax.numpy as jnp

from dspark_jax.commands.plan import device_kind, gib, target_dimensions
from dspark_jax.core.files import atomic_write
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.topology import tpu_devices
from dspark_jax.drafters.registry import make_drafter
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.plan import ServingPlan, plan_serving
from dspark_jax.engine.programs import Models
from dspark_jax.evaluation.provenance import plain_settings
from dspark_jax.speculation.sampling import Draw
from dspark_jax.training.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanServing:
    """Compile the programs of an engine whose devices share every layer, and print what they need."""

    recipe: Path
    """Recipe of the drafter, such as configs/dspark.py."""
    target: str
    """Target of the recipe, as `train.py --target` takes it."""
    topology: str
    """TPU topology, such as v5e:2x4; all of its devices share every layer."""
    target_config: Path | None = None
    """config.json of the target; default: targets/TARGET.json beside the recipe, else its checkpoint's."""
    slots: int = 64
    """Requests decoded at the same time, R."""
    rows: tuple[int, ...] = (64, 128, 256, 512)
    """Target rows of a step, M."""
    max_context: int = 4096
    """Longest prompt plus answer, in tokens; there are pages for all slots at this length."""
    dtype: str = "bfloat16"
    """dtype of weights and caches."""
    greedy: bool = False
    """Requests draw greedily; otherwise with a temperature and filters."""
    json: Path | None = None
    """Also write the figures here."""


def run(config: PlanServing) -> None:
    """Compiles, prints the table and writes the JSON file."""
    recipe: TrainConfig = runpy.run_path(str(config.recipe))["get_config"](target=config.target)
    target = target_dimensions(config.recipe, config.target, config.target_config, recipe.target)
    dtype = jnp.dtype(config.dtype)
    drafter = make_drafter(recipe.drafter.resolve(target), dtype)
    devices = tpu_devices(config.topology)
    engine = EngineConfig(slots=config.slots, max_context=config.max_context, dtype=dtype)
    plan = plan_serving(
        Models(target=target, drafter=drafter, dtype=dtype),
        engine,
        make_mesh(tensor=len(devices), devices=devices),
        config.rows,
        draw=Draw.GREEDY if config.greedy else Draw.FILTERED,
    )
    print(report(plan, config))
    if config.json:
        with atomic_write(config.json, "w") as file:
            json.dump({"config": plain_settings(config), **dataclasses.asdict(plan)}, file, indent=2)


def report(plan: ServingPlan, config: PlanServing) -> str:
    """The table for a terminal."""
    kind = device_kind(config.topology)
    lines = [
        f"{config.target} with the drafter of {config.recipe} on {config.topology}, devices of "
        f"{kind.hbm_gib:g} GiB; {config.slots} requests of up to {config.max_context} tokens, {config.dtype}",
        "",
        "fits" if plan.fits else "DOES NOT FIT",
        "",
        f"  weights{'':17s}{gib(plan.weight_bytes)}",
        f"  pages and slots{'':9s}{gib(plan.page_bytes)}",
        "",
        f"  {'program':24s}{'temporary':>12s}{'all together':>13s}  collectives",
    ]
    for program in plan.programs:
        moved = ", ".join(
            f"{found.count} {name} {found.total_bytes / 2**20:.1f} MiB"
            for name, found in program.collectives.items()
        )
        sizes = gib(program.temporary_bytes) + gib(program.total_bytes)
        lines.append(f"  {program.name:24s}{sizes}  {program.refusal or moved}")
    return "\n".join(lines)
