"""One optimiser step: target features, block predictions, losses, gradients, update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dspark_jax.core.sharding import on_mesh
from dspark_jax.drafters.blocks import make_blocks
from dspark_jax.drafters.contract import Drafter, Params, SharedWeights
from dspark_jax.losses import EPSILON, RowWeights, block_loss, confidence_loss, slot_weights
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.training.config import LossConfig, TrainConfig
from dspark_jax.training.features import (
    TargetFeatures,
    UnnormalisedFeatures,
    hidden_features,
    log_normalisers,
    strided_parts,
)
from dspark_jax.training.state import Frozen, TrainBatch, TrainState

Normalise = Callable[[Array], Array]
"""The target's hidden states [B, M, D] -> log-sum-exp of its logits over the whole vocabulary [B, M]."""


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
    target: TargetFeatures | UnnormalisedFeatures,
    shared: SharedWeights,
    *,
    drafter: Drafter,
    config: LossConfig,
    normalise: Normalise | None = None,
) -> tuple[Array, Sums]:
    """(numerator of the loss, all sums) of some sequences: not yet divided by the global denominator."""
    context = _context(params, batch, target, shared, drafter)
    return _block_sums(
        params, context, batch, target, shared, drafter=drafter, config=config, normalise=normalise
    )


def gradient_sums(
    params: Params,
    batch: TrainBatch,
    target: TargetFeatures | UnnormalisedFeatures,
    shared: SharedWeights,
    *,
    drafter: Drafter,
    config: LossConfig,
    normalise: Normalise | None = None,
) -> tuple[Params, Sums]:
    """(gradient of the numerator, all sums): `loss_sums`, `config.block_chunk` blocks per sequence at a time.

    The context of the sequences is made once. Then every part of the blocks adds its gradients of the
    parameters and of the context, and is forgotten: what a step holds does not grow with its blocks.
    """
    context, pull_back = jax.vjp(lambda params: _context(params, batch, target, shared, drafter), params)

    def of_blocks(anchors: tuple[Array, Array]):
        part = dataclasses.replace(batch, anchors_BA=anchors[0], keep_BA=anchors[1])
        function = functools.partial(_block_sums, drafter=drafter, config=config, normalise=normalise)
        (_, sums), gradients = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)(
            params, context, part, target, shared
        )
        return gradients, sums

    A = batch.anchors_BA.shape[1]
    size = min(config.block_chunk, A)

    def parts(x_BA: Array) -> Array:  # -> [parts, B, size]; what fills the last one is not kept
        x_BA = jnp.pad(x_BA, ((0, 0), (0, -A % size)))
        return x_BA.reshape(len(x_BA), -1, size).swapaxes(0, 1)

    (gradients, context_gradients), sums = _added_up(
        of_blocks, (parts(batch.anchors_BA), parts(batch.keep_BA))
    )
    cotangents = jax.tree.map(lambda g, x: g.astype(x.dtype), context_gradients, context)
    (through_context,) = pull_back(cotangents)
    B, T = batch.tokens_BT.shape
    denominator = config.normaliser.denominator(sums.weight, jnp.full((), float(B * T)))
    sums = dataclasses.replace(sums, denominator=denominator, sequences=jnp.full((), float(B)))
    return jax.tree.map(jnp.add, gradients, through_context), sums


def _added_up(function: Callable[[Any], Any], parts: Any) -> Any:
    """The sum of the function's results, in float32, over parts that lie along the first axis."""
    first = jax.tree.map(lambda x: x[0], parts)
    if len(jax.tree.leaves(parts)[0]) == 1:
        return function(first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(function, first))

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(part)), None

    return jax.lax.scan(add, zeros, parts)[0]


def _context(params: Params, batch: TrainBatch, target, shared: SharedWeights, drafter: Drafter) -> Any:
    return drafter.training_context(
        params,
        shared,
        tokens_BT=batch.tokens_BT,
        starts_BT=batch.starts,
        features_BTCD=target.features_BTCD,
    )


