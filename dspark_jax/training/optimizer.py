"""The optimiser, and how it copes with features of very different size."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import traverse_util
from jax import Array

from dspark_jax.training.config import OptimizerConfig

MUON_RMS = 0.2  # size of an orthogonalised update relative to the learning rate: as AdamW's usually is


def make_optimizer(
    config: OptimizerConfig,
    *,
    steps: int,
    feature_kernel: tuple[str, ...] | None,
    feature_scale: Array | np.ndarray,
) -> optax.GradientTransformation:
    """AdamW or Muon with warm-up and cosine decay, seeing the features as if they had unit size.

    Args:
      config: its settings.
      steps: length of the schedule.
      feature_kernel: path of the kernel that multiplies the raw features, or None.
      feature_scale: 1 / rms of every feature [C D], constant during training.
    """
    warmup = max(round(config.warmup_share * steps), 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, max(steps, warmup + 1))
    if config.orthogonalise:
        step = optax.contrib.muon(
            schedule,
            adam_b1=config.b1,
            adam_b2=config.b2,
            consistent_rms=MUON_RMS,
            muon_weight_dimension_numbers=_layer_matrices,
        )
    else:
        step = optax.chain(optax.scale_by_adam(config.b1, config.b2), optax.scale_by_learning_rate(schedule))
    inner = optax.chain(optax.clip_by_global_norm(config.clip_norm), step)
    return inner if feature_kernel is None else with_unit_features(inner, feature_kernel, feature_scale)


def _layer_matrices(params):
    """Marks the matrices that Muon updates: those of the backbone's layers. The rest takes AdamW's steps."""

    def mark(path, x):
        in_layer = any(getattr(key, "key", "").startswith("layers_") for key in path)
        return optax.contrib.MuonDimensionNumbers() if in_layer and x.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(mark, params)


class UnitFeaturesState(NamedTuple):
    """The scale [C D, 1], kept with the run, and the wrapped optimiser's state."""

    scale: Array
    inner: Any


def with_unit_features(
    inner: optax.GradientTransformation, kernel: tuple[str, ...], feature_scale: Array | np.ndarray
) -> optax.GradientTransformation:
    """Optimises the kernel at a path, fc, as if features were divided by their rms first.

    A few hidden dimensions of a language model are hundreds of times larger than the rest, so that one
    learning rate cannot fit all rows of `fc`. With fc = scale * fc', a step on fc' is a step on fc whose
    gradient and update are both multiplied by the scale; the checkpoint still holds the plain fc.
    """

    def rescale(tree, scale):
        flat = traverse_util.flatten_dict(tree)
        return traverse_util.unflatten_dict({**flat, kernel: flat[kernel] * scale})

    def init(params):
        return UnitFeaturesState(jnp.asarray(feature_scale)[:, None], inner.init(params))

    def update(updates, state, params=None):
        updates, inner_state = inner.update(rescale(updates, state.scale), state.inner, params)
        return rescale(updates, state.scale), UnitFeaturesState(state.scale, inner_state)

    return optax.GradientTransformation(init, update)
