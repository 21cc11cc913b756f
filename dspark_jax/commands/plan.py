"""`dspark plan`: will a run fit a pod, and what will bound it, answered by the TPU compiler without a TPU."""

from __future__ import annotations

import dataclasses
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark_jax.checkpoints.targets import open_source
from dspark_jax.core.devices import TPU_KINDS, DeviceKind
from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.topology import tpu_devices
from dspark_jax.evaluation.provenance import plain_settings
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.families import decoder_config_from_hf, text_config
from dspark_jax.training.config import MeshConfig, TrainConfig
from dspark_jax.training.plan import StepPlan, plan_step

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Compile the training step of a recipe for a TPU topology and print what it needs. Nothing is run."""

    recipe: Path
    """Recipe, such as configs/dspark.py."""
    target: str
    """Target of the recipe, as `train.py --target` takes it."""
    topology: str
    """TPU topology, such as v5e:4x4, v5p:2x2x2, v6e:4x4 or tpu7x:2x2x1."""
    slices: int = 1
    """Slices of this topology, connected by a network; they lie along the data axis (--mesh.data)."""
    target_config: Path | None = None
    """config.json of the target; default: targets/TARGET.json beside the recipe, else its checkpoint's."""
    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(data=1, fsdp=-1))
    """Devices per mesh axis."""
    batch_size: int | None = None
    """Sequences per step; default: the recipe's."""
    max_length: int | None = None
    """Tokens per sequence; default: the recipe's."""
    microbatches: int | None = None
    """Parts of the batch run one after the other; default: the recipe's."""
    feature_store: bool = False
    """Features come from a store instead of the target running online."""
    search: bool = False
    """Also search for the fewest microbatches that fit, by halving or doubling their number."""
    efficiency: float = 0.4
    """Share of the roofline that tokens/s is stated at."""
    json: Path | None = None
    """Also write the figures here."""

    def __post_init__(self):
        if not 0 < self.efficiency <= 1:
            raise InputError(
                given=f"efficiency={self.efficiency}", expected="a share in (0, 1]", fix="correct it"
            )


def run(config: Plan) -> None:
    """Compiles, prints the table and the advice, and writes the JSON file."""
    run_config, target = _resolve(config)
    devices = tpu_devices(config.topology, config.slices)
    kind = device_kind(config.topology)
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
    plan = plan_step(run_config, target, mesh)
    if config.search:
        run_config, plan = fewest_microbatches(run_config, plan, lambda run: plan_step(run, target, mesh))
    print(report(plan, run_config, kind, config, len(devices)))
    if config.json:
        content = {
            "config": plain_settings(config),
            "devices": len(devices),
            "microbatches": run_config.microbatches,
            **dataclasses.asdict(plan),
            "roofline_s": plan.roofline_s(kind, len(devices)),
        }
        with atomic_write(config.json, "w") as file:
            json.dump(content, file, indent=2)


def fewest_microbatches(
    run_config: TrainConfig, plan: StepPlan, plan_of: Callable[[TrainConfig], StepPlan]
) -> tuple[TrainConfig, StepPlan]:
    """The run, and its plan, with half as many microbatches while that fits, or twice as many until it does.

    Args:
      run_config: the run.
      plan: its plan.
      plan_of: plans the same run with another number of microbatches.
    """
    began_fitting = plan.fits
    while plan.fits == began_fitting:
        n, B = run_config.microbatches, run_config.data.batch_size
        number = n // 2 if began_fitting else 2 * n
        if number < 1 or number > B or B % number:
            break
        tried_config = dataclasses.replace(run_config, microbatches=number)
        tried = plan_of(tried_config)
        if began_fitting and not tried.fits:
            break
        run_config, plan = tried_config, tried
    return run_config, plan


