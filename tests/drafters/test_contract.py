"""What every drafter must keep, run over all kinds and heads: causality, masks, one network in two views."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.registry import DRAFTERS as REGISTERED
from dspark_jax.losses import RowWeights, block_loss, confidence_loss, slot_weights
from dspark_jax.testing.tiny import DRAFTERS, TinyDrafter, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("quick_compiles")

B, T, A = 2, 10, 4
ANCHORS_BA = np.array(
    [[2, 3, 4, 7], [0, 1, 5, 8]], np.int32
)  # blocks of 3: some overlap, one leaves the text
VOCABULARY_np = np.random.default_rng(5).permutation(40)[:17]  # in no order, as frequencies are
REDUCED = {f"{name}, reduced vocabulary": name for name in ("markov", "eagle3", "mtp-3")}
VARIANTS = [*DRAFTERS, *REDUCED]


@functools.cache
def drafter_of(name: str) -> TinyDrafter:
    if name in REDUCED:
        return tiny_drafter(tiny_target(), draft_to_target_np=VOCABULARY_np, **DRAFTERS[REDUCED[name]])
    return tiny_drafter(tiny_target(), **DRAFTERS[name])


@functools.cache
def batch(name: str) -> dict[str, Any]:
    """Tokens that every variant can propose, and features of any origin."""
    generator = np.random.default_rng(11)
    taps = len(drafter_of(name).drafter.config.taps)
    return {
        "tokens_BT": generator.choice(VOCABULARY_np, (B, T)).astype(np.int32),
        "loss_mask_BT": np.ones((B, T), bool),
        "features_BTCD": generator.standard_normal((B, T, taps, 16)).astype(np.float32),
        "anchors_BA": ANCHORS_BA,
        "keep_BA": np.ones(ANCHORS_BA.shape, bool),
    }


def test_every_registered_drafter_is_among_them():
    assert {type(drafter_of(name).drafter.config) for name in DRAFTERS} == set(REGISTERED)


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


def row_outputs(rows) -> jax.Array:
    """[B, A, G]: a number for every row that depends on everything the loss sees; 0 where it sees nothing."""
    outputs = [rows.hidden_BMD, rows.latent_BMR, rows.confidence_logits_BM]
    flat = jnp.concatenate(
        [x.reshape(B, A, -1, x.size // rows.mask_BM.size) for x in outputs if x is not None], -1
    )
    return (
        flat @ np.random.default_rng(0).standard_normal(flat.shape[-1]) * rows.mask_BM.reshape(flat.shape[:3])
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_depends_on_every_feature_before_its_anchor_and_on_no_other(name):
    tiny = drafter_of(name)

    def per_block(features_BTCD):
        rows = tiny.drafter.training_rows(
            tiny.params, tiny.shared, **{**batch(name), "features_BTCD": features_BTCD}
        )
        return row_outputs(rows).sum(-1)

    jacobian = np.asarray(jax.jit(jax.jacrev(per_block))(batch(name)["features_BTCD"]))  # [B, A, B, T, C, D]

    for sequence, anchors in enumerate(ANCHORS_BA):
        assert not jacobian[sequence, :, 1 - sequence].any(), "another sequence"
        for block, anchor in enumerate(anchors):
            influence = np.abs(jacobian[sequence, block, sequence]).max(-1)  # [T, C]
            assert not influence[anchor:].any(), f"anchor {anchor} sees {np.flatnonzero(influence.max(-1))}"
            assert influence[:anchor].all()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_slot_depends_on_no_token_from_its_label_on(name):
    tiny = drafter_of(name)
    tokens_BT = np.arange(B * T, dtype=np.int32).reshape(B, T)  # each token once, so that its row tells where

    def per_slot(embedding_VD):
        shared = tiny.shared.replace(embedding_VD=embedding_VD)
        rows = tiny.drafter.training_rows(tiny.params, shared, **{**batch(name), "tokens_BT": tokens_BT})
        return row_outputs(rows), rows.mask_BM

    jacobian, mask_BM = jax.jit(jax.jacrev(per_slot, has_aux=True))(tiny.shared.embedding_VD)
    influence = np.abs(jacobian).max(-1)[..., : B * T].reshape(*jacobian.shape[:3], B, T)
    mask_BAG = np.asarray(mask_BM).reshape(influence.shape[:3])

    for sequence, block, slot in zip(*np.nonzero(mask_BAG), strict=True):
        anchor = ANCHORS_BA[sequence, block]
        assert not influence[sequence, block, slot, 1 - sequence].any(), "another sequence"
        assert not influence[sequence, block, slot, sequence, anchor + slot + 1 :].any()
        assert influence[sequence, block, slot, sequence, anchor] > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_masked_anchors_have_no_weight_and_no_gradient(name):
    tiny = drafter_of(name)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(params, features_BTCD, anchors_BA, keep_BA):
        arguments = {"features_BTCD": features_BTCD, "anchors_BA": anchors_BA, "keep_BA": keep_BA}
        rows = tiny.drafter.training_rows(params, tiny.shared, **{**batch(name), **arguments})
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
    features = batch(name)["features_BTCD"]
    (value, weight_BM), gradients = loss(tiny.params, features, ANCHORS_BA, keep_BA)
    moved = loss(tiny.params, features, elsewhere_BA, keep_BA)
    nothing = loss(tiny.params, features, ANCHORS_BA, np.zeros_like(keep_BA))

    assert value > 0 and all(jax.tree.leaves(jax.tree.map(lambda g: bool(g.any()), gradients)))
    assert not np.asarray(weight_BM).reshape(B, A, -1)[~keep_BA].any()
    jax.tree.map(np.testing.assert_array_equal, moved, ((value, weight_BM), gradients))
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(nothing))


@functools.cache
def decoding_view(name: str):
    """(jit(context, features, next tokens, starts, rows), jit(context, anchors, positions, ids))."""
    tiny = drafter_of(name)

    def extend(context, features, next_tokens, start, num_rows):
        return tiny.drafter.extend_context(
            tiny.params,
            tiny.shared,
            context,
            features_BTCD=features,
            next_tokens_BT=next_tokens,
            start_B=start,
            num_rows_B=num_rows,
        )

    def draft(context, anchors_B, positions_B, ids_BG):
        """A block of given tokens; its `probs_BGV` are the logits that the sampler saw."""
        return tiny.drafter.draft(
            tiny.params,
            tiny.shared,
            context,
            anchors_B,
            positions_B,
            lambda logits_BV, k: (ids_BG[:, k], logits_BV),
        )

    return jax.jit(extend), jax.jit(draft)


ROWS_N, BLOCKS_N = np.nonzero(ANCHORS_BA)
"""The blocks that can be requests: a prompt has a token, so that some feature stands before the anchor."""
N = len(ROWS_N)


def requests(name: str) -> dict[str, np.ndarray]:
    """Blocks of the batch as requests of their own, with the true tokens behind their anchors."""
    tokens_BT, positions_N = batch(name)["tokens_BT"], ANCHORS_BA[ROWS_N, BLOCKS_N]
    G = drafter_of(name).drafter.config.block_len
    after_NG = np.minimum(positions_N[:, None] + 1 + np.arange(G), T - 1)
    return {
        "features": batch(name)["features_BTCD"][ROWS_N],
        "next_tokens": np.roll(tokens_BT, -1, axis=1)[ROWS_N],
        "positions": positions_N,
        "anchors": tokens_BT[ROWS_N, positions_N],
        "tokens": tokens_BT[ROWS_N[:, None], after_NG],
    }


def poisoned_context(tiny: TinyDrafter):
    """Unwritten rows hold 1e4: whoever attends to one is found out. What a prompt starts from is zero."""
    empty = tiny.drafter.create_context(slots=N, num_pages=N, page_len=T + 2)
    return jax.tree.map(lambda x: jnp.full(x.shape, 1e4) if x.ndim == 4 else x, empty)


def decode(name: str, context=None, **changes):
    """All requests from the rows of their whole sequences: the future ones must not matter."""
    tiny, asked = drafter_of(name), {**requests(name), **changes}
    extend, draft = decoding_view(name)
    if context is None:
        start_N = jnp.zeros(N, jnp.int32)
        rows = (asked["features"], asked["next_tokens"], start_N, asked["positions"])
        context = extend(poisoned_context(tiny), *rows)
    ids_NG = tiny.shared.draft_ids(jnp.asarray(asked["tokens"]))
    return draft(context, asked["anchors"], asked["positions"], ids_NG)


@pytest.mark.parametrize("name", VARIANTS)
def test_training_and_decoding_are_one_network(name):
    rows, logits_BMV = training_view(name)(drafter_of(name).params, batch(name))

    block = decode(name)

    def of_requests(x_BM) -> np.ndarray:
        return np.asarray(x_BM).reshape(B, A, -1, *x_BM.shape[2:])[ROWS_N, BLOCKS_N]

    supervised_NG = of_requests(rows.mask_BM)
    assert supervised_NG[:, 0].all() and supervised_NG.sum() > N * supervised_NG.shape[1] / 2
    np.testing.assert_array_equal(block.tokens_BG, requests(name)["tokens"])
    expected_NGV = of_requests(logits_BMV)
    np.testing.assert_allclose(
        block.probs_BGV[supervised_NG], expected_NGV[supervised_NG], rtol=1e-5, atol=1e-5
    )
    confidence = np.zeros(supervised_NG.shape)
    if rows.confidence_logits_BM is not None:
        confidence = of_requests(rows.confidence_logits_BM)
    np.testing.assert_allclose(block.confidence_logits_BG, confidence, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_rejected_rows_leave_no_trace(name):
    """Two calls, each with rows behind those that are committed, equal one call."""
    tiny, asked = drafter_of(name), requests(name)
    extend, _ = decoding_view(name)
    first_N = np.maximum(asked["positions"] - 3, 1)
    wrong = {"features": -5 * asked["features"], "next_tokens": asked["next_tokens"][:, ::-1]}

    def rows_from(start_N, num_rows_N, width: int) -> dict[str, np.ndarray]:
        """`width` rows from start_N on, of which the first are true."""
        at_NW = start_N[:, None] + np.arange(width)
        true_NW = np.arange(width) < num_rows_N[:, None]

        def choose(field: str) -> np.ndarray:
            good, bad = (x[field][np.arange(N)[:, None], at_NW % T] for x in (asked, wrong))
            return np.where(true_NW.reshape(N, width, *[1] * (good.ndim - 2)), good, bad)

        return {field: choose(field) for field in wrong}

    zeros_N = np.zeros(N, np.int32)
    context = extend(poisoned_context(tiny), *rows_from(zeros_N, first_N, T).values(), zeros_N, first_N)
    rest_N = asked["positions"] - first_N
    again = extend(context, *rows_from(first_N, rest_N, 4).values(), first_N, rest_N)
    # The one request without a second part shows that rows alone, none committed, are not asked for.
    more = rest_N > 0
    assert more.sum() == N - 1

    once, twice = decode(name), decode(name, context=again)
    np.testing.assert_allclose(twice.probs_BGV[more], once.probs_BGV[more], rtol=1e-5, atol=1e-5)
    assert not np.allclose(decode(name, context=context).probs_BGV[more], once.probs_BGV[more])


@pytest.mark.parametrize("name", VARIANTS)
def test_batch_mates_change_nothing(name):
    block, others = decode(name), np.arange(N) != 5
    changes = {
        field: np.where(others.reshape(-1, *[1] * (x.ndim - 1)), np.roll(x, 1, axis=0), x)
        for field, x in requests(name).items()
    }

    with_others = decode(name, **changes)

    for ours, theirs in zip(jax.tree.leaves(block), jax.tree.leaves(with_others), strict=True):
        np.testing.assert_array_equal(ours[5], theirs[5])
    assert not np.allclose(block.probs_BGV[0], with_others.probs_BGV[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_and_batch_mates_do_not_change_training_rows(name):
    tiny = drafter_of(name)
    padded = {key: x.copy() for key, x in batch(name).items()}
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


def loop(body, carry, rows):
    """`lax.scan` as a Python loop."""
    outputs = []
    for i in range(len(jax.tree.leaves(rows)[0])):
        carry, output = body(carry, jax.tree.map(operator.itemgetter(i), rows))
        outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


@pytest.mark.parametrize("name", ["rnn", "eagle3"])  # MTP has no scan; the other heads have this one
def test_a_scan_equals_the_unrolled_loop(name, monkeypatch):
    tiny, scanned = drafter_of(name), decode(name)
    rows, _ = training_view(name)(tiny.params, batch(name))
    views = (training_view.__wrapped__(name), decoding_view.__wrapped__(name))
    used = []

    monkeypatch.setattr(jax.lax, "scan", lambda *arguments: used.append(1) or loop(*arguments))
    monkeypatch.setitem(globals(), "decoding_view", lambda name: views[1])
    unrolled = decode(name)
    unrolled_rows, _ = views[0](tiny.params, batch(name))

    assert len(used) == 2
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, unrolled, scanned)
    jax.tree.map(close, unrolled_rows, rows)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_rounds_after_rounds_have_one_shape(name, dtype):
    """What goes out of a round goes into the next: nothing compiles twice."""
    tiny = drafter_of(name)
    drafter = type(tiny.drafter)(tiny.drafter.config, dtype)
    before = jax.eval_shape(lambda: drafter.create_context(slots=2, num_pages=2, page_len=7))
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def extended(context, features, next_tokens, start, num_rows):
        return drafter.extend_context(
            tiny.params,
            tiny.shared,
            context,
            features_BTCD=features,
            next_tokens_BT=next_tokens,
            start_B=start,
            num_rows_B=num_rows,
        )

    features = jax.ShapeDtypeStruct((2, 4, len(drafter.config.taps), 16), jnp.float32)
    after = jax.eval_shape(extended, before, features, int32((2, 4)), int32((2,)), int32((2,)))

    assert after == before
    assert all(x.shape[0] == 2 for x in jax.tree.leaves(before))
