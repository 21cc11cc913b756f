"""The drafter's parts against formulas written out in numpy: heads, blocks, vocabulary, configuration."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.drafters.blocks import make_blocks
from dspark_jax.drafters.config import RNN, Confidence, DSparkConfig, Gated, Layout, Markov
from dspark_jax.drafters.contract import SharedWeights
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.heads import make_head
from dspark_jax.nn.config import TokenScaling
from dspark_jax.testing.tiny import randomised, tiny_drafter, tiny_target

V, D, R, G = 11, 6, 4, 5


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def markov(p, hidden, prev):
    return p["w1"][prev]


def gated(p, hidden, prev):
    embedded = p["w1"][prev]
    joined = np.concatenate([hidden, embedded], axis=-1)
    return sigmoid(joined @ p["gate_kernel"] + p["gate_bias"]) * embedded


def rnn(p, hidden, prev):
    state, latents = np.zeros((*prev.shape[:-1], R)), []
    for k in range(G):
        joined = np.concatenate([state, p["w1"][prev[..., k]], hidden[..., k, :]], axis=-1)
        gate, candidate, output = np.split(joined @ p["joint_kernel"] + p["joint_bias"], 3, axis=-1)
        state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        latents.append(np.tanh(output))
    return np.stack(latents, axis=-2)


@pytest.mark.parametrize(("config", "formula"), [(Markov, markov), (Gated, gated), (RNN, rnn)])
def test_latents_of_a_scan_equal_the_unrolled_formula(config, formula):
    head = make_head(config(rank=R), target_vocab_size=V, vocab_size=7, width=D)
    generator = np.random.default_rng(0)
    hidden = generator.standard_normal((2, 3, G, D)).astype(np.float32)
    prev = generator.integers(0, V, (2, 3, G))
    shapes = jax.eval_shape(lambda key: head.init(key, hidden, prev, method="latents"), jax.random.key(0))
    params = randomised(shapes["params"], seed=0)
    assert params["w1"].shape == (V, R) and params["w2"].shape == (R, 7)

    latents = jax.jit(lambda *arrays: head.apply({"params": params}, *arrays, method="latents"))(hidden, prev)

    expected = formula({name: np.asarray(x, np.float64) for name, x in params.items()}, hidden, prev)
    np.testing.assert_allclose(latents, expected, rtol=1e-5, atol=1e-5)


def test_blocks_equal_a_loop_over_anchors_and_slots():
    generator = np.random.default_rng(3)
    batch, length, anchors, block_len = 4, 12, 5, 4
    tokens = generator.integers(0, 50, (batch, length))
    loss_mask = generator.random((batch, length)) < 0.7
    anchors_BA = np.sort(generator.integers(0, length, (batch, anchors)))
    keep = generator.random((batch, anchors)) < 0.7

    blocks = jax.jit(make_blocks, static_argnames="block_len")(
        tokens_BT=tokens,
        loss_mask_BT=loss_mask,
        starts_BT=np.zeros_like(tokens),
        anchors_BA=anchors_BA,
        keep_BA=keep,
        block_len=block_len,
    )

    prefix_BAG, after_a_feature_BAG = np.asarray(blocks.prefix_BAG), np.asarray(blocks.after_a_feature_BAG)
    blocks = jax.tree.map(np.asarray, blocks)
    for b, a in np.ndindex(batch, anchors):
        anchor, open_so_far = anchors_BA[b, a], bool(keep[b, a])
        assert blocks.prev_BAG[b, a, 0] == tokens[b, anchor]
        assert blocks.positions_BAG[b, a].tolist() == list(range(anchor, anchor + block_len))
        assert (blocks.context.low_BA[b, a], blocks.context.high_BA[b, a]) == (0, anchor)
        for k in range(block_len):
            label_at = anchor + k + 1
            supervised = bool(keep[b, a]) and label_at < length and bool(loss_mask[b, label_at])
            open_so_far = open_so_far and supervised
            assert blocks.supervised_BAG[b, a, k] == supervised
            assert after_a_feature_BAG[b, a, k] == (supervised and anchor > 0)
            assert prefix_BAG[b, a, k] == open_so_far
            if open_so_far:
                assert blocks.labels_BAG[b, a, k] == tokens[b, label_at]
                assert blocks.prev_BAG[b, a, k] == tokens[b, label_at - 1]


def test_a_sequence_shorter_than_a_block_has_no_slots_outside():
    blocks = make_blocks(
        tokens_BT=jnp.array([[4, 5]]),
        loss_mask_BT=jnp.ones((1, 2), bool),
        starts_BT=jnp.zeros((1, 2), jnp.int32),
        anchors_BA=jnp.array([[0, 1]]),
        keep_BA=jnp.ones((1, 2), bool),
        block_len=4,
    )

    assert blocks.prefix_BAG.tolist() == [[[True, False, False, False], [False] * 4]]


def test_a_reduced_vocabulary_maps_ids_both_ways_and_cuts_the_head():
    embedding_VD = jnp.arange(V * D, dtype=jnp.float32).reshape(V, D)
    vocabulary = jnp.array([7, 2, 10], jnp.int32)

    shared = SharedWeights.cut(embedding_VD, embedding_VD.T, vocabulary, TokenScaling())

    np.testing.assert_array_equal(shared.embedding_VD, embedding_VD)
    np.testing.assert_array_equal(shared.head_DV, embedding_VD[vocabulary].T)
    assert shared.target_ids(jnp.array([[0, 2], [1, 1]])).tolist() == [[7, 10], [2, 2]]
    assert shared.draft_ids(jnp.array([10, 7, 2, 0, 9])).tolist() == [2, 0, 1, -1, -1]


def test_without_a_reduced_vocabulary_ids_are_the_same():
    shared = SharedWeights.cut(jnp.ones((V, D)), jnp.ones((D, V)), None, TokenScaling())

    ids = jnp.arange(V)
    assert shared.target_ids(ids) is ids and shared.draft_ids(ids) is ids and shared.head_DV.shape == (D, V)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mask_token", -1, "mask_token=-1.*0..40"),
        ("mask_token", 41, "mask_token=41.*0..40"),
        ("vocab_size", 42, "vocab_size=42"),
        ("vocab_size", 0, "vocab_size=0"),
        ("taps", (), "taps"),
        ("taps", (1, 1), "taps"),
        ("taps", (-2, 1), "taps"),
        ("block_len", 0, "block_len=0"),
        ("num_layers", 0, "num_layers=0"),
        ("head", None, "without a sequential head"),
    ],
)
def test_impossible_drafters_are_refused(field, value, message):
    fields = {
        "target_vocab_size": 41,
        "vocab_size": 41,
        "num_layers": 1,
        "block": tiny_target().config.block,
        "taps": (0, 1),
        "block_len": 2,
        "mask_token": 40,
        "head": Markov(rank=2),
        "confidence": Confidence(with_markov=True),
    }
    DSparkConfig(**fields)

    with pytest.raises(InputError, match=message):
        DSparkConfig(**{**fields, field: value})


def test_fill_in_reads_one_row_more_and_predicts_from_the_mask_rows():
    """Its rows are those of an anchor-first block that is one longer, without the anchor's own."""
    target = tiny_target()
    fill_in = tiny_drafter(target, layout=Layout.FILL_IN, block_len=3)
    longer = DSpark(dataclasses.replace(fill_in.drafter.config, layout=Layout.ANCHOR_FIRST, block_len=4))
    context = fill_in.drafter.create_context(batch=1, length=8)
    context = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) % 7 / 7, context)

    def hidden(drafter: DSpark):
        return drafter.block_hidden(fill_in.params, fill_in.shared, context, jnp.array([5]), jnp.array([6]))

    np.testing.assert_array_equal(hidden(fill_in.drafter), hidden(longer)[:, 1:])
