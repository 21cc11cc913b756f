"""What a training step needs on machines that are not at hand: compiled for their devices, never run."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.core.devices import DeviceKind
from dspark_jax.core.program_costs import Collective, MatmulCost, collectives, device_bytes, matmul_cost
from dspark_jax.core.sharding import param_sharding, replicated
from dspark_jax.drafters.contract import SharedWeights
from dspark_jax.drafters.registry import make_drafter
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.decoder import Decoder
from dspark_jax.training.blueprint import Blueprint
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.initial import unit_scale
from dspark_jax.training.state import Frozen, TrainBatch, batch_shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one optimiser step needs; bytes are per device."""

    fits: bool
    refusal: str
    """The compiler's words where the step does not fit, else empty."""
    target_bytes: int
    """Frozen weights: target, embedding and LM head."""
    parameter_bytes: int
    """The drafter's float32 parameters."""
    optimizer_bytes: int
    batch_bytes: int
    temporary_bytes: int | None
    """Activations, gradients and everything else that lives within a step."""
    total_bytes: int | None
    collectives: dict[str, Collective]
    flops: float
    """Matrix products of the whole step, over all devices."""
    traffic_bytes: float
    """Their operands and results, over all devices: an upper bound."""
    tokens: int
    """Tokens of a step, padding included."""

    def roofline_s(self, kind: DeviceKind, devices: int) -> dict[str, float]:
        """Seconds of a step if each resource alone were the limit."""
        link_bytes = sum(found.total_bytes for found in self.collectives.values())
        return {
            "arithmetic": self.flops / devices / (kind.bf16_tflops * 1e12),
            "memory": self.traffic_bytes / devices / (kind.hbm_gb_per_s * 1e9),
            "links": link_bytes / (kind.link_gb_per_s * 1e9),
        }


def plan_step(config: TrainConfig, target: DecoderConfig, mesh: Mesh) -> StepPlan:
    """Compiles the run's real step for the mesh's devices.

    Args:
      config: the run; `feature_store` decides whether the target runs online.
      target: dimensions of the target.
      mesh: devices, real or of a topology.
    """
    blueprint, arguments = abstract_step(config, target, mesh)
    state, batch, frozen = arguments
    traced = blueprint.program.trace(*arguments)
    cost: MatmulCost = matmul_cost(traced.jaxpr)
    known: dict[str, Any] = {
        "target_bytes": device_bytes(frozen),
        "parameter_bytes": device_bytes(state.params),
        "optimizer_bytes": device_bytes(state.opt_state),
        "batch_bytes": device_bytes(batch),
        "flops": cost.flops,
        "traffic_bytes": cost.traffic_bytes,
        "tokens": config.data.batch_size * config.data.max_length,
    }
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return StepPlan(
            fits=False,
            refusal=_first_sentence(str(error)),
            temporary_bytes=None,
            total_bytes=None,
            collectives={},
            **known,
        )
    memory: Any = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return StepPlan(
        fits=True,
        refusal="",
        temporary_bytes=memory.temp_size_in_bytes,
        total_bytes=kept + memory.temp_size_in_bytes,
        collectives=collectives(compiled),
        **known,
    )


def abstract_step(config: TrainConfig, target: DecoderConfig, mesh: Mesh) -> tuple[Blueprint, tuple]:
    """The blueprint of a run and the arguments of its step (state, batch, frozen) as sharded shapes."""
    drafter = make_drafter(config.drafter.resolve(target), jnp.dtype(config.dtype))
    blueprint = Blueprint.of(config, drafter=drafter, target=target, mesh=mesh, scale=unit_scale(drafter))
    state = _placed(blueprint.shapes, blueprint.shardings)

    B, T = config.data.batch_size, config.data.max_length
    A = config.data.row_anchors or config.data.num_anchors
    batch = {
        "tokens_BT": jax.ShapeDtypeStruct((B, T), np.int32),
        "loss_mask_BT": jax.ShapeDtypeStruct((B, T), np.bool_),
        "anchors_BA": jax.ShapeDtypeStruct((B, A), np.int32),
        "keep_BA": jax.ShapeDtypeStruct((B, A), np.bool_),
    }
    if config.data.row_anchors is not None:
        batch["starts_BT"] = jax.ShapeDtypeStruct((B, T), np.int32)
    if config.feature_store is not None:
        width, taps = target.block.width, len(drafter.config.taps)
        batch["features_BTCD"] = jax.ShapeDtypeStruct((B, T, taps, width), jnp.bfloat16)
        batch["hidden_BTD"] = jax.ShapeDtypeStruct((B, T, width), jnp.bfloat16)
        batch["logz_BT"] = jax.ShapeDtypeStruct((B, T), np.float32)
    batch = TrainBatch.from_host(batch)
    frozen = _abstract_frozen(config, target, mesh, drafter.config.vocab_size)
    return blueprint, (state, _placed(batch, batch_shardings(batch, mesh)), frozen)


def _abstract_frozen(config: TrainConfig, target: DecoderConfig, mesh: Mesh, draft_vocab: int) -> Frozen:
    dtype = jnp.dtype(config.target_dtype or config.dtype)
    boxed = jax.eval_shape(Decoder(target).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]

    def place(box: nn.Partitioned) -> jax.ShapeDtypeStruct:
        shape = box.value.shape
        return jax.ShapeDtypeStruct(shape, dtype, sharding=param_sharding(mesh, tuple(box.names), shape))

    params = jax.tree.map(place, boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    V, D = target.vocab_size, target.block.width

    def shared(axes: tuple[str, ...], shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=param_sharding(mesh, axes, shape))

    reduced = draft_vocab != V
    return Frozen(
        target_params=None if config.feature_store is not None else params,
        shared=SharedWeights(
            embedding_VD=shared(("vocab", "embed"), (V, D)),
            head_DV=shared(("embed", "vocab"), (D, draft_vocab)),
            draft_to_target_V=(
                jax.ShapeDtypeStruct((draft_vocab,), np.int32, sharding=replicated(mesh)) if reduced else None
            ),  # type: ignore[arg-type]
            scaling=target.scaling,
        ),
    )


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def _first_sentence(message: str) -> str:
    found = re.search(
        r"(?:RESOURCE_EXHAUSTED: |permanent error\. )(?!XLA:TPU)(.*?)\.(?:\s|$)", message, re.DOTALL
    )
    return found.group(1).strip() if found else message.splitlines()[0]
