"""The training losses, in one pass over the logits and without keeping them (spec section 5).

A training step has [anchors, G, V] logits, in float32 several times: far more than everything else. Every
term here is linear in per-row weights that are known before the logits are, so its gradient can be taken
while a chunk of logits is at hand. `block_loss` walks over chunks of rows, adds up the loss AND the
gradients, and forgets the logits; the backward pass only multiplies by the incoming cotangent.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

EPSILON = 1e-6


@flax.struct.dataclass
class RowWeights:
    """What each row's terms count for; zero where a row is not supervised.

    Attributes:
      ce_BM: weight of -log q(label); zero where the drafter cannot propose the label.
      tv_BM: weight of ||q - p||_1.
      kl_BM: weight of the cross-entropy to the target's whole distribution, -sum p log q.
    """

    ce_BM: Array
    tv_BM: Array
    kl_BM: Array


@flax.struct.dataclass
class RowTerms:
    """Per-row values; constants, no gradient flows through them.

    Attributes:
      ce_BM: -log q(label).
      tv_BM: ||q - p||_1, the target's mass outside the draft vocabulary included.
      kl_BM: -sum p log q over the draft vocabulary.
      accept_BM: sum min(p, q) = 1 - tv / 2: the chance that rejection sampling accepts (c*).
      agree_BM: 1.0 where q and p have the same most likely draft token.
    """

    ce_BM: Array
    tv_BM: Array
    kl_BM: Array
    accept_BM: Array
    agree_BM: Array


def _chunk_terms(
    logits_V: Array, target_logits_V: Array, logz: Array, labels: Array
) -> tuple[RowTerms, Array, Array]:
    """(terms, log q, p) for rows [..., V]; labels are draft ids, -1 for none."""
    log_q = jax.nn.log_softmax(logits_V, axis=-1)
    q, p = jnp.exp(log_q), jnp.exp(target_logits_V - logz[..., None])
    outside = jnp.maximum(1.0 - p.sum(-1), 0.0)
    tv = jnp.abs(q - p).sum(-1) + outside
    picked = jnp.take_along_axis(log_q, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    agree = logits_V.argmax(-1) == target_logits_V.argmax(-1)
    terms = RowTerms(
        ce_BM=jnp.where(labels >= 0, -picked, 0.0),
        tv_BM=tv,
        kl_BM=-(p * log_q).sum(-1),
        accept_BM=jnp.clip(1.0 - 0.5 * tv, 0.0, 1.0),
        agree_BM=agree.astype(jnp.float32),
    )
    return terms, log_q, p


def _chunk_gradient(weights: RowWeights, log_q: Array, p: Array, labels: Array) -> Array:
    """d(weighted loss)/d(draft logits) of rows [..., V]."""
    q = jnp.exp(log_q)
    sign = jnp.sign(q - p)
    tv = q * (sign - (q * sign).sum(-1, keepdims=True))
    kl = q * p.sum(-1, keepdims=True) - p
    ce = q - (jnp.arange(q.shape[-1]) == labels[..., None])
    ce_weight = jnp.where(labels >= 0, weights.ce_BM, 0.0)
    return weights.tv_BM[..., None] * tv + weights.kl_BM[..., None] * kl + ce_weight[..., None] * ce


def _soft_capped(logits: Array, cap: float | None) -> tuple[Array, Array | float]:
    """(cap tanh(logits / cap), its derivative), or the logits themselves and 1."""
    if cap is None:
        return logits, 1.0
    share = jnp.tanh(logits / cap)
    return cap * share, 1.0 - share * share


def _loss_and_gradients(
    softcap, chunk, dtype, hidden_BMD, latent_BMR, w2_RV, head_DV, target_BMD, logz_BM, labels_BM, weights
):
    """One pass: (loss, terms) and the gradients of hidden, latent and W2."""
    B, M, _ = hidden_BMD.shape
    chunk = min(chunk, M)
    padding = -M % chunk

    def chunked(x):  # [B, M, ...] -> [M / chunk, B, chunk, ...]; padded rows have weight zero
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)

    def matmul(equation, a, b):
        return jnp.einsum(equation, a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)

    def step(carry, rows):
        loss, grad_w2 = carry
        hidden, latent, target, logz, labels, weight = rows
        logits, slope = _soft_capped(matmul("bmd,dv->bmv", hidden, head_DV), softcap)
        target_logits, _ = _soft_capped(matmul("bmd,dv->bmv", target, head_DV), softcap)
        if latent is not None:
            logits = logits + matmul("bmr,rv->bmv", latent, w2_RV)
        terms, log_q, p = _chunk_terms(logits, target_logits, logz, labels)
        loss += (weight.ce_BM * terms.ce_BM + weight.tv_BM * terms.tv_BM + weight.kl_BM * terms.kl_BM).sum()
        gradient = _chunk_gradient(weight, log_q, p, labels)
        grad_latent = None
        if latent is not None:
            grad_latent = matmul("bmv,rv->bmr", gradient, w2_RV)
            grad_w2 = grad_w2 + matmul("bmr,bmv->rv", latent, gradient)
        return (loss, grad_w2), (terms, matmul("bmv,dv->bmd", gradient * slope, head_DV), grad_latent)

    rows = jax.tree.map(chunked, (hidden_BMD, latent_BMR, target_BMD, logz_BM, labels_BM, weights))
    start = (jnp.zeros(()), None if w2_RV is None else jnp.zeros(w2_RV.shape))
    (loss, grad_w2), per_row = jax.lax.scan(step, start, rows)
    terms, grad_hidden, grad_latent = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(B, M + padding, *x.shape[3:])[:, :M], per_row
    )
    return (loss, terms), (grad_hidden, grad_latent, grad_w2)


def _value(softcap, chunk, dtype, *arrays) -> tuple[Array, RowTerms]:
    return _loss_and_gradients(softcap, chunk, dtype, *arrays)[0]


def _forward(softcap, chunk, dtype, *arrays):
    return _loss_and_gradients(softcap, chunk, dtype, *arrays)


def _backward(softcap, chunk, dtype, gradients, cotangents):
    (grad_hidden, grad_latent, grad_w2), (loss_cotangent, _) = gradients, cotangents
    trained = (None if g is None else g * loss_cotangent for g in (grad_hidden, grad_latent, grad_w2))
    return (*trained, None, None, None, None, None)


_block_loss = jax.custom_vjp(_value, nondiff_argnums=(0, 1, 2))
_block_loss.defvjp(_forward, _backward)


def block_loss(
    *,
    hidden_BMD: Array,
    latent_BMR: Array | None,
    w2_RV: Array | None,
    head_DV: Array,
    target_hidden_BMD: Array,
    target_logz_BM: Array,
    labels_BM: Array,
    weights: RowWeights,
    softcap: float | None = None,
    chunk: int = 128,
    dtype=jnp.float32,
) -> tuple[Array, RowTerms]:
    """Weighted sum of CE, TV and soft CE over rows, never holding more than one chunk of logits.

    Draft logits are `cap(hidden head) + latent w2`; the target's are `cap(target_hidden head)`, normalised by
    `target_logz`. With a `softcap` c, cap(x) = c tanh(x / c); else nothing is capped. Gradients flow to
    hidden, latent and w2. The head is frozen, and so is everything of the target.

    Args:
      hidden_BMD: the drafter's final hidden states, M rows per sequence.
      latent_BMR: sequential-head latents, or None.
      w2_RV: sequential-head projection, or None.
      head_DV: the target's LM head cut to the draft vocabulary.
      target_hidden_BMD: the target's final-normed hidden state at each row's position.
      target_logz_BM: log-sum-exp of the target's logits over its FULL vocabulary.
      labels_BM: draft ids of the true tokens; -1 where the drafter cannot propose it.
      weights: per-row weights, denominators included.
      softcap: the target's soft cap on logits, or None.
      chunk: rows per sequence whose logits exist at the same time.
      dtype: dtype in which matrix products read their inputs.

    Returns:
      (scalar loss, per-row terms without gradient).

    Differs from the reference: that one builds all logits at once, several times.
    """
    loss, terms = _block_loss(
        softcap,
        chunk,
        dtype,
        hidden_BMD,
        latent_BMR,
        w2_RV,
        head_DV,
        target_hidden_BMD,
        target_logz_BM,
        labels_BM,
        weights,
    )
    return loss, jax.lax.stop_gradient(terms)


def confidence_loss(logits_BM: Array, accept_BM: Array, weights_BM: Array) -> Array:
    """Weighted sum of the binary cross-entropy between sigmoid(logits) and the (constant) acceptance c*."""
    target = jax.lax.stop_gradient(accept_BM)
    bce = jnp.maximum(logits_BM, 0) - logits_BM * target + jnp.log1p(jnp.exp(-jnp.abs(logits_BM)))
    return (weights_BM * bce).sum()


def slot_weights(mask_BM: Array, slots_BM: Array, decay_len: float) -> Array:
    """w_k = exp(-k / decay_len) on supervised rows, 0 elsewhere."""
    return jnp.where(mask_BM, jnp.exp(-slots_BM / decay_len), 0.0)
