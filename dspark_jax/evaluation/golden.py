"""Everything that a golden directory records, against what we compute.

Fields that are not recorded are not compared; without a target, only the training batch is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dspark_jax.drafters.config import DSparkConfig, Eagle3Config
from dspark_jax.drafters.contract import Params
from dspark_jax.evaluation.golden_case import (
    EXACT,
    FORWARD_TOLERANCE,
    Comparison,
    GoldenCase,
    compare,
    compare_exactly,
    compare_gradients,
    load_case,
)
from dspark_jax.evaluation.golden_decoding import GreedyDecoder
from dspark_jax.losses import EPSILON
from dspark_jax.training.config import LossConfig
from dspark_jax.training.features import TargetFeatures
from dspark_jax.training.paper import EAGLE3_LOSS
from dspark_jax.training.state import TrainBatch
from dspark_jax.training.step import Sums, loss_sums


def verify(directory: Path) -> list[Comparison]:
    """Compares everything that a golden directory records.

    Raises:
      InputError: it cannot be read.
    """
    case = load_case(directory)
    training = CHECKS[type(case.loaded.drafter.config)](case) if case.train else ()
    return [*training, *check_decoding(case)]


def check_blocks(case: GoldenCase) -> Iterator[Comparison]:
    """A training batch of DSpark or DFlash: rows, loss terms, loss, every gradient."""
    z = case.train
    drafter, shared, params = case.loaded.drafter, case.shared, case.loaded.params
    batch, target = _batch(case)
    rows = jax.jit(drafter.training_rows)(
        params,
        shared,
        tokens_BT=batch.tokens_BT,
        loss_mask_BT=batch.loss_mask_BT,
        features_BTCD=target.features_BTCD,
        anchors_BA=batch.anchors_BA,
        keep_BA=batch.keep_BA,
    )
    logits_BMV = rows.logits(shared, dtype=jnp.float32)
    kept = np.broadcast_to(z["block_keep_mask"][..., None], z["target_ids"].shape)
    supervised = z["eval_mask"].astype(bool)
    compare = functools.partial(_rows, z)
    yield from compare("eval_mask", rows.mask_BM, np.ones_like(supervised), EXACT)
    yield from compare("target_ids", rows.labels_BM, supervised, EXACT)
    yield from compare("draft_logits", logits_BMV, kept)
    at_BM = jnp.minimum(rows.positions_BM, batch.tokens_BT.shape[1] - 1)
    target_BMV = jnp.take_along_axis(_target_logits(case), at_BM[..., None], axis=1)
    yield from compare("accept_rate", _acceptance(logits_BMV, target_BMV), supervised)
    if rows.confidence_logits_BM is not None:
        yield from compare("confidence_logits", rows.confidence_logits_BM, kept)

    config = LossConfig(
        ce=float(z["alpha_ce_loss_alpha"]),
        tv=float(z["alpha_l1_loss_alpha"]),
        confidence=float(z["alpha_confidence_head_alpha"]),
        decay_len=float(z["loss_decay_gamma"]),
        chunk=7,  # cuts the rows somewhere inside
    )
    (loss, sums), gradients = _loss_and_gradients(case, batch, target, config)
    numerators = {"ce_loss": sums.ce, "l1_loss": sums.tv, "confidence_loss": sums.bce}
    for (term, numerator), weight in zip(
        numerators.items(), ("ce_loss", "l1_loss", "confidence_head"), strict=True
    ):
        if z[f"alpha_{weight}_alpha"]:  # a term without weight is not computed by the reference
            yield from _forward(z, f"term_{term}_num", numerator)
            yield from _forward(z, f"term_{term}_den", sums.weight)
    yield from _forward(z, "loss", loss)
    yield from compare_gradients(case, gradients)


def check_chains(case: GoldenCase) -> Iterator[Comparison]:
    """A training batch of Eagle3: loss and every gradient.

    The reference starts a chain at every position, and supervises a row when the two tokens before its label
    are in the loss; we do when the label is. So the mask goes on by two positions, and the sequences get a
    place for the last label.
    """
    z = case.train
    B, T = z["input_ids"].shape
    inputs = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states")
    longer = {name: np.pad(z[name], ((0, 0), (0, 1)) + ((0, 0),) * (z[name].ndim - 2)) for name in inputs}
    longer["loss_mask"] = np.pad(z["loss_mask"][:, :-1] & z["loss_mask"][:, 1:], ((0, 0), (2, 0)))
    longer["anchor_positions"] = np.broadcast_to(np.arange(1, T), (B, T - 1))
    longer["block_keep_mask"] = np.ones((B, T - 1))
    batch, target = _batch(dataclasses.replace(case, train=longer))
    (loss, _), gradients = _loss_and_gradients(case, batch, target, EAGLE3_LOSS)
    per_token = (T + 1) / T
    yield from _forward(z, "loss", loss * per_token)
    yield from compare_gradients(case, jax.tree.map(lambda g: g * per_token, gradients))


def _batch(case: GoldenCase) -> tuple[TrainBatch, TargetFeatures]:
    z = case.train
    B, T = z["input_ids"].shape
    taps = len(case.loaded.drafter.config.taps)
    batch = TrainBatch(
        tokens_BT=jnp.asarray(z["input_ids"], jnp.int32),
        loss_mask_BT=jnp.asarray(z["loss_mask"], bool),
        anchors_BA=jnp.asarray(z["anchor_positions"], jnp.int32),
        keep_BA=jnp.asarray(z["block_keep_mask"], bool),
        target=None,
    )
    return batch, TargetFeatures(
        features_BTCD=jnp.asarray(z["target_hidden_states"]).reshape(B, T, taps, -1),
        hidden_BTD=jnp.asarray(z["target_last_hidden_states"]),
        logz_BT=jax.nn.logsumexp(_target_logits(case), axis=-1),
    )


def _target_logits(case: GoldenCase) -> Array:
    """[B, T, V], as recorded, else from the recorded hidden states."""
    if "target_logits" in case.train:
        return jnp.asarray(case.train["target_logits"])
    return case.shared.unembed(jnp.asarray(case.train["target_last_hidden_states"]), dtype=jnp.float32)


def _acceptance(logits_BMV: Array, target_BMV: Array) -> Array:
    difference = jax.nn.softmax(logits_BMV) - jax.nn.softmax(target_BMV)
    return jnp.clip(1 - 0.5 * jnp.abs(difference).sum(-1), 0, 1)


def _loss_and_gradients(
    case: GoldenCase, batch: TrainBatch, target: TargetFeatures, config: LossConfig
) -> tuple[tuple[Array, Sums], Params]:
    """The trainer's own loss of the batch, and its gradients."""
    drafter = case.loaded.drafter

    def loss(params: Params):
        numerator, sums = loss_sums(params, batch, target, case.shared, drafter=drafter, config=config)
        return numerator / (sums.denominator + EPSILON), sums

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(case.loaded.params)


