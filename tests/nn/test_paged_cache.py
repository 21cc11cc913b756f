"""Paged attention of ragged rows against plain attention, in XLA and as the TPU kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dspark_jax.core.sharding import make_mesh
from dspark_jax.nn.attention import attend
from dspark_jax.nn.paged_cache import Rows, attend_rows, attend_rows_plain, create_pages, write
from dspark_jax.nn.paged_kernel import paged_attention_kernel

B, N, K, H, PAGE, PAGES_PER_SLOT = 3, 4, 2, 8, 4, 3
S = PAGE * PAGES_PER_SLOT
STARTS, LENGTHS, NUM_ROWS = np.array([5, 0, 7]), np.array([3, 0, 5]), 10
EXACT = 1e-5


def case(seed: int = 0):
    """Contiguous keys and values [B, K, S, H], queries of the rows, the same in shuffled pages, markers."""
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, B, K, S, H)).astype(np.float32)
    table = 1 + rng.permutation(B * PAGES_PER_SLOT).reshape(B, PAGES_PER_SLOT)
    pages = np.full((2, 1 + table.size, K, PAGE, H), 1e3, np.float32)  # page 0 belongs to nobody
    for kind, dense in enumerate((keys, values)):
        for b in range(B):
            for n in range(PAGES_PER_SLOT):
                pages[kind, table[b, n]] = dense[b, :, n * PAGE : (n + 1) * PAGE]
    q = rng.normal(size=(NUM_ROWS, N, H)).astype(np.float32)
    rows = Rows.ragged(jnp.asarray(STARTS), jnp.asarray(LENGTHS), NUM_ROWS)
    return keys, values, q, jnp.asarray(table, jnp.int32), jnp.asarray(pages), rows


def plain_attention(keys, values, q, rows: Rows, window: int | None) -> np.ndarray:
    """One row at a time, without pages."""
    mixed = []
    for row, (slot, position) in enumerate(zip(rows.slots_M, rows.positions_M, strict=True)):
        if slot == B:
            continue
        at = np.arange(S)
        sees = (at <= position) & (at > position - (window or S + 1))
        out = attend(q[None, None, row], keys[slot][None], values[slot][None], sees[None, None])
        mixed.append(np.asarray(out[0, 0]))
    return np.stack(mixed)


WINDOWS = pytest.mark.parametrize("window", [None, 3], ids=["all", "window"])


@WINDOWS
@pytest.mark.parametrize("path", ["xla", "kernel", "dispatched"])
def test_ragged_rows_equal_single_rows(path, window):
    keys, values, q, table, pages, rows = case()
    if path == "dispatched":
        function = functools.partial(attend_rows, rows_per_slot=6, window=window)
        ours = jax.jit(function)(q, *pages, table, rows)
    elif path == "xla":
        ours = attend_rows_plain(q, *pages, table, rows, rows_per_slot=6, window=window)
    else:
        ours = paged_attention_kernel(
            q, *pages, table, rows.slots_M, rows.positions_M, window=window, interpret=True
        )
    wanted = plain_attention(keys, values, q, rows, window)
    np.testing.assert_allclose(ours[: len(wanted)], wanted, atol=EXACT)


def test_the_kernel_walks_over_several_blocks_of_rows(monkeypatch):
    monkeypatch.setattr("dspark_jax.nn.paged_kernel.ROWS_PER_BLOCK", 4)
    keys, values, q, table, pages, rows = case(1)
    ours = paged_attention_kernel(q, *pages, table, rows.slots_M, rows.positions_M, interpret=True)
    wanted = plain_attention(keys, values, q, rows, None)
    np.testing.assert_allclose(ours[: len(wanted)], wanted, atol=EXACT)


def test_markers_by_hand():
    rows = Rows.ragged(jnp.asarray(STARTS), jnp.asarray(LENGTHS), NUM_ROWS)
    assert rows.slots_M.tolist() == [0, 0, 0, 2, 2, 2, 2, 2, B, B]
    assert rows.positions_M.tolist() == [5, 6, 7, 7, 8, 9, 10, 11, 0, 0]
    assert rows.places_M.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0]


def test_rows_are_written_where_they_lie_and_padding_nowhere():
    _, _, _, table, pages, rows = case()
    new = jnp.asarray(np.random.default_rng(2).normal(size=(NUM_ROWS, K, H)), jnp.float32)
    written = jax.jit(write, donate_argnums=0)(pages[0].copy(), new, table, rows)
    wanted = np.array(pages[0])
    for row in range(LENGTHS.sum()):
        slot, position = int(rows.slots_M[row]), int(rows.positions_M[row])
        wanted[table[slot, position // PAGE], :, position % PAGE] = new[row]
    np.testing.assert_array_equal(written, wanted)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_kernel_compiles_for_tpus_under_tensor_parallelism(tpu_devices, topology):
    devices = tpu_devices(topology)
    mesh = make_mesh(tensor=len(devices), devices=devices)
    slots, pages_per_slot, num_rows = 16, 8, 48
    heads, kv_heads, head_dim, page = 32, 8, 128, 64

    def shape(*sizes, dtype=jnp.int32, spec=()):
        return jax.ShapeDtypeStruct(
            sizes, dtype, sharding=jax.sharding.NamedSharding(mesh, PartitionSpec(*spec))
        )

    by_head = (None, "tensor")
    pages = shape(slots * pages_per_slot, kv_heads, page, head_dim, dtype=jnp.bfloat16, spec=by_head)
    sharded = jax.shard_map(
        paged_attention_kernel,
        mesh=mesh,
        in_specs=(*[PartitionSpec(*by_head)] * 3, *[PartitionSpec()] * 3),
        out_specs=PartitionSpec(*by_head),
        check_vma=False,
    )
    compiled = (
        jax.jit(sharded)
        .lower(
            shape(num_rows, heads, head_dim, dtype=jnp.bfloat16, spec=by_head),
            pages,
            pages,
            shape(slots, pages_per_slot),
            shape(num_rows),
            shape(num_rows),
        )
        .compile()
    )
    program = compiled.as_text()
    assert "tpu_custom_call" in program
    assert "all-gather" not in program and "all-reduce" not in program


def test_pages_are_empty_and_typed():
    pages = create_pages(num_pages=2, num_kv_heads=K, page_len=PAGE, head_dim=H, dtype=jnp.bfloat16)
    assert pages.shape == (2, K, PAGE, H) and pages.dtype == jnp.bfloat16 and not pages.any()
