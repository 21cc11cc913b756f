"""Costs of programs against counts by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.core.program_costs import collectives, device_bytes, largest_array_bytes, matmul_cost
from dspark_jax.core.sharding import by_device, make_mesh, on_mesh
from dspark_jax.nn import context_kernel

X, W = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
ONE = 2 * 4 * 8 * 8


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda x, w: x @ w, 1),
        (lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0], 5),
        (lambda x, w: jax.jit(jax.checkpoint(lambda x: x @ w))(x), 1),
        (lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w), 2),
        (lambda x, w: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x), 2),
        (lambda x, w: jax.lax.map(lambda row: row[None] @ w, x), 1),
    ],
    ids=["plain", "scan", "checkpoint", "cond", "grad", "map"],
)
def test_products_are_counted_as_often_as_they_run(function, products):
    assert matmul_cost(jax.make_jaxpr(function)(X, W)).flops == products * ONE


def test_products_of_groups_count_every_row_once():
    groups = jnp.asarray([1, 3])
    traced = jax.make_jaxpr(lambda x, w: jax.lax.ragged_dot(x, jnp.stack([w, w]), groups))(X, W)
    assert matmul_cost(traced).flops == ONE


def test_kernels_and_divided_functions_count_on_all_devices():
    mesh = make_mesh(data=2, tensor=4)

    def divided(x, w):
        with on_mesh(mesh):
            specs = PartitionSpec("data"), PartitionSpec(None, "tensor")
            return by_device(jnp.matmul, specs, PartitionSpec("data", "tensor"))(x, w)

    assert matmul_cost(jax.make_jaxpr(divided)(X, W)).flops == ONE
    T, H = 32, 8
    shapes = [(1, 1, 1, T, H), (1, 1, T, H), (1, 1, T, H)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    bounds = [jax.ShapeDtypeStruct((1, T), jnp.int32)] * 2
    kernel = jax.make_jaxpr(functools.partial(context_kernel.forward, 16, 16))(*arrays, *bounds)
    assert matmul_cost(kernel).flops == 2 * (2 * T * T * H)  # scores and values, nothing skipped


def test_the_largest_array_that_a_program_makes():
    compiled = jax.jit(lambda x, w: jnp.sin(x @ w).sum()).lower(X, W).compile()
    assert largest_array_bytes(compiled) == 4 * 4 * 8  # not W, which is given


def test_traffic_by_hand():
    cost = matmul_cost(jax.make_jaxpr(lambda x, w: x @ w)(X, W))
    assert cost.traffic_bytes == 4 * (4 * 8 + 8 * 8 + 4 * 8)


def test_collectives_and_bytes_of_a_sharded_program():
    mesh = make_mesh(tensor=-1)
    devices = mesh.size
    by_tensor = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    x = jax.ShapeDtypeStruct((4, 8 * devices), jnp.float32, sharding=by_tensor)
    compiled = jax.jit(lambda x: x.sum(1)).lower(x).compile()
    (found,) = collectives(compiled).items()
    assert found[0] == "all-reduce" and found[1].count == 1 and found[1].total_bytes == 4 * 4
    assert device_bytes({"x": x, "y": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}) == 4 * 8 * 4 + 6


def test_collectives_in_a_loop_count_as_often_as_it_turns():
    mesh = make_mesh(data=4, devices=jax.devices()[:4])
    divided, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def function(w, x):
        def body(x, _):
            return jnp.tanh(jax.lax.with_sharding_constraint(x @ w, whole)), None

        return jax.lax.scan(body, x, length=7)[0]

    compiled = jax.jit(function, in_shardings=(divided, whole)).lower(W, X).compile()
    assert collectives(compiled)["all-reduce"].count == 7
