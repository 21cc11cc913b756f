"""A reduced draft vocabulary: which tokens it holds, and what the loss says about those it lacks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.draft_vocab import most_frequent_tokens
from dspark_jax.data.sources import Example
from dspark_jax.targets.decoder import lm_head_kernel
from dspark_jax.testing.tiny import tiny_drafter, tiny_target
from dspark_jax.training.config import LossConfig
from dspark_jax.training.features import target_features
from dspark_jax.training.state import TrainBatch
from dspark_jax.training.step import loss_sums


def example(tokens: list[int], supervised_from: int) -> Example:
    return Example(
        id=str(tokens),
        domain="test",
        tokens_np=np.asarray(tokens, np.int32),
        loss_mask_np=np.arange(len(tokens)) >= supervised_from,
    )


def test_most_frequent_tokens_by_hand():
    examples = [example([9, 9, 9, 9, 5, 5, 7], 4), example([9, 8, 7, 7, 2, 6], 2)]
    # Supervised: 7 three times, 5 twice, 2 and 6 once; the prompts' 9 and 8 never.
    assert most_frequent_tokens(examples, 2, vocab_size=10).tolist() == [5, 7]
    assert most_frequent_tokens(examples, 3, vocab_size=10).tolist() == [2, 5, 7]  # the lower id of a tie
    assert most_frequent_tokens(examples, 5, vocab_size=10).tolist() == [0, 2, 5, 6, 7]
    assert most_frequent_tokens(examples, 5, vocab_size=10).dtype == np.int32


def test_labels_outside_cost_no_ce_and_the_mass_outside_counts_in_tv():
    target = tiny_target(tie_word_embeddings=False)
    V, ids_np = target.config.vocab_size, np.array([0, 2, 3, 5, 8, 13, 21, 34, 40])
    tiny = tiny_drafter(target, draft_to_target_np=ids_np)
    rng = np.random.default_rng(0)
    batch = TrainBatch(
        tokens_BT=rng.integers(0, V, (3, 16)).astype(np.int32),
        loss_mask_BT=np.arange(16) >= np.array([[0], [4], [9]]),
        anchors_BA=np.array([[2, 9], [5, 13], [14, 0]], np.int32),
        keep_BA=np.array([[True, True], [True, True], [True, False]]),
        target=None,
    )
    config = LossConfig(ce=0.2, tv=0.7, confidence=0.0, decay_len=3.0, chunk=4)

    @jax.jit
    def compute():
        tokens_BT = jnp.asarray(batch.tokens_BT)
        features = target_features(
            target.params, tokens_BT, config=target.config, taps=tiny.drafter.config.taps, dtype="float32"
        )
        loss = functools.partial(loss_sums, drafter=tiny.drafter, config=config)
        inputs = {
            "tokens_BT": tokens_BT,
            "loss_mask_BT": jnp.asarray(batch.loss_mask_BT),
            "features_BTCD": features.features_BTCD,
            "anchors_BA": jnp.asarray(batch.anchors_BA),
            "keep_BA": jnp.asarray(batch.keep_BA),
        }
        rows = tiny.drafter.training_rows(tiny.params, tiny.shared, **inputs)
        return loss(tiny.params, batch, features, tiny.shared), rows, features

    (loss, sums), rows, features = jax.device_get(compute())

    head_DV = np.asarray(lm_head_kernel(target.params), np.float64)
    weight, ce, tv, outside_mass = 0.0, 0.0, 0.0, []
    labels_outside = 0
    for b, m in zip(*np.nonzero(rows.mask_BM), strict=True):
        w = np.exp(-rows.slots_BM[b, m] / 3.0)
        p_V = softmax(features.hidden_BTD[b, rows.positions_BM[b, m]] @ head_DV)
        q_V = np.zeros(V)
        q_V[ids_np] = softmax(rows.hidden_BMD[b, m] @ head_DV[:, ids_np] + rows.latent_BMR[b, m] @ rows.w2_RV)
        weight, tv = weight + w, tv + w * np.abs(q_V - p_V).sum()
        if (label := rows.labels_BM[b, m]) in ids_np:
            ce -= w * np.log(q_V[label])
        else:
            labels_outside += 1
        outside_mass.append(1 - p_V[ids_np].sum())

    assert 0 < labels_outside < len(outside_mass) and np.mean(outside_mass) > 0.3
    np.testing.assert_allclose([sums.weight, sums.ce, sums.tv], [weight, ce, tv], rtol=1e-5)
    np.testing.assert_allclose(loss, 0.2 * ce + 0.7 * tv, rtol=1e-5)
    # Nothing else could have made up for the target's mass outside.
    assert (sums.accept_G.sum() / sums.rows_G.sum()) < 1 - np.mean(outside_mass) / 2


def softmax(logits_V) -> np.ndarray:
    exp_V = np.exp(logits_V - np.max(logits_V))
    return exp_V / exp_V.sum()