def _block_sums(
    params: Params,
    context: Any,
    batch: TrainBatch,
    target: TargetFeatures | UnnormalisedFeatures,
    shared: SharedWeights,
    *,
    drafter: Drafter,
    config: LossConfig,
    normalise: Normalise | None,
) -> tuple[Array, Sums]:
    """(numerator of the loss, all sums) of the blocks of a batch."""
    blocks = make_blocks(
        tokens_BT=batch.tokens_BT,
        loss_mask_BT=batch.loss_mask_BT,
        starts_BT=batch.starts,
        anchors_BA=batch.anchors_BA,
        keep_BA=batch.keep_BA,
        block_len=drafter.config.block_len,
    )
    rows = drafter.block_rows(params, shared, context, blocks)
    T = batch.tokens_BT.shape[1]
    at_BM = jnp.minimum(rows.positions_BM, T - 1)
    weight_BM = slot_weights(rows.mask_BM, rows.slots_BM, config.decay_len)
    labels_BM = shared.draft_ids(rows.labels_BM)
    can_say_BM = labels_BM >= 0
    target_hidden_BMD = jnp.take_along_axis(target.hidden_BTD, at_BM[..., None], axis=1)
    if isinstance(target, TargetFeatures):
        logz_BM = jnp.take_along_axis(target.logz_BT, at_BM, axis=1)
    elif shared.draft_to_target_V is None:
        logz_BM = None  # the loss sees all logits of these rows in any case
    else:
        assert normalise is not None, "a reduced vocabulary does not tell the target's normaliser"
        logz_BM = normalise(target_hidden_BMD)
    loss, terms = block_loss(
        hidden_BMD=rows.hidden_BMD,
        latent_BMR=rows.latent_BMR,
        w2_RV=rows.w2_RV,
        head_DV=shared.head_DV,
        target_hidden_BMD=target_hidden_BMD,
        target_logz_BM=logz_BM,
        labels_BM=labels_BM,
        weights=RowWeights(
            ce_BM=config.ce * weight_BM * can_say_BM, tv_BM=config.tv * weight_BM, kl_BM=config.kl * weight_BM
        ),
        softcap=shared.scaling.softcap,
        chunk=config.chunk,
        dtype=config.dtype or drafter.dtype,
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
    target_parts: int = 1,
    target_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """One step. The loss of a batch does not depend on how it is divided: numerators and gradients of all
    micro-batches are added, and divided once by the global denominator.
    """
    target_dtype = target_dtype or drafter.dtype

    def gradients_of(part: TrainBatch) -> tuple[Params, Sums]:
        features = part.target
        if features is None:
            if frozen.target_params is None:
                raise ValueError("a batch without features needs the target's parameters")
            features = hidden_features(
                frozen.target_params,
                part.tokens_BT,
                part.starts_BT,
                config=target,
                taps=drafter.config.taps,
                dtype=target_dtype,
                parts=target_parts,
            )
        normalise = None
        if frozen.target_params is not None:
            normalise = functools.partial(
                log_normalisers, frozen.target_params, config=target, dtype=target_dtype
            )
        return gradient_sums(
            state.params, part, features, frozen.shared, drafter=drafter, config=loss, normalise=normalise
        )

    with on_mesh(mesh):
        parts = jax.tree.map(lambda x: strided_parts(x, microbatches), batch)
        gradients, sums = _added_up(gradients_of, parts)
    gradients = jax.tree.map(lambda g: g / (sums.denominator + EPSILON), gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    new_state = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
    return new_state, {**metrics(sums), "gradient_norm": optax.tree.norm(gradients)}


def bind_step(
    config: TrainConfig,
    *,
    drafter: Drafter,
    optimizer: optax.GradientTransformation,
    target: DecoderConfig,
    mesh: Mesh | None = None,
) -> Callable[[TrainState, TrainBatch, Frozen], tuple[TrainState, dict[str, Any]]]:
    """The step of one run, a function of arrays alone; on several devices it must know their mesh."""
    return functools.partial(
        train_step,
        drafter=drafter,
        optimizer=optimizer,
        target=target,
        loss=config.loss,
        microbatches=config.microbatches,
        target_parts=config.target_parts,
        target_dtype=config.target_dtype,
        mesh=mesh,
    )
