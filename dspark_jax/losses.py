"""The training losses, in one pass over the logits and without keeping them (spec section 5).

A training step has [anchors, G, V] logits, in float32 several times: far more than everything else. Every
term here is linear in per-row weights that are known before the logits are, so its gradient can be taken
while a chunk of logits is at hand. `block_loss` walks over chunks of rows, adds up the loss AND the
gradients, and forgets the logits; the backward pass only multiplies by the incoming cotangent.

On a mesh every device has one part of the vocabulary: what it passes on is a few numbers per row and a
gradient of width D, never logits or the LM head.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dspark_jax.core.sharding import axes_size, by_device, divided_over, mesh_axes

MASKED = -1e30
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


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """Reductions over a vocabulary of which this device has one part of equal parts.

    Attributes:
      size: V; what is behind it in the last parts is padding, and has no chance of anything.
      axes: mesh axes that divide it; none if it is whole.
    """

    size: int
    axes: tuple[str, ...]

    def ids(self, width: int) -> Array:
        """Ids [width] of this device's part."""
        first = jax.lax.axis_index(self.axes) * width if self.axes else 0
        return first + jnp.arange(width)

    def unpadded(self, logits: Array) -> Array:
        """Logits [..., part] with -1e30 on the padding."""
        width = logits.shape[-1]
        if width * axes_size(self.axes) == self.size:
            return logits
        return jnp.where(self.ids(width) < self.size, logits, MASKED)

    def sum(self, parts: Any) -> Any:
        return jax.lax.psum(parts, self.axes) if self.axes else parts

    def max(self, part: Array) -> Array:
        return jax.lax.pmax(part, self.axes) if self.axes else part

    def argmax(self, logits: Array) -> tuple[Array, Array]:
        """(largest logit, its id) over the last axis; of equal ones the first."""
        top = self.max(logits.max(-1))
        # `jnp.argmax` would write an array of indices as large as the logits on a CPU.
        first = jnp.where(logits == top[..., None], self.ids(logits.shape[-1]), self.size).min(-1)
        return top, jax.lax.pmin(first, self.axes) if self.axes else first

    def log_mass(self, logits: Array, top: Array) -> Array:
        """log sum exp over the last axis, whose largest logit is `top`."""
        return top + jnp.log(self.sum(jnp.exp(logits - top[..., None]).sum(-1)))


def _chunk_terms(
    vocabulary: _Vocabulary,
    logits_V: Array,
    target_logits_V: Array,
    logz: Array | None,
    labels: Array,
    weights: RowWeights,
) -> tuple[RowTerms, Array]:
    """(terms, d(weighted loss)/d(draft logits)) of rows [..., V]; labels are draft ids, -1 for none."""
    top, best = vocabulary.argmax(logits_V)
    target_top, target_best = vocabulary.argmax(target_logits_V)
    if logz is None:
        logz = vocabulary.log_mass(target_logits_V, target_top)
    log_q = logits_V - vocabulary.log_mass(logits_V, top)[..., None]
    q, p = jnp.exp(log_q), jnp.exp(target_logits_V - logz[..., None])
    sign = jnp.sign(q - p)
    is_label = vocabulary.ids(q.shape[-1]) == labels[..., None]
    inside, distance, kl, ce, q_sign = vocabulary.sum(
        tuple(x.sum(-1) for x in (p, jnp.abs(q - p), -p * log_q, jnp.where(is_label, -log_q, 0.0), q * sign))
    )
    tv = distance + jnp.maximum(1.0 - inside, 0.0)
    terms = RowTerms(
        ce_BM=ce,
        tv_BM=tv,
        kl_BM=kl,
        accept_BM=jnp.clip(1.0 - 0.5 * tv, 0.0, 1.0),
        agree_BM=(best == target_best).astype(jnp.float32),
    )
    ce_weight = jnp.where(labels >= 0, weights.ce_BM, 0.0)
    gradient = (
        weights.tv_BM[..., None] * q * (sign - q_sign[..., None])
        + weights.kl_BM[..., None] * (q * inside[..., None] - p)
        + ce_weight[..., None] * (q - is_label)
    )
    return terms, gradient


