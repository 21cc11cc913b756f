"""A mixture of experts equals a loop over tokens, on every mesh; weights never travel."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.core.program_costs import collectives, matmul_cost
from dspark_jax.core.sharding import make_mesh, on_mesh, param_sharding
from dspark_jax.nn.config import Experts
from dspark_jax.nn.experts import ExpertsMLP, own_experts
from dspark_jax.testing.tiny import randomised

B, T, D, F, E, K = 8, 3, 16, 8, 8, 2
X_BTD = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)


def module(*, normalise: bool = True, number: int = E, dtype="float32") -> tuple[ExpertsMLP, dict]:
    """The module and its boxed shapes."""
    mlp = ExpertsMLP(D, Experts(number=number, per_token=K, width=F, normalise=normalise), jnp.dtype(dtype))
    return mlp, jax.eval_shape(mlp.init, jax.random.key(0), X_BTD)["params"]


def loop(params: dict, x_BTD: np.ndarray, normalise: bool) -> np.ndarray:
    """Token by token, expert by expert, in float64."""
    kernels = {name: np.asarray(value, np.float64) for name, value in params.items() if name != "router"}
    router_DE = np.asarray(params["router"]["kernel"], np.float64)
    out = np.zeros(x_BTD.shape)
    for index in np.ndindex(x_BTD.shape[:-1]):
        x = x_BTD[index].astype(np.float64)
        probs_E = np.exp(x @ router_DE) / np.exp(x @ router_DE).sum()
        chosen = np.argsort(-probs_E)[:K]
        for e in chosen:
            gate = x @ kernels["gate_kernel"][e]
            inner = gate / (1 + np.exp(-gate)) * (x @ kernels["up_kernel"][e])
            weight = probs_E[e] / (probs_E[chosen].sum() if normalise else 1)
            out[index] += weight * (inner @ kernels["down_kernel"][e])
    return out


@pytest.mark.parametrize("normalise", [True, False])
def test_every_token_meets_its_experts(normalise):
    mlp, shapes = module(normalise=normalise)
    params = randomised(shapes, seed=1)
    expected = loop(params, X_BTD, normalise)

    mixed = jax.jit(mlp.apply)({"params": params}, X_BTD)

    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "number", "rows"),
    [
        ({"data": 2, "expert": 4}, E, B),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, E, B),
        ({"expert": 4, "tensor": 2}, E, 1),  # tokens whole on every device
        ({"expert": 4}, 6, B),  # experts whole on every device
    ],
)
def test_a_mesh_changes_nothing(axes, number, rows):
    mlp, shapes = module(number=number)
    params, x_BTD = randomised(shapes, seed=1), X_BTD[:rows]
    mesh = make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    placed = jax.tree.map(
        lambda box, x: jax.device_put(x, param_sharding(mesh, box.names, x.shape)),
        shapes,
        params,
        is_leaf=lambda node: isinstance(node, nn.Partitioned),
    )
    with on_mesh(mesh):
        mixed = jax.jit(mlp.apply)({"params": placed}, x_BTD)

    np.testing.assert_allclose(mixed, loop(params, x_BTD, True), rtol=1e-5, atol=1e-5)
    kernel = placed["gate_kernel"]
    assert kernel.addressable_shards[0].data.size < kernel.size or number == 6


def test_experts_of_other_devices_add_nothing_whatever_their_rows_hold():
    kernels = [jnp.ones((2, D, F)), jnp.ones((2, D, F)), jnp.ones((2, F, D))]
    x_TD = jnp.asarray(X_BTD[0]).at[1].set(jnp.nan)  # a token of other devices' experts alone
    ids_TK = jnp.asarray([[0, 5], [-1, 2], [1, 0]])

    mixed = own_experts(x_TD, ids_TK, jnp.full((T, K), 0.5), *kernels, activation="silu")

    one_T = jax.nn.silu(X_BTD[0].sum(-1)) * X_BTD[0].sum(-1) * F
    np.testing.assert_allclose(mixed[0], 0.5 * one_T[0], rtol=1e-5)
    np.testing.assert_allclose(mixed[2], one_T[2], rtol=1e-5)
    assert (mixed[1] == 0).all()


def test_tokens_travel_and_weights_do_not(tpu_devices):
    width, inner, number, tokens = 256, 512, 8, 128
    mlp = ExpertsMLP(width, Experts(number=number, per_token=K, width=inner), jnp.bfloat16)
    mesh = make_mesh(expert=4, devices=tpu_devices("v5e:2x2"))
    x = jax.ShapeDtypeStruct((4, tokens, width), jnp.float32, sharding=param_sharding(mesh, ("batch",)))
    shapes = jax.eval_shape(functools.partial(mlp.init, jax.random.key(0)), x)["params"]
    params = jax.tree.map(
        lambda box: jax.ShapeDtypeStruct(
            box.value.shape, jnp.bfloat16, sharding=param_sharding(mesh, box.names, box.value.shape)
        ),
        shapes,
        is_leaf=lambda node: isinstance(node, nn.Partitioned),
    )
    with on_mesh(mesh):
        traced = jax.jit(mlp.apply).trace({"params": params}, x)
    found = collectives(traced.lower().compile())

    assert found, "tokens must meet the experts of other devices"
    all_tokens_bytes = 4 * 4 * tokens * width
    assert max(one.largest_bytes for one in found.values()) <= all_tokens_bytes
    assert all_tokens_bytes < 2 * number * width * inner  # one of the three kernels
    products = 2 * 4 * tokens * width * (number + 3 * K * inner * 4)  # padded to the rows of all devices
    assert matmul_cost(traced.jaxpr).flops == products


def test_more_experts_per_token_than_there_are_is_refused():
    with pytest.raises(InputError, match="9 of 8 experts"):
        Experts(number=8, per_token=9, width=4)
