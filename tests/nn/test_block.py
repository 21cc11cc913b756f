"""The transformer layer: a layer scalar scales the output and is not trained."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.nn.block import TransformerLayer
from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.rope import DefaultRope, rope_angles

SIZES = dict(width=8, mlp_width=12, num_heads=2, num_kv_heads=1, head_dim=4, rope=DefaultRope(theta=100.0))
X_1TD = np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32)


def run(layer: TransformerLayer, x_1TD):
    """The layer with an attention that mixes nothing: every query takes its own value."""
    angles = rope_angles(SIZES["rope"], 4, jnp.arange(3)[None])
    _, _, values_1TKH = layer.queries_keys_values(x_1TD, angles)
    return layer.output(x_1TD, jnp.repeat(values_1TKH, 2, axis=2))


def test_a_layer_scalar_is_frozen():
    config = BlockConfig(**SIZES, branch_norms=True, layer_scalar=True, activation="gelu_tanh")
    layer = TransformerLayer(config)
    params = nn.meta.unbox(layer.init(jax.random.key(0), X_1TD, method=run))["params"]
    assert params["layer_scalar"].tolist() == [1.0]

    def output(params):
        return layer.apply({"params": params}, X_1TD, method=run)

    halved = {**params, "layer_scalar": jnp.full(1, 0.5)}
    np.testing.assert_allclose(output(halved), 0.5 * output(params), rtol=1e-6)
    gradients = jax.grad(lambda params: output(params).sum())(halved)
    assert not gradients["layer_scalar"].any() and gradients["mlp"]["down"]["kernel"].any()


def test_a_window_of_nothing_is_refused():
    with pytest.raises(InputError, match="window=0"):
        BlockConfig(**SIZES, window=0)
