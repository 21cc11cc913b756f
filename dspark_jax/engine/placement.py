"""Where the arrays of an engine lie when several devices share every layer (tensor parallelism).

Weights are cut as in training, pages by kv heads where these divide; everything else is whole on every
device. So is the table that a sequential head looks up; logits stay divided by vocabulary, and each drafted
token costs one exchange of candidates (`speculation/shard_sampling.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.checkpoints.hf_names import flat_boxes
from dspark_jax.core.errors import InputError
from dspark_jax.core.sharding import param_sharding, replicated, serving_axes
from dspark_jax.engine.programs import Models
from dspark_jax.engine.state import Drafts, EngineState, Weights
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.decoder import Decoder


def check_divides(target: DecoderConfig, devices: int) -> None:
    """Refuses a number of devices that does not divide the target's heads.

    Key and value heads that it does not divide are whole on every device, and so is their attention.

    Raises:
      InputError: so it is.
    """
    heads = sorted({layer.num_heads for layer in target.layers if layer.num_heads % devices})
    if heads:
        raise InputError(
            given=f"tensor={devices} for a target with {heads[0]} heads",
            expected="a number of devices that divides them",
            fix="lower --tensor",
        )


def weight_shardings(models: Models, weights: Weights, mesh: Mesh) -> Weights:
    """Where the weights belong: a sharding for every array."""
    boxed = jax.eval_shape(Decoder(models.target).init, jax.random.key(0), np.zeros((1, 1), np.int32))
    target = _param_shardings(boxed["params"], weights.target, mesh)
    if models.drafter is None or weights.shared is None:
        return Weights(target=target, drafter=None, shared=None)
    shared, whole = weights.shared, replicated(mesh)
    return Weights(
        target=target,
        drafter=_param_shardings(
            jax.eval_shape(models.drafter.init, jax.random.key(0)), weights.drafter, mesh
        ),
        shared=dataclasses.replace(
            shared,
            embedding_VD=param_sharding(mesh, ("vocab", "embed"), shared.embedding_VD.shape),
            head_DV=param_sharding(mesh, ("embed", "vocab"), shared.head_DV.shape),
            draft_to_target_V=None if shared.draft_to_target_V is None else whole,
        ),
    )


def _param_shardings(boxed: Any, params: Any, mesh: Mesh) -> Any:
    boxes = flat_boxes(boxed)
    flat: dict[Any, Any] = dict(traverse_util.flatten_dict(params))
    return traverse_util.unflatten_dict(
        {path: param_sharding(mesh, serving_axes(boxes[path].names), x.shape) for path, x in flat.items()}
    )


def state_shardings(state: EngineState, mesh: Mesh, num_pages: int) -> EngineState:
    """Where the state belongs: pages by kv heads, what lies beside them everywhere."""

    def sharding(x: jax.Array) -> NamedSharding:
        if x.ndim == 4 and x.shape[0] == num_pages:
            return param_sharding(mesh, (None, "kv_heads", None, None), x.shape)
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(sharding, state)


def draft_shardings(drafts: Drafts, mesh: Mesh) -> Drafts:
    """Where drafts belong: the laws by vocabulary, the rest everywhere."""
    shardings: Any = jax.tree.map(lambda _: replicated(mesh), drafts)
    return shardings.replace(probs_BGV=param_sharding(mesh, (None, None, "vocab"), drafts.probs_BGV.shape))


def on_their_shardings(tree: Any, shardings: Any) -> Any:
    """Arrays moved to where they belong, shapes told where they will lie."""

    def placed(x: Any, sharding: NamedSharding) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda x: placed(x, shardings), tree)
    return jax.tree.map(placed, tree, shardings)
