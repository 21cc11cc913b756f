"""The decoder: caches, padding and neighbours change nothing; taps are the layers that they name."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.nn.kv_cache import KVCache
from dspark_jax.nn.layers import embed
from dspark_jax.targets.decoder import Decoder, embedding_table, lm_head_kernel
from dspark_jax.testing.tiny import TARGETS, TinyTarget, tiny_target

TAPS = (-1, 0, 1, 2)
LENGTH = 12  # positions in every cache


@functools.cache
def target_of(name: str) -> TinyTarget:
    return tiny_target(**TARGETS[name])


@functools.partial(jax.jit, static_argnames=("config", "taps"))
def _run(params, tokens_BT, start_B, cache, *, config, taps):
    return Decoder(config).apply({"params": params}, tokens_BT, start_B=start_B, cache=cache, taps=taps)


def run(target: TinyTarget, tokens_BT, start_B=None, cache=None, taps=TAPS):
    start_B = None if start_B is None else jnp.asarray(start_B, jnp.int32)
    return _run(target.params, jnp.asarray(tokens_BT), start_B, cache, config=target.config, taps=taps)


def empty_cache(target: TinyTarget, batch: int) -> KVCache:
    """A cache whose unwritten rows are poison: whoever reads one is found out."""
    cache = KVCache.create(target.config.layers, num_pages=batch, page_len=LENGTH)
    return jax.tree.map(lambda x: jnp.full(x.shape, 1e4), cache)


def random_tokens(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 41, (batch, length)).astype(np.int32)


def assert_same(output, reference, rows=slice(None), *, tolerance: float = 1e-5):
    """All outputs of `output` equal positions `rows` of `reference`."""
    for name in ("logits_BTV", "hidden_BTD", "features_BTCD"):
        np.testing.assert_allclose(
            getattr(output, name),
            getattr(reference, name)[:, rows],
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )


@pytest.mark.parametrize("name", TARGETS)
def test_one_by_one_from_a_cache_equals_all_at_once(name):
    target, tokens_BT = target_of(name), random_tokens(2, 7)
    everything = run(target, tokens_BT)

    prefill = run(target, tokens_BT[:, :4], [0, 0], empty_cache(target, 2))
    assert_same(prefill, everything, slice(0, 4))
    cache = prefill.cache
    for t in range(4, 7):
        output = run(target, tokens_BT[:, t : t + 1], [t, t], cache)
        assert_same(output, everything, slice(t, t + 1))
        cache = output.cache


def test_chunks_and_rejected_rows_leave_no_trace():
    target, tokens_BT = target_of("llama-gqa-tied"), random_tokens(2, 7)
    everything = run(target, tokens_BT)
    cache = run(target, tokens_BT[:, :4], [0, 0], empty_cache(target, 2)).cache

    rejected = run(target, (tokens_BT[:, :4] + 1) % 41, [4, 4], cache).cache
    chunk = run(target, np.pad(tokens_BT[:, 4:], ((0, 0), (0, 1))), [4, 4], rejected)

    assert_same(jax.tree.map(lambda x: x[:, :3], chunk.replace(cache=None)), everything, slice(4, 7))


def test_right_padding_is_harmless():
    target, tokens_BT = target_of("qwen3"), random_tokens(2, 7)
    padded_BT = tokens_BT.copy()
    padded_BT[:, 5:] = 0

    real, padded = (run(target, tokens) for tokens in (tokens_BT, padded_BT))

    np.testing.assert_array_equal(padded.logits_BTV[:, :5], real.logits_BTV[:, :5])
    assert not np.allclose(padded.logits_BTV[:, 5:], real.logits_BTV[:, 5:])


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3"])
def test_rows_at_different_positions_equal_single_requests(name):
    target, tokens_BT, starts = target_of(name), random_tokens(2, 9), (6, 3)
    alone = []
    for tokens_T, start in zip(tokens_BT, starts, strict=True):
        prompt_1T = np.pad(tokens_T[None, :start], ((0, 0), (0, 6 - start)))  # padded to one shape
        cache = run(target, prompt_1T, [0], empty_cache(target, 1)).cache
        alone.append((cache, run(target, tokens_T[None, start : start + 3], [start], cache)))

    together = run(
        target,
        np.stack([tokens_BT[0, 6:9], tokens_BT[1, 3:6]]),
        starts,
        jax.tree.map(lambda *rows: jnp.concatenate(rows), *(cache for cache, _ in alone)),
    )

    expected = jax.tree.map(lambda *rows: jnp.concatenate(rows), *(output for _, output in alone))
    assert_same(together, expected)
    for written, reference in zip(
        jax.tree.leaves(together.cache), jax.tree.leaves(expected.cache), strict=True
    ):
        np.testing.assert_allclose(written, reference, rtol=1e-5, atol=1e-5)


def test_taps_are_raw_layer_outputs_in_the_order_asked():
    target, tokens_BT = target_of("llama-gqa-tied"), random_tokens(2, 7)
    block = target.config.block
    one_layer = dataclasses.replace(
        target, config=dataclasses.replace(target.config, layers=target.config.layers[:1])
    )  # ignores the parameters of the layers above

    output = run(target, tokens_BT, taps=(2, -1, 0))
    last, embedded, first = np.moveaxis(np.asarray(output.features_BTCD), 2, 0)

    np.testing.assert_array_equal(embedded, np.asarray(embedding_table(target.params))[tokens_BT])
    scale = target.params["final_norm"]["scale"]

    def final_norm(x_np):
        return x_np / np.sqrt((x_np**2).mean(-1, keepdims=True) + block.norm_eps) * scale

    np.testing.assert_allclose(final_norm(last), output.hidden_BTD, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        final_norm(first), run(one_layer, tokens_BT, taps=()).hidden_BTD, rtol=1e-5, atol=1e-5
    )


def test_without_taps_there_are_no_features():
    output = run(target_of("llama-gqa-tied"), random_tokens(2, 7), taps=())

    assert output.features_BTCD.shape == (2, 7, 0, 16) and output.cache is None


@pytest.mark.parametrize("taps", [(3,), (-2,), (0, 99)])
def test_taps_that_the_target_lacks_are_refused(taps):
    with pytest.raises(InputError, match=r"from -1 \(the embedding\) to 2"):
        run(target_of("llama-gqa-tied"), random_tokens(1, 2), taps=taps)


def test_gemma4_scales_its_embeddings():
    target, tokens_BT = target_of("gemma4"), random_tokens(2, 7)

    embedded = run(target, tokens_BT, taps=(-1,)).features_BTCD[:, :, 0]

    np.testing.assert_allclose(embedded, 4 * np.asarray(embedding_table(target.params))[tokens_BT], rtol=1e-6)
    # As it was trained: in bfloat16 the root of 3840, 61.97, is 62.
    assert embed(jnp.ones((1, 2), jnp.bfloat16), jnp.zeros(1, int), 3840**0.5).tolist() == [[62.0, 62.0]]


def test_a_window_ends_where_it_should():
    target, tokens_BT = target_of("gemma4"), random_tokens(2, 7)
    (first, *_) = target.config.layers
    assert first.window == 3
    one_layer = dataclasses.replace(target, config=dataclasses.replace(target.config, layers=(first,)))
    changed_BT = tokens_BT.copy()
    changed_BT[:, 2] = (changed_BT[:, 2] + 1) % 41

    before, after = (run(one_layer, tokens, taps=()).logits_BTV for tokens in (tokens_BT, changed_BT))

    differs_T = np.abs(before - after).max((0, 2)) > 1e-3
    assert differs_T.tolist() == [False, False, True, True, True, False, False]


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3", "gemma4"])
def test_logits_are_hidden_states_times_the_head_that_drafters_share(name):
    target = target_of(name)
    output = run(target, random_tokens(2, 7))

    assert ("lm_head" in target.params) == (not target.config.tie_embeddings)
    head_DV = lm_head_kernel(target.params)
    logits_BTV, softcap = output.hidden_BTD @ head_DV, target.config.scaling.softcap
    if softcap is not None:
        assert np.abs(logits_BTV).max() > softcap
        logits_BTV = softcap * np.tanh(logits_BTV / softcap)
    np.testing.assert_allclose(logits_BTV, output.logits_BTV, rtol=1e-5, atol=1e-5)
    is_tied = np.array_equal(head_DV, embedding_table(target.params).T)
    assert is_tied == target.config.tie_embeddings


def test_bfloat16_inputs_give_float32_results_nearby():
    target, tokens_BT = target_of("llama-gqa-tied"), random_tokens(2, 7)
    network = Decoder(target.config, jnp.bfloat16)

    logits_BTV = jax.jit(network.apply)({"params": target.params}, tokens_BT).logits_BTV

    assert logits_BTV.dtype == jnp.float32
    difference = np.abs(logits_BTV - run(target, tokens_BT).logits_BTV)
    assert 0 < difference.max() < 0.3
