"""The optimiser sees features of unit size, whatever their size is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.testing.tiny import tiny_drafter, tiny_target
from dspark_jax.training.config import LossConfig, OptimizerConfig
from dspark_jax.training.features import TargetFeatures
from dspark_jax.training.optimizer import make_optimizer
from dspark_jax.training.state import Frozen, TrainBatch, TrainState
from dspark_jax.training.step import train_step

B, T, C, D = 2, 12, 3, 16
STEPS = 4


def test_steps_on_fc_are_steps_on_standardised_features():
    """With fc = scale * fc', training on X is training fc' on scale * X: exactly, for powers of two."""
    target = tiny_target()
    tiny = tiny_drafter(target)
    rng = np.random.default_rng(0)
    scale_X = (2.0 ** rng.integers(-8, 3, C * D)).astype(np.float32)
    unit_BTCD = rng.normal(size=(B, T, C, D)).astype(np.float32)
    raw_BTCD = unit_BTCD / scale_X.reshape(C, D)
    hidden_BTD = rng.normal(size=(B, T, D)).astype(np.float32)

    def batch(features_BTCD) -> TrainBatch:
        return TrainBatch(
            tokens_BT=np.arange(B * T, dtype=np.int32).reshape(B, T),
            loss_mask_BT=np.ones((B, T), bool),
            anchors_BA=np.array([[1, 4], [3, 9]], np.int32),
            keep_BA=np.ones((B, 2), bool),
            target=TargetFeatures(features_BTCD, hidden_BTD, np.full((B, T), 4.0, np.float32)),
        )

    def optimizer(scale_X):
        return make_optimizer(
            OptimizerConfig(learning_rate=1e-2),
            steps=STEPS,
            feature_kernel=tiny.drafter.feature_kernel,
            feature_scale=scale_X,
        )

    @jax.jit
    def step(scale_X, state: TrainState, batch: TrainBatch) -> TrainState:
        settings = {"drafter": tiny.drafter, "target": target.config, "loss": LossConfig()}
        return train_step(state, batch, Frozen(None, tiny.shared), optimizer=optimizer(scale_X), **settings)[
            0
        ]

    def train(scale_X, fc_XD, features_BTCD) -> dict:
        backbone = {**tiny.params["backbone"], "fc": {"kernel": fc_XD}}
        params = {**tiny.params, "backbone": backbone}
        state = TrainState(jnp.zeros((), jnp.int32), params, optimizer(scale_X).init(params))
        for _ in range(STEPS):
            state = step(scale_X, state, batch(features_BTCD))
        return state.params

    fc_XD = tiny.params["backbone"]["fc"]["kernel"]
    scaled = train(scale_X, scale_X[:, None] * fc_XD, raw_BTCD)
    standardised = train(jnp.ones(C * D), fc_XD, unit_BTCD)
    unscaled = train(jnp.ones(C * D), scale_X[:, None] * fc_XD, raw_BTCD)

    assert np.abs(standardised["backbone"]["fc"]["kernel"] - fc_XD).max() > 1e-3
    standardised["backbone"]["fc"]["kernel"] *= scale_X[:, None]
    jax.tree.map(np.testing.assert_array_equal, scaled, standardised)
    assert not np.allclose(
        unscaled["backbone"]["fc"]["kernel"], scaled["backbone"]["fc"]["kernel"], rtol=1e-2
    )
