"""Attention over intervals of a context: equal to the plain form, in values and gradients, at any tiling."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.core.sharding import make_mesh, on_mesh
from dspark_jax.nn import context_kernel
from dspark_jax.nn.attention import MASKED, attend, attend_blocks
from dspark_jax.nn.context_attention import (
    Interval,
    attend_causal,
    attend_context,
    context_attention,
    join,
)

B, K, R, M, S, H = 2, 2, 3, 11, 13, 4
EXACT = 2e-5


def case(seed: int = 0):
    """q, keys, values, low, high; some rows see nothing, some everything."""
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=shape) for shape in ((B, K, R, M, H), (B, K, S, H), (B, K, S, H))]
    low = rng.integers(0, S, (B, M))
    high = rng.integers(0, S + 1, (B, M))
    low[0, 0], high[0, 0] = 0, S
    low[1, 1], high[1, 1] = 5, 5
    return *(jnp.asarray(x, jnp.float32) for x in arrays), jnp.asarray(low), jnp.asarray(high)


def plain(q, keys, values, low, high):
    at = jnp.arange(S)
    sees = (at >= low[..., None]) & (at < high[..., None])
    scores = jnp.where(sees[:, None, None], jnp.einsum("bkrmh,bksh->bkrms", q, keys), MASKED)
    weights = jnp.where(sees[:, None, None], jax.nn.softmax(scores, axis=-1), 0.0)
    nothing = ~sees.any(-1)[:, None, None]
    log_mass = jnp.where(nothing, MASKED, jax.nn.logsumexp(scores, axis=-1))
    return jnp.einsum("bkrms,bksh->bkrmh", weights, values), log_mass


def scalar(function, weights):
    """A loss that both results enter; masses of -1e30 do not."""

    def loss(q, keys, values, low, high):
        mixed, log_mass = function(q, keys, values, low, high)
        return (mixed * weights[0]).sum() + jnp.where(log_mass > MASKED, log_mass * weights[1], 0.0).sum()

    return loss


@pytest.mark.parametrize(("tile", "chunk"), [(4, 5), (11, 13), (512, 512), (1, 1)])
def test_equal_to_the_plain_form(tile, chunk):
    arrays = case()
    ours = jax.jit(functools.partial(context_attention, tile=tile, chunk=chunk))
    for got, wanted in zip(ours(*arrays), plain(*arrays), strict=True):
        np.testing.assert_allclose(got, wanted, atol=EXACT)

    rng = np.random.default_rng(1)
    weights = rng.normal(size=(B, K, R, M, H)), rng.normal(size=(B, K, R, M))
    gradients = [jax.jit(jax.grad(scalar(f, weights), argnums=(0, 1, 2)))(*arrays) for f in (ours, plain)]
    for got, wanted in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, wanted, atol=EXACT)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_any_intervals(seed: int):
    arrays = case(seed)
    for got, wanted in zip(SMALL_TILES(*arrays), plain(*arrays), strict=True):
        np.testing.assert_allclose(got, wanted, atol=EXACT)


SMALL_TILES = jax.jit(functools.partial(context_attention, tile=4, chunk=5))


def test_what_lies_outside_an_interval_has_no_influence():
    q, keys, values, _, _ = case()
    low, high = jnp.full((B, M), 3), jnp.full((B, M), 9)
    outside = (jnp.arange(S) < 3) | (jnp.arange(S) >= 9)

    def loss(keys, values):
        mixed, log_mass = context_attention(q, keys, values, low, high, tile=4, chunk=5)
        return mixed.sum() + log_mass.sum()

    for gradient in jax.grad(loss, argnums=(0, 1))(keys, values):
        assert (gradient[:, :, outside] == 0).all() and (gradient[:, :, ~outside] != 0).any()
    poisoned = [jnp.where(outside[:, None], jnp.inf, x) for x in (keys, values)]
    assert jnp.isfinite(context_attention(q, *poisoned, low, high, tile=4, chunk=3)[0]).all()


def test_join_is_one_softmax():
    q, keys, values, _, _ = case()
    cut, everything = 6, (jnp.zeros((B, M), int), jnp.full((B, M), S))
    parts = [
        context_attention(q, keys, values, jnp.zeros((B, M), int), jnp.full((B, M), cut)),
        context_attention(q, keys, values, jnp.full((B, M), cut), jnp.full((B, M), S)),
    ]
    np.testing.assert_allclose(join(parts), context_attention(q, keys, values, *everything)[0], atol=EXACT)


@pytest.mark.parametrize("own_mask", [None, np.array([True, True, False])], ids=["all", "masked"])
def test_blocks_with_intervals_equal_blocks_with_a_mask(own_mask):
    rng = np.random.default_rng(2)
    A, G, N = 5, 3, K * R
    shapes = [(B, A, G, N, H), (B, K, S, H), (B, K, S, H), (B, A, G, K, H), (B, A, G, K, H)]
    q, keys, values, own_keys, own_values = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes)
    low, high = rng.integers(0, 4, (B, A)), np.sort(rng.integers(0, S + 1, (B, A)))
    at = np.arange(S)
    mask = jnp.asarray((at >= low[..., None]) & (at < high[..., None]))
    sees = Interval(low_BA=jnp.asarray(low), high_BA=jnp.asarray(high))

    def loss(sees, *arrays):
        return (attend_context(arrays[0], *arrays[1:3], sees, *arrays[3:], own_mask) ** 2).sum()

    arrays = (q, keys, values, own_keys, own_values)
    plain = attend_blocks(q, keys, values, mask, own_keys, own_values, own_mask)
    np.testing.assert_allclose(
        attend_context(q, keys, values, sees, own_keys, own_values, own_mask), plain, atol=EXACT
    )
    every = tuple(range(1, 6))
    for got, wanted in zip(
        *(jax.jit(jax.grad(loss, argnums=every))(x, *arrays) for x in (sees, mask)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, atol=5 * EXACT)


@pytest.mark.parametrize("window", [None, 3])
def test_causal_attention_stays_inside_its_document_also_on_a_mesh(window):
    rng = np.random.default_rng(3)
    T, N = S, K * R
    q, keys, values = (
        jnp.asarray(rng.normal(size=x), jnp.float32) for x in ((B, T, N, H), (B, K, T, H), (B, K, T, H))
    )
    starts = np.array([[0] * 5 + [5] * 4 + list(range(9, T)), [0] * T])
    at = np.arange(T)
    sees = (at <= at[:, None]) & (starts[..., None] == starts[:, None])
    sees &= window is None or at > at[:, None] - (window or 0)
    plain = attend(q, keys, values, jnp.asarray(sees))
    np.testing.assert_allclose(attend_causal(q, keys, values, jnp.asarray(starts), window), plain, atol=EXACT)

    mesh = make_mesh(data=2, tensor=2, devices=jax.devices()[:4])

    @jax.jit
    def divided(*arrays):
        with on_mesh(mesh):
            return attend_causal(*arrays, window)

    arrays = jax.device_put((q, keys, values, jnp.asarray(starts)), NamedSharding(mesh, PartitionSpec()))
    np.testing.assert_allclose(divided(*arrays), plain, atol=EXACT)


def test_memory_does_not_grow_with_the_context():
    """Temporaries of the gradient hold one tile of one chunk of scores, never all of them."""

    def temporaries_bytes(context: int) -> int:
        shapes = [(1, 1, 1, 256, 8), (1, 1, context, 8), (1, 1, context, 8)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        bounds = [jax.ShapeDtypeStruct((1, 256), jnp.int32)] * 2

        def loss(*arrays):
            return context_attention(*arrays, tile=64, chunk=64)[0].sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays, *bounds).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporaries_bytes(1024), temporaries_bytes(4096)
    gradients_bytes = 2 * (4096 - 1024) * 8 * 4
    assert long - short <= 2 * gradients_bytes < 256 * 4096 * 4


@pytest.mark.parametrize(("tile", "chunk"), [(4, 4), (12, 16)])
def test_the_kernels_equal_the_plain_form(tile, chunk):
    q, keys, values, low, high = case()
    pad_rows, pad_context = 12 - M, 16 - S
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, pad_rows), (0, 0)))
    keys, values = (jnp.pad(x, ((0, 0), (0, 0), (0, pad_context), (0, 0))) for x in (keys, values))
    low, high = (jnp.pad(x, ((0, 0), (0, pad_rows))) for x in (low, high))
    arrays = (q, keys, values, low, high)
    plain_results = context_attention(*arrays, tile=tile, chunk=chunk)
    results = context_kernel.forward(tile, chunk, *arrays, interpret=True)
    for got, wanted in zip(results, plain_results, strict=True):
        np.testing.assert_allclose(got, wanted, atol=EXACT)

    rng = np.random.default_rng(1)
    cotangents = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in results]
    function = functools.partial(context_attention, low_BM=low, high_BM=high, tile=tile, chunk=chunk)
    wanted = jax.vjp(function, q, keys, values)[1](tuple(cotangents))
    shift = cotangents[1] - (cotangents[0] * results[0]).sum(-1)
    ours = context_kernel.backward(tile, chunk, *arrays, results[1], cotangents[0], shift, interpret=True)
    for got, want in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=EXACT)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_kernels_compile_for_tpus(tpu_devices, topology):
    devices = tpu_devices(topology)
    mesh = make_mesh(data=-1, devices=devices)
    rows, context, head_dim = 512, 1024, 128

    def shape(*sizes, dtype=jnp.bfloat16):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        return jax.ShapeDtypeStruct((len(devices), *sizes), dtype, sharding=sharding)

    def loss(q, keys, values, low, high):
        mixed, log_mass = context_attention(q, keys, values, low, high, tile=128, chunk=256)
        return (mixed**2).sum() + log_mass.sum()

    by_sequence = PartitionSpec("data")
    gradient = jax.shard_map(
        jax.grad(loss, argnums=(0, 1, 2)),
        mesh=mesh,
        in_specs=(by_sequence,) * 5,
        out_specs=(by_sequence,) * 3,
        check_vma=False,
    )
    bounds = [shape(rows, dtype=jnp.int32)] * 2
    arrays = [shape(2, 4, rows, head_dim), *[shape(2, context, head_dim)] * 2, *bounds]
    program = jax.jit(gradient).lower(*arrays).compile().as_text()
    assert program.count("tpu_custom_call") >= 3
