"""What the public reference (DeepSpec) computes on tiny models, we compute: training, gradients, decoding."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from dspark_jax.checkpoints.drafter import LoadedDrafter, drafter_slots, load_drafter
from dspark_jax.checkpoints.targets import open_source, read_params
from dspark_jax.drafters.contract import SharedWeights
from dspark_jax.losses import EPSILON, RowWeights, block_loss, confidence_loss, slot_weights
from dspark_jax.nn.kv_cache import KVCache
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.decoder import Decoder, embedding_table, lm_head_kernel

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
CASES = (
    "dspark_vanilla_tied",
    "dspark_gated_untied",
    "dspark_rnn",
    "dspark_conf_without_markov",
    "dflash",
)
LENGTH = 72  # positions of the caches; the longest recorded decoding needs 17 + 40 + a block
PROMPT_BUCKET = 20

pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="the recorded reference, ../shared/golden, is not on this machine"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One recorded case, loaded as users load checkpoints."""

    loaded: LoadedDrafter
    shared: SharedWeights
    target: DecoderConfig
    target_params: dict[str, Any]
    train: dict[str, np.ndarray]
    decode: dict[str, Any]


@functools.cache
def case_of(name: str) -> Case:
    target, target_params = read_params(open_source(GOLDEN / name / "target"))
    loaded = load_drafter(GOLDEN / name / "drafter")
    return Case(
        loaded=loaded,
        shared=loaded.shared_weights(embedding_table(target_params), lm_head_kernel(target_params)),
        target=target,
        target_params=target_params,
        train=dict(np.load(GOLDEN / name / "train.npz")),
        decode=json.loads((GOLDEN / name / "greedy_decode.json").read_text()),
    )


@functools.cache
def training(name: str):
    """(loss, (row terms, rows, draft logits), gradients) of the recorded batch."""
    case = case_of(name)
    drafter, shared, z = case.loaded.drafter, case.shared, case.train
    B, T = z["input_ids"].shape
    coefficients = {
        term: float(z[f"alpha_{term}_alpha"]) for term in ("ce_loss", "l1_loss", "confidence_head")
    }

    def loss(params):
        rows = drafter.training_rows(
            params,
            shared,
            tokens_BT=jnp.asarray(z["input_ids"], jnp.int32),
            loss_mask_BT=jnp.asarray(z["loss_mask"], bool),
            features_BTCD=jnp.asarray(z["target_hidden_states"]).reshape(B, T, len(drafter.config.taps), -1),
            anchors_BA=jnp.asarray(z["anchor_positions"], jnp.int32),
            keep_BA=jnp.asarray(z["block_keep_mask"]),
        )
        weight_BM = slot_weights(rows.mask_BM, rows.slots_BM, float(z["loss_decay_gamma"]))
        weight_BM = weight_BM / (weight_BM.sum() + EPSILON)
        at_BM = jnp.minimum(rows.positions_BM, T - 1)
        hidden_BTD = jnp.asarray(z["target_last_hidden_states"])
        value, terms = block_loss(
            hidden_BMD=rows.hidden_BMD,
            latent_BMR=rows.latent_BMR,
            w2_RV=rows.w2_RV,
            head_DV=shared.head_DV,
            target_hidden_BMD=jnp.take_along_axis(hidden_BTD, at_BM[..., None], axis=1),
            target_logz_BM=jnp.take_along_axis(jax.nn.logsumexp(z["target_logits"], axis=-1), at_BM, axis=1),
            labels_BM=rows.labels_BM,
            weights=RowWeights(
                ce_BM=coefficients["ce_loss"] * weight_BM,
                tv_BM=coefficients["l1_loss"] * weight_BM,
                kl_BM=jnp.zeros_like(weight_BM),
            ),
            chunk=7,
        )
        if rows.confidence_logits_BM is not None:
            bce = confidence_loss(rows.confidence_logits_BM, terms.accept_BM, weight_BM)
            value = value + coefficients["confidence_head"] * bce
        logits_BMV = rows.hidden_BMD @ shared.head_DV
        if rows.latent_BMR is not None:
            logits_BMV = logits_BMV + rows.latent_BMR @ rows.w2_RV
        return value, (terms, rows, logits_BMV)

    (value, parts), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(case.loaded.params)
    return value, parts, gradients


def per_slot(x_BM, name: str) -> np.ndarray:
    """[B, A G, ...] -> [B, A, G, ...]."""
    x_np = np.asarray(x_BM)
    return x_np.reshape(*case_of(name).train["target_ids"].shape, *x_np.shape[2:])