def _rows(
    z: dict[str, np.ndarray],
    field: str,
    ours_BM: Array,
    where: np.ndarray,
    tolerance: float = FORWARD_TOLERANCE,
) -> Iterator[Comparison]:
    """A recorded [B, A, G, ...] against our [B, A G, ...], where it is defined."""
    if field in z:
        theirs_np, ours_np = z[field], np.asarray(ours_BM).reshape(z[field].shape)
        yield compare(field, ours_np[where], theirs_np[where], tolerance)


def _forward(z: dict[str, np.ndarray], field: str, ours: Array) -> Iterator[Comparison]:
    if field in z:
        yield compare(field, np.asarray(ours), z[field], FORWARD_TOLERANCE)


def check_decoding(case: GoldenCase) -> Iterator[Comparison]:
    """Greedy decoding, round by round: anchors, drafts, confidences, lengths, and the text."""
    if case.target is None or case.target_params is None or not case.decode:
        return
    traces = {name: trace for name, trace in case.decode.items() if not name.endswith("_target_only")}
    decoder = GreedyDecoder(
        target=case.target,
        target_params=case.target_params,
        loaded=case.loaded,
        shared=case.shared,
        prompt_bucket=max(len(trace["prompt"]) for trace in traces.values()),
        length=max(len(trace["output"]) for trace in traces.values()),
    )
    for name, trace in traces.items():
        prompt, _, threshold = name.partition("_th")
        plain = case.decode.get(f"{prompt}_target_only", trace)["output"]
        rounds = len(trace["acceptance_lengths"])
        ours = decoder.run(trace["prompt"], rounds=rounds, threshold=float(threshold or 0))
        yield compare_exactly(f"{name}/output", ours.tokens, plain)
        theirs = zip(*(trace[key] for key in ours.lengths), strict=True)
        yield compare_exactly(f"{name}/lengths", zip(*ours.lengths.values(), strict=True), theirs)
        if "rounds" not in trace:
            continue
        pairs = list(zip(ours.rounds, trace["rounds"], strict=True))
        exact = ("start", "anchor", "draft", "n")
        mine, theirs = ([[told[key] for key in exact] for told in side] for side in zip(*pairs, strict=True))
        yield compare_exactly(f"{name}/rounds", mine, theirs)
        confident = [(mine["conf"], theirs["conf"]) for mine, theirs in pairs if theirs["conf"]]
        if confident:
            ours_np, theirs_np = (np.asarray(side) for side in zip(*confident, strict=True))
            yield compare(f"{name}/confidence", ours_np, theirs_np, FORWARD_TOLERANCE)


CHECKS: dict[type, Callable[[GoldenCase], Iterator[Comparison]]] = {
    DSparkConfig: check_blocks,
    Eagle3Config: check_chains,
}
"""Configuration type -> what its train.npz is compared with."""