def _soft_capped(logits: Array, cap: float | None) -> tuple[Array, Array | float]:
    """(cap tanh(logits / cap), its derivative), or the logits themselves and 1."""
    if cap is None:
        return logits, 1.0
    share = jnp.tanh(logits / cap)
    return cap * share, 1.0 - share * share


def _one_pass(
    softcap,
    chunk,
    dtype,
    vocabulary,
    batch_axes,
    hidden_BMD,
    latent_BMR,
    w2_RV,
    head_DV,
    target_BMD,
    logz_BM,
    labels_BM,
    weights,
):
    """(loss, terms) and the gradients of hidden, latent and W2, from one device's rows and its vocabulary."""
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
        logits, target_logits = vocabulary.unpadded(logits), vocabulary.unpadded(target_logits)
        terms, gradient = _chunk_terms(vocabulary, logits, target_logits, logz, labels, weight)
        loss += (weight.ce_BM * terms.ce_BM + weight.tv_BM * terms.tv_BM + weight.kl_BM * terms.kl_BM).sum()
        grad_latent = None
        if latent is not None:
            grad_latent = matmul("bmv,rv->bmr", gradient, w2_RV)
            grad_w2 = grad_w2 + matmul("bmr,bmv->rv", latent, gradient)
        grad_hidden = matmul("bmv,dv->bmd", gradient * slope, head_DV)
        return (loss, grad_w2), (terms, *vocabulary.sum((grad_hidden, grad_latent)))

    rows = jax.tree.map(chunked, (hidden_BMD, latent_BMR, target_BMD, logz_BM, labels_BM, weights))
    start = (jnp.zeros(()), None if w2_RV is None else jnp.zeros(w2_RV.shape))
    totals, per_row = jax.lax.scan(step, start, rows)
    loss, grad_w2 = jax.lax.psum(totals, batch_axes) if batch_axes else totals
    terms, grad_hidden, grad_latent = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(B, M + padding, *x.shape[3:])[:, :M], per_row
    )
    return (loss, terms), (grad_hidden, grad_latent, grad_w2)


def _loss_and_gradients(softcap, chunk, dtype, *arrays):
    """`_one_pass` on every device's sequences and part of the vocabulary."""
    hidden_BMD, latent_BMR, w2_RV, head_DV, *others = arrays
    V = head_DV.shape[1]
    batch_axes, axes = divided_over("batch", len(hidden_BMD)), mesh_axes("vocab")
    padding = ((0, 0), (0, -V % axes_size(axes)))
    w2_RV, head_DV = jax.tree.map(lambda x: jnp.pad(x, padding), (w2_RV, head_DV))
    rows, words = PartitionSpec(batch_axes or None), PartitionSpec(None, axes or None)
    one_pass = functools.partial(_one_pass, softcap, chunk, dtype, _Vocabulary(V, axes), batch_axes)
    result, (grad_hidden, grad_latent, grad_w2) = by_device(
        one_pass,
        (rows, rows, words, words, rows, rows, rows, rows),
        ((PartitionSpec(), rows), (rows, rows, words)),
    )(hidden_BMD, latent_BMR, w2_RV, head_DV, *others)
    return result, (grad_hidden, grad_latent, None if grad_w2 is None else grad_w2[:, :V])


def _value(softcap, chunk, dtype, *arrays) -> tuple[Array, RowTerms]:
    return _loss_and_gradients(softcap, chunk, dtype, *arrays)[0]


def _backward(softcap, chunk, dtype, gradients, cotangents):
    (grad_hidden, grad_latent, grad_w2), (loss_cotangent, _) = gradients, cotangents
    trained = (None if g is None else g * loss_cotangent for g in (grad_hidden, grad_latent, grad_w2))
    return (*trained, None, None, None, None, None)


_block_loss = jax.custom_vjp(_value, nondiff_argnums=(0, 1, 2))
_block_loss.defvjp(_loss_and_gradients, _backward)


def block_loss(
    *,
    hidden_BMD: Array,
    latent_BMR: Array | None,
    w2_RV: Array | None,
    head_DV: Array,
    target_hidden_BMD: Array,
    target_logz_BM: Array | None,
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
      target_logz_BM: log-sum-exp of the target's logits over its FULL vocabulary; None where the head has all
        of it, and this is what it says.
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
