"""What every drafter must keep, run over all heads: causality, masked anchors, one network in two views."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.losses import RowWeights, block_loss, confidence_loss, slot_weights
from dspark_jax.testing.tiny import DRAFTERS, TinyDrafter, tiny_drafter, tiny_target

B, T = 2, 10
ANCHORS_BA = np.array(
    [[2, 3, 4, 7], [0, 1, 5, 8]], np.int32
)  # blocks of 3: some overlap, one leaves the text
VOCABULARY_np = np.random.default_rng(5).permutation(40)[:17]  # in no order, as frequencies are
VARIANTS = [*DRAFTERS, "reduced-vocabulary"]


@functools.cache
def drafter_of(name: str) -> TinyDrafter:
    target = tiny_target()
    if name == "reduced-vocabulary":
        return tiny_drafter(target, draft_to_target_np=VOCABULARY_np)
    return tiny_drafter(target, **DRAFTERS[name])


@functools.cache
def batch() -> dict[str, Any]:
    """Tokens that every variant can propose, and features of any origin."""
    generator = np.random.default_rng(11)
    return {
        "tokens_BT": generator.choice(VOCABULARY_np, (B, T)).astype(np.int32),
        "loss_mask_BT": np.ones((B, T), bool),
        "features_BTCD": generator.standard_normal((B, T, 3, 16)).astype(np.float32),
        "anchors_BA": ANCHORS_BA,
        "keep_BA": np.ones(ANCHORS_BA.shape, bool),
    }


@functools.cache
def training_view(name: str):
    """jit(params, batch) -> (rows, draft logits [B, M, Vd])."""
    tiny = drafter_of(name)

    def view(params, batch):
        rows = tiny.drafter.training_rows(params, tiny.shared, **batch)
        logits_BMV = rows.hidden_BMD @ tiny.shared.head_DV
        if rows.latent_BMR is not None:
            logits_BMV = logits_BMV + rows.latent_BMR @ rows.w2_RV
        return rows, logits_BMV

    return jax.jit(view)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_depends_on_every_feature_before_its_anchor_and_on_no_other(name):
    tiny = drafter_of(name)

    def per_block(features_BTCD):
        rows = tiny.drafter.training_rows(
            tiny.params, tiny.shared, **{**batch(), "features_BTCD": features_BTCD}
        )
        outputs = [rows.hidden_BMD, rows.latent_BMR, rows.confidence_logits_BM]
        flat = jnp.concatenate([x.reshape(B, 4, -1) for x in outputs if x is not None], axis=-1)
        return flat @ np.random.default_rng(0).standard_normal(flat.shape[-1])

    jacobian = np.asarray(jax.jit(jax.jacrev(per_block))(batch()["features_BTCD"]))  # [B, A, B, T, C, D]

    for sequence, anchors in enumerate(ANCHORS_BA):
        assert not jacobian[sequence, :, 1 - sequence].any(), "another sequence"
        for block, anchor in enumerate(anchors):
            influence = np.abs(jacobian[sequence, block, sequence]).max(-1)  # [T, C]
            assert not influence[anchor:].any(), f"anchor {anchor} sees {np.flatnonzero(influence.max(-1))}"
            assert influence[:anchor].all()


@pytest.mark.parametrize("name", VARIANTS)
def test_masked_anchors_have_no_weight_and_no_gradient(name):
    tiny = drafter_of(name)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(params, features_BTCD, anchors_BA, keep_BA):
        arguments = {"features_BTCD": features_BTCD, "anchors_BA": anchors_BA, "keep_BA": keep_BA}
        rows = tiny.drafter.training_rows(params, tiny.shared, **{**batch(), **arguments})
        weight_BM = slot_weights(rows.mask_BM, rows.slots_BM, 4.0)
        value, terms = block_loss(
            hidden_BMD=rows.hidden_BMD,
            latent_BMR=rows.latent_BMR,
            w2_RV=rows.w2_RV,
            head_DV=tiny.shared.head_DV,
            target_hidden_BMD=jnp.ones_like(rows.hidden_BMD),
            target_logz_BM=jnp.full(rows.mask_BM.shape, 5.0),
            labels_BM=tiny.shared.draft_ids(rows.labels_BM),
            weights=RowWeights(ce_BM=weight_BM, tv_BM=weight_BM, kl_BM=weight_BM),
            chunk=5,
        )
        if rows.confidence_logits_BM is not None:
            value += confidence_loss(rows.confidence_logits_BM, terms.accept_BM, weight_BM)
        return value, weight_BM

    keep_BA = np.array([[True, False, True, False], [False, False, True, False]])
    elsewhere_BA = np.where(keep_BA, ANCHORS_BA, [[9, 6, 0, 1], [3, 9, 4, 6]]).astype(np.int32)
    features = batch()["features_BTCD"]
    (value, weight_BM), gradients = loss(tiny.params, features, ANCHORS_BA, keep_BA)
    moved = loss(tiny.params, features, elsewhere_BA, keep_BA)
    nothing = loss(tiny.params, features, ANCHORS_BA, np.zeros_like(keep_BA))

    assert value > 0 and all(jax.tree.leaves(jax.tree.map(lambda g: bool(g.any()), gradients)))
    assert not np.asarray(weight_BM).reshape(B, 4, 3)[~keep_BA].any()
    jax.tree.map(np.testing.assert_array_equal, moved, ((value, weight_BM), gradients))
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(nothing))


@functools.cache
def decoding_view(name: str):
    """(jit(params, context, features, starts) -> context, jit(params, context, anchors, positions, ids))."""
    tiny = drafter_of(name)

    def draft(params, context, anchors_B, positions_B, ids_BG):
        """A block of given tokens; its `probs_BGV` are the logits that the sampler saw."""
        return tiny.drafter.draft(
            params,
            tiny.shared,
            context,
            anchors_B,
            positions_B,
            lambda logits_BV, k: (ids_BG[:, k], logits_BV),
        )

    return jax.jit(tiny.drafter.extend_context), jax.jit(draft)


def requests() -> dict[str, np.ndarray]:
    """Every block of the batch as a request of its own, with the true tokens behind its anchor."""
    tokens_BT, rows_N, positions_N = batch()["tokens_BT"], np.repeat([0, 1], 4), ANCHORS_BA.reshape(-1)
    after_NG = np.minimum(positions_N[:, None] + 1 + np.arange(3), T - 1)
    return {
        "features": batch()["features_BTCD"][rows_N],
        "positions": positions_N,
        "anchors": tokens_BT[rows_N, positions_N],
        "tokens": tokens_BT[rows_N[:, None], after_NG],
    }


def poisoned_context(tiny: TinyDrafter):
    """Unwritten rows hold 1e4: whoever attends to one is found out."""
    empty = tiny.drafter.create_context(batch=len(requests()["positions"]), length=T + 2)
    return jax.tree.map(lambda x: jnp.full(x.shape, 1e4), empty)


def decode(name: str, context=None, **changes):
    """All requests from the features of their whole sequences: the future ones must not matter."""
    tiny, asked = drafter_of(name), {**requests(), **changes}
    extend, draft = decoding_view(name)
    if context is None:
        start_N = jnp.zeros(len(asked["positions"]), jnp.int32)
        context = extend(tiny.params, poisoned_context(tiny), asked["features"], start_N)
    ids_NG = tiny.shared.draft_ids(jnp.asarray(asked["tokens"]))
    block = draft(tiny.params, context, asked["anchors"], asked["positions"], ids_NG)
    return context, block


@pytest.mark.parametrize("name", VARIANTS)
def test_training_and_decoding_are_one_network(name):
    tiny = drafter_of(name)
    rows, logits_BMV = training_view(name)(tiny.params, batch())

    _, block = decode(name)

    np.testing.assert_array_equal(block.tokens_BG, requests()["tokens"])
    logits_NGV = np.asarray(logits_BMV).reshape(8, 3, -1)
    np.testing.assert_allclose(block.probs_BGV, logits_NGV, rtol=1e-5, atol=1e-5)
    expected = np.zeros((8, 3))
    if rows.confidence_logits_BM is not None:
        expected = np.asarray(rows.confidence_logits_BM).reshape(8, 3)
    np.testing.assert_allclose(block.confidence_logits_BG, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_rejected_rows_and_batch_mates_leave_no_trace(name):
    tiny, asked = drafter_of(name), requests()
    extend, _ = decoding_view(name)
    context, block = decode(name)

    start_N, again = np.maximum(asked["positions"] - 3, 0), context
    true_rows = np.stack([f[s : s + 4] for f, s in zip(asked["features"], start_N, strict=True)])
    for rows in (-5 * true_rows, true_rows):  # rejected, then what was committed instead
        again = extend(tiny.params, again, rows, start_N)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), again, context)
    _, redone = decode(name, context=again)
    np.testing.assert_allclose(redone.probs_BGV, block.probs_BGV, rtol=1e-5, atol=1e-5)

    others = np.arange(8) != 5
    changes = {
        field: np.where(others.reshape(-1, *[1] * (x.ndim - 1)), np.roll(x, 1, axis=0), x)
        for field, x in asked.items()
    }
    _, with_others = decode(name, **changes)
    for ours, theirs in zip(jax.tree.leaves(block), jax.tree.leaves(with_others), strict=True):
        np.testing.assert_array_equal(ours[5], theirs[5])
    assert not np.allclose(block.probs_BGV[0], with_others.probs_BGV[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_and_batch_mates_do_not_change_training_rows(name):
    tiny = drafter_of(name)
    padded = {key: x.copy() for key, x in batch().items()}
    padded["loss_mask_BT"][0, 6:] = False
    padded["keep_BA"][0, 3] = False  # its anchor lies in the padding
    other = {key: x.copy() for key, x in padded.items()}
    other["tokens_BT"][0, 6:], other["features_BTCD"][0, 6:] = 0, 1e4
    other["tokens_BT"][1], other["features_BTCD"][1] = other["tokens_BT"][1, ::-1], 0

    rows, logits_BMV = training_view(name)(tiny.params, padded)
    changed, changed_logits_BMV = training_view(name)(tiny.params, other)

    supervised = np.asarray(rows.mask_BM[0])
    assert supervised.any() and not supervised.all()
    np.testing.assert_array_equal(changed.mask_BM[0], supervised)
    np.testing.assert_array_equal(changed.labels_BM[0][supervised], rows.labels_BM[0][supervised])
    np.testing.assert_array_equal(changed_logits_BMV[0][supervised], logits_BMV[0][supervised])