@pytest.mark.parametrize("name", CASES)
def test_training_rows(name):
    z = case_of(name).train
    _, (terms, rows, logits_BMV), _ = training(name)
    keep, supervised = z["block_keep_mask"], z["eval_mask"].astype(bool)

    np.testing.assert_array_equal(per_slot(rows.mask_BM, name), supervised)
    np.testing.assert_array_equal(per_slot(rows.labels_BM, name)[supervised], z["target_ids"][supervised])
    np.testing.assert_allclose(
        per_slot(logits_BMV, name)[keep], z["draft_logits"][keep], rtol=1e-4, atol=2e-5
    )
    np.testing.assert_allclose(
        per_slot(terms.accept_BM, name)[supervised], z["accept_rate"][supervised], atol=1e-5
    )
    assert (rows.confidence_logits_BM is None) == ("confidence_logits" not in z)
    if rows.confidence_logits_BM is not None:
        confidence = per_slot(rows.confidence_logits_BM, name)
        np.testing.assert_allclose(confidence[keep], z["confidence_logits"][keep], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient(name):
    case = case_of(name)
    value, _, gradients = training(name)
    np.testing.assert_allclose(value, case.train["loss"], rtol=1e-5)

    slots = drafter_slots(case.loaded.drafter)
    assert {key.removeprefix("grad/") for key in case.train if key.startswith("grad/")} == set(slots)
    flat = traverse_util.flatten_dict(gradients)
    for file_name, slot in slots.items():
        ours_np = np.asarray(flat[slot.path])
        theirs_np = case.train[f"grad/{file_name}"]
        difference = np.abs((ours_np.T if slot.transpose else ours_np) - theirs_np).max()
        assert difference <= 1e-4 * np.abs(theirs_np).max(), file_name


def greedy(logits_BV, _):
    """Argmax, and the one-hot law that it was drawn from."""
    ids_B = logits_BV.argmax(-1).astype(jnp.int32)
    return ids_B, jax.nn.one_hot(ids_B, logits_BV.shape[-1])


@functools.cache
def programs(name: str):
    """(prefill, round), compiled once for all prompts of a case."""
    case = case_of(name)
    drafter, shared, params = case.loaded.drafter, case.shared, case.loaded.params
    taps = drafter.config.taps

    def step(tokens_1T, start_1, cache, context):
        variables = {"params": case.target_params}
        output = Decoder(case.target).apply(variables, tokens_1T, start_B=start_1, cache=cache, taps=taps)
        context = drafter.extend_context(params, context, output.features_BTCD, start_1)
        return output.logits_BTV[0].argmax(-1), output.cache, context

    def speculate(anchor_1, position_1, cache, context):
        block = drafter.draft(params, shared, context, anchor_1, position_1, greedy)
        tokens_1T = jnp.concatenate([anchor_1[:, None], block.tokens_BG], axis=1)
        return block, *step(tokens_1T, position_1, cache, context)

    return jax.jit(step), jax.jit(speculate)


@pytest.mark.parametrize("prompt", ["prompt0", "prompt2"])
@pytest.mark.parametrize("name", CASES)
def test_greedy_decoding(name, prompt):
    """Round by round: anchors, drafts, confidences, accepted lengths, and the text of plain decoding."""
    case = case_of(name)
    trace = case.decode[f"{prompt}_th0.0"]
    prefill, speculate = programs(name)
    tokens = list(trace["prompt"])
    cache = KVCache.create(case.target.block, num_layers=case.target.num_layers, batch=1, length=LENGTH)
    context = case.loaded.drafter.create_context(batch=1, length=LENGTH)

    padded_1T = np.pad(np.asarray([tokens], np.int32), ((0, 0), (0, PROMPT_BUCKET - len(tokens))))
    choices_T, cache, context = prefill(padded_1T, jnp.zeros(1, jnp.int32), cache, context)
    tokens.append(int(choices_T[len(tokens) - 1]))
    for expected, committed in zip(trace["rounds"], trace["acceptance_lengths"], strict=True):
        position = len(tokens) - 1
        assert (position, tokens[-1]) == (expected["start"], expected["anchor"])
        block, choices_T, cache, context = speculate(
            jnp.asarray([tokens[-1]], jnp.int32), jnp.asarray([position], jnp.int32), cache, context
        )
        drafts, choices = block.tokens_BG[0].tolist(), choices_T.tolist()
        assert drafts == expected["draft"]
        if expected["conf"]:
            np.testing.assert_allclose(block.confidence_logits_BG[0], expected["conf"], rtol=1e-4, atol=1e-5)
        accepted = next((k for k, draft in enumerate(drafts) if draft != choices[k]), len(drafts))
        assert accepted + 1 == committed
        tokens += choices[: accepted + 1]

    compared = len(trace["prompt"]) + 40
    assert tokens[:compared] == trace["output"][:compared]
    assert tokens[:compared] == case.decode[f"{prompt}_target_only"]["output"][:compared]
