"""The state of a run and the batch of a step, as typed pytrees."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import Array
from jax.sharding import Mesh, NamedSharding

from dspark_jax.core.sharding import param_sharding, replicated
from dspark_jax.drafters.contract import Drafter, Params, SharedWeights
from dspark_jax.training.features import TargetFeatures, UnnormalisedFeatures


@flax.struct.dataclass
class TrainState:
    """What training changes. Donated at every step.

    Attributes:
      step: optimiser steps done, int32.
      params: the drafter's parameters, float32.
      opt_state: the optimiser's state, sharded like the parameters.
    """

    step: Array
    params: Params
    opt_state: Any


@flax.struct.dataclass
class TrainBatch:
    """The sequences of one step.

    Attributes:
      tokens_BT: int32, right padded.
      loss_mask_BT: True on supervised tokens.
      anchors_BA: int32 positions, ascending; 0 where not kept.
      keep_BA: False for anchors that only fill the shape.
      target: what the target computed on the tokens; None: it runs inside the step.
      starts_BT: int32, place where the document of a token starts; None: every sequence is one document.
    """

    tokens_BT: Array
    loss_mask_BT: Array
    anchors_BA: Array
    keep_BA: Array
    target: TargetFeatures | UnnormalisedFeatures | None
    starts_BT: Array | None = None

    @property
    def starts(self) -> Array:
        """`starts_BT`, zeros where every sequence is one document."""
        return jnp.zeros_like(self.tokens_BT) if self.starts_BT is None else self.starts_BT

    @classmethod
    def from_host(cls, batch: dict) -> TrainBatch:
        """From the dict of numpy arrays that the input pipeline yields."""
        target = None
        if "logz_BT" in batch:
            target = TargetFeatures(batch["features_BTCD"], batch["hidden_BTD"], batch["logz_BT"])
        elif "features_BTCD" in batch:
            target = UnnormalisedFeatures(batch["features_BTCD"], batch["hidden_BTD"])
        names = ("tokens_BT", "loss_mask_BT", "anchors_BA", "keep_BA")
        return cls(**{name: batch[name] for name in names}, target=target, starts_BT=batch.get("starts_BT"))


@flax.struct.dataclass
class Frozen:
    """What training reads and never changes.

    Attributes:
      target_params: the target's parameters: those of the LM head alone when features come from a store
        without normalisers, None when it has them.
      shared: its embedding and its LM head, cut to the draft vocabulary.
    """

    target_params: Params | None
    shared: SharedWeights


def state_shardings(state: TrainState, drafter: Drafter, mesh: Mesh) -> TrainState:
    """A TrainState of shardings: parameters by their logical axes, moments like their parameters."""
    boxed = jax.eval_shape(drafter.init, jax.random.key(0))

    def sharding(box) -> NamedSharding:
        return param_sharding(mesh, tuple(box.names), box.value.shape)

    by_param = jax.tree.map(sharding, boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    flat: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(by_param)
    params: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(state.params)
    shapes = {path: x.shape for path, x in params.items()}

    def moment(path, x) -> NamedSharding:
        # Whatever the optimiser wraps around them, moments end in the path of their parameter.
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        ends = [names[i:] for i in range(len(names)) if shapes.get(names[i:]) == x.shape]
        return flat[ends[0]] if ends else replicated(mesh)

    step: Any = replicated(mesh)
    moments = jax.tree_util.tree_map_with_path(moment, state.opt_state)
    return TrainState(step=step, params=by_param, opt_state=moments)


def batch_shardings(batch: TrainBatch, mesh: Mesh) -> TrainBatch:
    """Every array of the batch divided along its first axis."""
    return jax.tree.map(lambda x: param_sharding(mesh, ("batch",) + (None,) * (x.ndim - 1), x.shape), batch)