def report(plan: StepPlan, run_config: TrainConfig, kind: DeviceKind, config: Plan, devices: int) -> str:
    """The table for a terminal."""
    lines = [
        f"{config.recipe} --target {config.target} on {config.topology}: {devices} devices of "
        f"{kind.hbm_gib:g} GiB, batch {run_config.data.batch_size} x {run_config.data.max_length} in "
        f"{run_config.microbatches} microbatches",
        "",
        "fits" if plan.fits else f"DOES NOT FIT: {plan.refusal}",
        "",
        "per device",
    ]
    memory = {
        "target, embedding, LM head": plan.target_bytes,
        "parameters": plan.parameter_bytes,
        "optimiser": plan.optimizer_bytes,
        "batch": plan.batch_bytes,
        "activations and temporaries": plan.temporary_bytes,
        "all together": plan.total_bytes,
    }
    lines += [f"  {name:28s}{gib(size)}" for name, size in memory.items()]
    lines += ["", "collectives"]
    lines += [
        f"  {name:20s}{found.count:5d} x, {found.total_bytes / 2**20:10.1f} MiB, largest "
        f"{found.largest_bytes / 2**20:.1f} MiB"
        for name, found in plan.collectives.items()
    ] or ["  none"]
    times = plan.roofline_s(kind, devices)
    bound = max(times, key=times.__getitem__)
    step_s = times[bound] / config.efficiency
    lines += [
        "",
        f"{plan.flops / 1e12:.1f} TFLOP and at most {plan.traffic_bytes / 1e12:.2f} TB of operands per step",
        "roofline: " + ", ".join(f"{name} {1000 * time:.1f} ms" for name, time in times.items()),
        f"bound by {bound}; at {config.efficiency:.0%} of it {plan.tokens / step_s:,.0f} tokens/s",
        *advice(plan, run_config, devices),
    ]
    return "\n".join(lines)


def advice(plan: StepPlan, run_config: TrainConfig, devices: int) -> list[str]:
    """Flags that would help, where the plan shows that they would."""
    hints, mesh = [], run_config.mesh
    rows = run_config.data.batch_size // run_config.microbatches
    shares = mesh.data * mesh.fsdp * mesh.expert if mesh.tensor == -1 else devices // mesh.tensor
    if not plan.fits and rows > shares:
        hints.append(
            f"hint: raise --microbatches to {run_config.microbatches * rows // shares}: then one sequence "
            f"instead of {rows // shares} is at once in each of {shares} parts of the mesh"
        )
    elif not plan.fits:
        hints.append(
            "hint: one sequence at once is too much for a device: raise --mesh.tensor, which divides heads, "
            "MLP and vocabulary (--mesh.fsdp divides sequences and parameters)"
        )
    if not plan.fits and plan.target_bytes > plan.parameter_bytes + plan.optimizer_bytes:
        hints.append(
            "hint: of what stays, the target takes the most: --feature-store leaves it out of the step"
        )
    if rows % shares:
        hints.append(
            f"hint: {rows} sequences at once do not fill the {shares} parts of the mesh that share it: "
            "lower --microbatches"
        )
    return hints


def _resolve(config: Plan) -> tuple[TrainConfig, DecoderConfig]:
    run_config: TrainConfig = runpy.run_path(str(config.recipe))["get_config"](target=config.target)
    changes: dict[str, Any] = {
        name: getattr(config, name) for name in ("batch_size", "max_length") if getattr(config, name)
    }
    run_config = dataclasses.replace(
        run_config,
        data=dataclasses.replace(run_config.data, **changes),
        microbatches=config.microbatches or run_config.microbatches,
        mesh=config.mesh,
        feature_store=Path("store") if config.feature_store else None,
    )
    given = (config.recipe, config.target, config.target_config)
    return run_config, target_dimensions(*given, run_config.target)


def target_dimensions(recipe: Path, name: str, path: Path | None, checkpoint: str) -> DecoderConfig:
    """Of a given config.json, of targets/NAME.json beside the recipe, or of the target's checkpoint."""
    beside = recipe.parent / "targets" / f"{name}.json"
    if path is None and not beside.exists():
        return decoder_config_from_hf(open_source(checkpoint).config)
    return decoder_config_from_hf(text_config(json.loads((path or beside).read_text())))


def device_kind(topology: str) -> DeviceKind:
    """The figures of a topology's devices.

    Raises:
      InputError: an unknown kind.
    """
    name = topology.partition(":")[0]
    if name not in TPU_KINDS:
        raise InputError(
            given=f"topology {topology!r}", expected=f"one of {sorted(TPU_KINDS)}", fix="correct the name"
        )
    return TPU_KINDS[name]


def gib(size: int | None) -> str:
    """Bytes for a column of a table."""
    return "  unknown" if size is None else f"{size / GIB:8.2f} GiB"
