"""What the programs of an engine need on machines that are not at hand: compiled for them, never run."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from tqdm import tqdm

from dspark_jax.core.program_costs import Collective, collectives, device_bytes
from dspark_jax.drafters.contract import SharedWeights
from dspark_jax.engine.compiled import Programs
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.programs import Models
from dspark_jax.engine.state import Weights
from dspark_jax.speculation.sampling import Draw
from dspark_jax.targets.decoder import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """One program; bytes are per device."""

    name: str
    refusal: str
    """The compiler's words where it does not fit, else empty."""
    temporary_bytes: int | None = None
    total_bytes: int | None = None
    """With weights and pages."""
    collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """The programs of an engine, and what they share; bytes are per device."""

    weight_bytes: int
    page_bytes: int
    """Keys and values of target and drafter, and the slots."""
    programs: list[ProgramPlan]

    @property
    def fits(self) -> bool:
        """Whether every program does."""
        return not any(program.refusal for program in self.programs)


def plan_serving(
    models: Models, config: EngineConfig, mesh: Mesh, rows: tuple[int, ...], *, draw: Draw
) -> ServingPlan:
    """Compiles a chunk of a prompt, a draft for all slots, and their verification in so many rows.

    Args:
      models: the networks.
      config: shapes; all slots are taken.
      mesh: devices, real or of a topology.
      rows: target rows of a step, M.
      draw: what requests ask for at most.
    """
    programs = Programs(models, config, abstract_weights(models, models.dtype), mesh=mesh)
    R, chunk = config.slots, config.prefill_buckets[-1]
    compile_of = {f"prefill {chunk}": lambda: programs.prefill(chunk, draw)}
    if models.drafter is not None:
        compile_of[f"draft R={R}"] = lambda: programs.draft(R, draw)
    for M in rows:
        compile_of[f"verify R={R} M={M}"] = lambda M=M: programs.verify(R, M, draw)
    return ServingPlan(
        weight_bytes=device_bytes(programs.weights),
        page_bytes=device_bytes(programs.state),
        programs=[
            _planned(name, compile_, programs)
            for name, compile_ in tqdm(compile_of.items(), desc="compiling", unit="program")
        ],
    )


def _planned(name: str, compile_: Any, programs: Programs) -> ProgramPlan:
    known = set(programs.compiled)
    try:
        compile_()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return ProgramPlan(name=name, refusal=str(error).splitlines()[0])
    (key,) = set(programs.compiled) - known
    compiled: Any = programs.compiled[key]
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    # Pages that a program does not touch lie there all the same.
    idle = device_bytes(programs.weights) + device_bytes(programs.state) - kept
    return ProgramPlan(
        name=name,
        refusal="",
        temporary_bytes=memory.temp_size_in_bytes,
        total_bytes=kept + max(idle, 0) + memory.temp_size_in_bytes,
        collectives=collectives(compiled),
    )


def abstract_weights(models: Models, dtype: DTypeLike) -> Weights:
    """The shapes of all weights, as they would come from files."""

    def shapes(boxed: Any) -> Any:
        return jax.tree.map(
            lambda box: jax.ShapeDtypeStruct(box.value.shape, dtype),
            boxed,
            is_leaf=lambda x: isinstance(x, nn.Partitioned),
        )

    boxed = jax.eval_shape(Decoder(models.target).init, jax.random.key(0), np.zeros((1, 1), np.int32))
    target = shapes(boxed["params"])
    if models.drafter is None:
        return Weights(target=target, drafter=None, shared=None)
    made_for = models.drafter.config
    V, D, drafted = made_for.target_vocab_size, made_for.block.width, made_for.vocab_size
    shared: dict[str, Any] = {
        "embedding_VD": jax.ShapeDtypeStruct((V, D), dtype),
        "head_DV": jax.ShapeDtypeStruct((D, drafted), dtype),
        "draft_to_target_V": jax.ShapeDtypeStruct((drafted,), jnp.int32) if drafted != V else None,
    }
    return Weights(
        target=target,
        drafter=shapes(jax.eval_shape(models.drafter.init, jax.random.key(0))),
        shared=SharedWeights(**shared, scaling=models.target.scaling),
    )
