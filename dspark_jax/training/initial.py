"""The state that a run starts from."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jax import Array
from jax.sharding import Mesh

from dspark_jax.checkpoints.targets import LoadedTarget
from dspark_jax.core.sharding import mesh_of, on_mesh
from dspark_jax.data.pipeline import BatchIterator
from dspark_jax.drafters.config import DSparkConfig
from dspark_jax.drafters.contract import Drafter, Params, SharedWeights
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.features import UnnormalisedFeatures, hidden_features
from dspark_jax.training.state import TrainBatch, TrainState
from dspark_jax.training.warm_start import RegressionSample, warm_start

SCALE_SEQUENCES = 16
"""Sequences of the first batch from which the size of the features is taken."""


def feature_scale(target: LoadedTarget, drafter: Drafter, batches: BatchIterator) -> Array:
    """1 / rms of every feature [C D] over the supervised tokens of the first sequences; uses up no batch."""
    position = batches.get_state()
    batch = TrainBatch.from_host(next(batches))
    batches.set_state(position)
    mesh = mesh_of(target.params)

    def square_sums(params: Params, batch: TrainBatch) -> Array:
        features = batch.target or _run(mesh, target, drafter, params, batch)
        supervised = jnp.where(batch.loss_mask_BT[..., None, None], features.features_BTCD, 0.0)
        return jnp.square(supervised.astype(jnp.float32)).sum((0, 1)).ravel()

    def mean_squares(params: Params, batch: TrainBatch) -> Array:
        # One sequence at a time: a whole batch of features need not fit anywhere.
        rows = jax.tree.map(lambda x: x[:SCALE_SEQUENCES, None], batch)
        sums = jax.lax.map(functools.partial(square_sums, params), rows).sum(0)
        return sums / rows.loss_mask_BT.sum()

    rms_np = np.sqrt(jax.device_get(jax.jit(mean_squares)(target.params, batch)))
    return jnp.asarray(1.0 / np.maximum(rms_np, 1e-3), jnp.float32)


def _run(
    mesh: Mesh | None, target: LoadedTarget, drafter: Drafter, params: Params, batch: TrainBatch
) -> UnnormalisedFeatures:
    """What the target computes on a batch; its kernels must know the mesh."""
    with on_mesh(mesh):
        return hidden_features(
            params,
            batch.tokens_BT,
            batch.starts_BT,
            config=target.config,
            taps=drafter.config.taps,
            dtype=drafter.dtype,
        )


def unit_scale(drafter: Drafter) -> Array:
    """Ones in the place of the feature scale, where none is needed or a checkpoint brings it."""
    return jnp.ones(len(drafter.config.taps) * drafter.config.block.width)


def regression_params(
    config: TrainConfig,
    target: LoadedTarget,
    drafter: Drafter,
    batches: BatchIterator,
    shared: SharedWeights,
    scale: Array,
) -> Params:
    """Parameters that start from a regression on the first sequences (`warm_start.py`); uses up no batch."""
    assert isinstance(drafter.config, DSparkConfig), "no other recipe has a warm start"
    forward = jax.jit(functools.partial(_run, mesh_of(target.params), target, drafter))
    position = batches.get_state()
    parts: list[RegressionSample] = []
    for _ in range(-(-config.drafter.warm_start_sequences // config.data.batch_size)):
        batch = TrainBatch.from_host(next(batches))
        features = batch.target or jax.device_get(forward(target.params, batch))
        parts.append(
            RegressionSample.from_batch(
                batch.tokens_BT, batch.loss_mask_BT, features.features_BTCD, features.hidden_BTD
            )
        )
    batches.set_state(position)
    random = nn.meta.unbox(drafter.init(jax.random.key(config.seed)))
    return warm_start(
        jax.tree.map(np.asarray, random),
        RegressionSample.join(parts),
        config=drafter.config,
        embedding_VD=np.asarray(shared.embedding_VD, np.float32),
        head_DV=np.asarray(shared.head_DV, np.float32),
        final_norm_D=np.asarray(target.params["final_norm"]["scale"], np.float32),
        feature_scale_X=np.asarray(scale),
    )


def fresh_state(
    given_params: Params | None,
    *,
    config: TrainConfig,
    drafter: Drafter,
    optimizer: optax.GradientTransformation,
    scale: Array,
) -> TrainState:
    """The state before the first step: the given parameters, or random ones for features of unit size."""
    params = given_params
    if params is None:
        params = nn.meta.unbox(drafter.init(jax.random.key(config.seed)))
        if drafter.feature_kernel is not None:
            flat: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(params)
            flat[drafter.feature_kernel] *= scale[:, None]
            params = traverse_util.unflatten_dict(flat)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))
