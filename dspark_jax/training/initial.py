"""The state that a run starts from."""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
from dspark_jax.core.distributed import gather, place, run_together
from dspark_jax.core.sharding import on_mesh, replicated
from dspark_jax.drafters.config import DSparkConfig
from dspark_jax.drafters.contract import Drafter, Params, SharedWeights
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.features import UnnormalisedFeatures, hidden_features
from dspark_jax.training.state import TrainBatch, TrainState
from dspark_jax.training.warm_start import RegressionSample, warm_start

SCALE_SEQUENCES = 16
"""Sequences of the first batch from which the size of the features is taken."""


def feature_scale(target: LoadedTarget, drafter: Drafter, batch: TrainBatch, mesh: Mesh) -> np.ndarray:
    """1 / rms of every feature [C D] over the supervised tokens of the first sequences of a whole batch."""

    def square_sums(params: Params, batch: TrainBatch) -> Array:
        features = batch.target or _run(mesh, target, drafter, params, batch)
        supervised = jnp.where(batch.loss_mask_BT[..., None, None], features.features_BTCD, 0.0)
        return jnp.square(supervised.astype(jnp.float32)).sum((0, 1)).ravel()

    def mean_squares(params: Params, rows: TrainBatch) -> Array:
        # One sequence at a time: a whole batch of features need not fit anywhere.
        sums = jax.lax.map(functools.partial(square_sums, params), rows).sum(0)
        return sums / rows.loss_mask_BT.sum()

    rows = jax.tree.map(lambda x: place(x[:SCALE_SEQUENCES, None], replicated(mesh)), batch)
    program = jax.jit(mean_squares, out_shardings=replicated(mesh))
    found = run_together(program, target.params, rows)
    return (1.0 / np.maximum(np.sqrt(jax.device_get(found)), 1e-3)).astype(np.float32)


def _run(
    mesh: Mesh, target: LoadedTarget, drafter: Drafter, params: Params, batch: TrainBatch
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


def unit_scale(drafter: Drafter) -> np.ndarray:
    """Ones in the place of the feature scale, where none is needed or a checkpoint brings it."""
    return np.ones(len(drafter.config.taps) * drafter.config.block.width, np.float32)


def regression_params(
    config: TrainConfig,
    target: LoadedTarget,
    drafter: Drafter,
    batches: Iterator[TrainBatch],
    shared: SharedWeights,
    scale: np.ndarray,
    mesh: Mesh,
) -> Params:
    """Parameters that start from a regression on the first sequences (`warm_start.py`).

    Args:
      config: the run.
      target: the target.
      drafter: the drafter.
      batches: whole batches on the host, from the first one on.
      shared: embedding and LM head.
      scale: 1 / rms of every feature.
      mesh: where the target lies.
    """
    assert isinstance(drafter.config, DSparkConfig), "no other recipe has a warm start"
    forward = jax.jit(functools.partial(_run, mesh, target, drafter))
    parts: list[RegressionSample] = []
    for _ in range(-(-config.drafter.warm_start_sequences // config.data.batch_size)):
        batch = next(batches)
        features = batch.target
        if features is None:
            whole = jax.tree.map(lambda x: place(x, replicated(mesh)), batch)
            features = gather(forward(target.params, whole), mesh)
        parts.append(
            RegressionSample.from_batch(
                batch.tokens_BT, batch.loss_mask_BT, features.features_BTCD, features.hidden_BTD
            )
        )
    random = nn.meta.unbox(drafter.init(jax.random.key(config.seed)))
    frozen = (shared.embedding_VD, shared.head_DV, target.params["final_norm"]["scale"])
    embedding_VD, head_DV, final_norm_D = (np.asarray(x, np.float32) for x in gather(frozen, mesh))
    return warm_start(
        jax.tree.map(np.asarray, random),
        RegressionSample.join(parts),
        config=drafter.config,
        embedding_VD=embedding_VD,
        head_DV=head_DV,
        final_norm_D=final_norm_D,
        feature_scale_X=scale,
    )


def fresh_state(
    given_params: Params | None,
    *,
    config: TrainConfig,
    drafter: Drafter,
    optimizer: optax.GradientTransformation,
    scale: np.ndarray,
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
