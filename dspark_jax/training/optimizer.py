"""The optimiser, and how it copes with features of very different size."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax
from flax import traverse_util
from jax import Array

from dspark_jax.training.config import OptimizerConfig

FC = ("backbone", "fc", "kernel")


def make_optimizer(config: OptimizerConfig, *, steps: int, feature_scale: Array) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine decay, seeing the features as if they had unit size.

    Args:
      config: its settings.
      steps: length of the schedule.
      feature_scale: 1 / rms of every feature [C D], constant during training.
    """
    warmup = max(round(config.warmup_share * steps), 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, max(steps, warmup + 1))
    inner = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.b1, config.b2),
        optax.scale_by_learning_rate(schedule),
    )
    return with_unit_features(inner, feature_scale)


class UnitFeaturesState(NamedTuple):
    """The scale [C D, 1], kept with the run, and the wrapped optimiser's state."""

    scale: Array
    inner: Any


def with_unit_features(inner: optax.GradientTransformation, feature_scale: Array) -> optax.GradientTransformation:
    """Optimises fc as if features were divided by their rms first.

    A few hidden dimensions of a language model are hundreds of times larger than the rest, so that one
    learning rate cannot fit all rows of `fc`. With fc = scale * fc', a step on fc' is a step on fc whose
    gradient and update are both multiplied by the scale; the checkpoint still holds the plain fc.
    """

    def rescale(tree, scale):
        flat = traverse_util.flatten_dict(tree)
        return traverse_util.unflatten_dict({**flat, FC: flat[FC] * scale})

    def init(params):
        return UnitFeaturesState(feature_scale[:, None], inner.init(params))

    def update(gradients, state, params=None):
        updates, inner_state = inner.update(rescale(gradients, state.scale), state.inner, params)
        return rescale(updates, state.scale), UnitFeaturesState(state.scale, inner_state)

    return optax.GradientTransformation(init, update)


def start_from_target(params: dict, target_params: dict, layers: tuple[int, ...]) -> dict:
    """Backbone layers as copies of target layers, the final norm as the target's."""
    backbone = dict(params["backbone"])
    for i, layer in enumerate(layers):
        backbone[f"layers_{i}"] = jax.tree.map(lambda x: x, target_params[f"layers_{layer}"])
    backbone["final_norm"] = dict(target_params["final_norm"])
    return {**params, "backbone": backbone}
