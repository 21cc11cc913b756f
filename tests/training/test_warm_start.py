"""The regression start: what it promises about attention, and that it beats chance."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.config import DSparkConfig, Markov
from dspark_jax.drafters.contract import SharedWeights
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.nn.config import BlockConfig, TokenScaling
from dspark_jax.nn.rope import DefaultRope, LinearRope, apply_rope, rope_angles
from dspark_jax.training.config import LossConfig
from dspark_jax.training.features import TargetFeatures
from dspark_jax.training.state import TrainBatch
from dspark_jax.training.step import loss_sums, metrics
from dspark_jax.training.warm_start import SCORE_MARGIN, RegressionSample, newest_position_phases, warm_start


@pytest.mark.parametrize(
    "rope", [DefaultRope(theta=1e4), DefaultRope(theta=1e6), LinearRope(theta=1e4, factor=2.0)]
)
def test_scores_fall_with_distance(rope):
    head_dim, block_len = 64, 7
    query_H, key_H = newest_position_phases(rope, head_dim, block_len)
    distances = jnp.arange(1, 400)
    q = apply_rope(
        jnp.broadcast_to(query_H, (1, 399, 1, head_dim)), rope_angles(rope, head_dim, distances[None])
    )
    scores = np.asarray(q[0, :, 0] @ key_H) / np.sqrt(head_dim)
    for k in range(block_len):  # row k stands k + 1 behind the newest context position
        assert scores[k] - scores[k + 1 :].max() > 0.95 * SCORE_MARGIN


def linear_language(rng, *, vocab, width, sequences, length):
    """A made-up target whose hidden state is a linear function of the feature before and of the token."""
    embedding = rng.normal(size=(vocab, width)).astype(np.float32) / 4 + 0.2
    features = rng.normal(size=(sequences, length, 1, width)).astype(np.float32) + 1.0
    tokens = rng.integers(1, vocab, size=(sequences, length)).astype(np.int32)
    from_feature, from_token = (
        rng.normal(size=(width, width)).astype(np.float32) / np.sqrt(width) for _ in range(2)
    )
    hidden = np.zeros((sequences, length, width), np.float32)
    unit = embedding[tokens] / np.sqrt(np.mean(embedding[tokens] ** 2, -1, keepdims=True))
    hidden[:, 1:] = (features[:, :-1, 0] - 1.0) @ from_feature + 0.3 * unit[:, 1:] @ from_token
    return embedding, features, tokens, 1.5 * hidden


def test_starts_far_above_chance():
    rng = np.random.default_rng(0)
    vocab, width = 61, 32
    block = BlockConfig(
        width=width, mlp_width=64, num_heads=4, num_kv_heads=2, head_dim=16, rope=DefaultRope(theta=1e4)
    )
    config = DSparkConfig(
        target_vocab_size=vocab,
        vocab_size=vocab,
        num_layers=2,
        block=block,
        taps=(0,),
        block_len=3,
        mask_token=0,
        head=Markov(rank=8),
    )
    embedding, features, tokens, hidden = linear_language(
        rng, vocab=vocab, width=width, sequences=24, length=64
    )
    mask = np.arange(64) >= np.full((24, 1), 8)
    head = embedding.T
    logz = jax.nn.logsumexp(jnp.asarray(hidden @ head), axis=-1)
    drafter = DSpark(config)
    random = jax.tree.map(np.asarray, nn.meta.unbox(drafter.init(jax.random.key(0))))
    sample = RegressionSample.from_batch(tokens[:16], mask[:16], features[:16], hidden[:16])
    rms = np.sqrt(np.mean(sample.features_NX**2, axis=0))
    warm = warm_start(
        random,
        sample,
        config=config,
        embedding_VD=embedding,
        head_DV=head,
        final_norm_D=np.ones(width, np.float32),
        feature_scale_X=1 / rms,
    )
    assert jax.tree.map(np.shape, warm) == jax.tree.map(np.shape, random)

    anchors = np.tile(np.arange(10, 58, 6, dtype=np.int32), (8, 1))
    held_out = TrainBatch(
        tokens_BT=jnp.asarray(tokens[16:]),
        loss_mask_BT=jnp.asarray(mask[16:]),
        anchors_BA=jnp.asarray(anchors),
        keep_BA=jnp.ones(anchors.shape, bool),
        target=TargetFeatures(jnp.asarray(features[16:]), jnp.asarray(hidden[16:]), logz[16:]),
    )
    shared = SharedWeights.cut(jnp.asarray(embedding), jnp.asarray(head), None, TokenScaling())

    def first_slot_acceptance(params):
        params = jax.tree.map(jnp.asarray, params)
        _, sums = loss_sums(params, held_out, held_out.target, shared, drafter=drafter, config=LossConfig())
        return float(metrics(sums)["accept_G"][0])

    assert first_slot_acceptance(warm) > 2 * first_slot_acceptance(random)


def test_sample_pairs_each_position_with_the_one_before():
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    mask = np.zeros((2, 6), bool)
    mask[0, 3:5] = mask[1, 0] = True  # position 0 has nothing before it
    features = np.arange(12, dtype=np.float32).reshape(2, 6, 1, 1)
    sample = RegressionSample.from_batch(tokens, mask, features, features[:, :, 0] * 10)
    np.testing.assert_array_equal(sample.tokens_N, [3, 4])
    np.testing.assert_array_equal(sample.features_NX[:, 0], [2, 3])
    np.testing.assert_array_equal(sample.hidden_ND[:, 0], [30, 40])
    joined = RegressionSample.join([sample, sample])
    assert all(len(getattr(joined, field.name)) == 4 for field in dataclasses.fields(joined))
