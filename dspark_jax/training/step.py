"""One optimiser step: target features, block predictions, losses, gradients, update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from dspark_jax.drafters.contract import Drafter, Params, SharedWeights
from dspark_jax.losses import EPSILON, RowWeights, block_loss, confidence_loss, slot_weights
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.training.config import LossConfig, TrainConfig
from dspark_jax.training.features import (
    TargetFeatures,
    UnnormalisedFeatures,
    log_normalisers,
    target_features,
)
from dspark_jax.training.state import Frozen, TrainBatch, TrainState


@flax.struct.dataclass
class Sums:
    """Sums over rows that add up over micro-batches and devices; `metrics` divides them.

    Attributes:
      weight: sum of w.
      denominator: what the loss is divided by.
      loss: weighted numerator of the whole loss.
      ce, tv, kl, bce: weighted numerators of the terms, without their coefficients.
      rows_G: supervised rows per slot.
      accept_G: their summed acceptance probability.
      agree_G: rows whose most likely token is the target's.
      confidence_G: summed predicted acceptance.
      tau: summed expected accepted length of complete blocks.
      blocks: number of complete blocks.
      anchors: kept anchors.
      sequences: sequences.
    """

    weight: Array
    denominator: Array
    loss: Array
    ce: Array
    tv: Array
    kl: Array
    bce: Array
    rows_G: Array
    accept_G: Array
    agree_G: Array
    confidence_G: Array
    tau: Array
    blocks: Array
    anchors: Array
    sequences: Array


def loss_sums(
    params: Params,
    batch: TrainBatch,
    target: TargetFeatures,
    shared: SharedWeights,
    *,
    drafter: Drafter,
    config: LossConfig,
) -> tuple[Array, Sums]:
    """(numerator of the loss, all sums) of some sequences: not yet divided by the global denominator."""
    rows = drafter.training_rows(
        params,
        shared,
        tokens_BT=batch.tokens_BT,
        loss_mask_BT=batch.loss_mask_BT,
        features_BTCD=target.features_BTCD,
        anchors_BA=batch.anchors_BA,
        keep_BA=batch.keep_BA,
    )
    T = batch.tokens_BT.shape[1]
    at_BM = jnp.minimum(rows.positions_BM, T - 1)
    weight_BM = slot_weights(rows.mask_BM, rows.slots_BM, config.decay_len)
    labels_BM = shared.draft_ids(rows.labels_BM)
    can_say_BM = labels_BM >= 0
    loss, terms = block_loss(
        hidden_BMD=rows.hidden_BMD,
        latent_BMR=rows.latent_BMR,
        w2_RV=rows.w2_RV,
        head_DV=shared.head_DV,
        target_hidden_BMD=jnp.take_along_axis(target.hidden_BTD, at_BM[..., None], axis=1),
        target_logz_BM=jnp.take_along_axis(target.logz_BT, at_BM, axis=1),
        labels_BM=labels_BM,
        weights=RowWeights(
            ce_BM=config.ce * weight_BM * can_say_BM, tv_BM=config.tv * weight_BM, kl_BM=config.kl * weight_BM
        ),
        softcap=shared.scaling.softcap,
        chunk=config.chunk,
        dtype=drafter.dtype,
    )
    confidence_BM, bce = jnp.zeros(weight_BM.shape), jnp.zeros(())
    if rows.confidence_logits_BM is not None:
        confidence_BM = jax.nn.sigmoid(rows.confidence_logits_BM)
        bce = confidence_loss(rows.confidence_logits_BM, terms.accept_BM, weight_BM)
    loss = loss + config.confidence * bce

    B, M = rows.mask_BM.shape
    G = drafter.config.block_len
    in_slot_GBM = rows.mask_BM & (rows.slots_BM == jnp.arange(G)[:, None, None])

    def per_slot(x_BM: Array) -> Array:
        return jnp.where(in_slot_GBM, x_BM, 0.0).sum((1, 2))

    complete_BA = rows.mask_BM.reshape(B, -1, G).all(-1)
    tau_BA = 1 + jnp.cumprod(terms.accept_BM.reshape(B, -1, G), axis=-1).sum(-1)
    return loss, Sums(
        weight=weight_BM.sum(),
        denominator=config.normaliser.denominator(weight_BM.sum(), jnp.full((), float(B * T))),
        loss=loss,
        ce=(weight_BM * terms.ce_BM).sum(),
        tv=(weight_BM * terms.tv_BM).sum(),
        kl=(weight_BM * terms.kl_BM).sum(),
        bce=bce,
        rows_G=per_slot(jnp.ones((B, M))),
        accept_G=per_slot(terms.accept_BM),
        agree_G=per_slot(terms.agree_BM),
        confidence_G=per_slot(confidence_BM),
        tau=jnp.where(complete_BA, tau_BA, 0.0).sum(),
        blocks=complete_BA.sum(dtype=jnp.float32),
        anchors=batch.keep_BA.sum(dtype=jnp.float32),
        sequences=jnp.full((), float(B)),
    )


def metrics(sums: Sums) -> dict[str, Array]:
    """Sums -> what is logged; scalars and per-slot vectors [G]."""
    weight, rows_G = sums.weight + EPSILON, jnp.maximum(sums.rows_G, 1.0)
    return {
        "loss": sums.loss / (sums.denominator + EPSILON),
        "ce": sums.ce / weight,
        "tv": sums.tv / weight,
        "kl": sums.kl / weight,
        "bce": sums.bce / weight,
        "expected_tau": sums.tau / jnp.maximum(sums.blocks, 1.0),
        "accept_G": sums.accept_G / rows_G,
        "agree_G": sums.agree_G / rows_G,
        "confidence_bias_G": (sums.confidence_G - sums.accept_G) / rows_G,
        "rows": sums.rows_G.sum(),
        "anchors_per_sequence": sums.anchors / sums.sequences,
    }


def train_step(
    state: TrainState,
    batch: TrainBatch,
    frozen: Frozen,
    *,
    drafter: Drafter,
    optimizer: optax.GradientTransformation,
    target: DecoderConfig,
    loss: LossConfig,
    microbatches: int = 1,
) -> tuple[TrainState, dict[str, Any]]:
    """One step. The loss of a batch does not depend on how it is divided: numerators and gradients of all
    micro-batches are added, and divided once by the global denominator.
    """

    def gradients_of(part: TrainBatch):
        features = part.target
        if features is None:
            if frozen.target_params is None:
                raise ValueError("a batch without features needs the target's parameters")
            features = target_features(
                frozen.target_params,
                part.tokens_BT,
                config=target,
                taps=drafter.config.taps,
                dtype=drafter.dtype,
            )
        elif isinstance(features, UnnormalisedFeatures):
            assert frozen.target_params is not None
            logz_BT = log_normalisers(
                frozen.target_params, features.hidden_BTD, config=target, dtype=drafter.dtype
            )
            features = TargetFeatures(features.features_BTCD, features.hidden_BTD, logz_BT)
        function = functools.partial(loss_sums, drafter=drafter, config=loss)
        (_, sums), gradients = jax.value_and_grad(function, has_aux=True)(
            state.params, part, features, frozen.shared
        )
        return gradients, sums

    if microbatches == 1:
        gradients, sums = gradients_of(batch)
    else:
        # Strided parts keep every micro-batch spread over all devices.
        parts = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradients_of, _first(parts))
        )

        def add(total, part):
            return jax.tree.map(jnp.add, total, gradients_of(part)), None

        (gradients, sums), _ = jax.lax.scan(add, zeros, parts)

    gradients = jax.tree.map(lambda g: g / (sums.denominator + EPSILON), gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    new_state = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
    return new_state, {**metrics(sums), "gradient_norm": optax.tree.norm(gradients)}


def bind_step(
    config: TrainConfig, *, drafter: Drafter, optimizer: optax.GradientTransformation, target: DecoderConfig
) -> Callable[[TrainState, TrainBatch, Frozen], tuple[TrainState, dict[str, Any]]]:
    """The step of one run, a function of arrays alone."""
    return functools.partial(
        train_step,
        drafter=drafter,
        optimizer=optimizer,
        target=target,
        loss=config.loss,
        microbatches=config.microbatches,
    )


def _first(parts: TrainBatch) -> TrainBatch:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
