"""Verification of a drafted block by rejection sampling: the committed tokens follow the target's law.

A draft token x ~ q is kept with probability min(1, p(x) / q(x)); the first one that is not is replaced by a
draw from normalise(max(p - q, 0)), and a block that is kept whole is followed by a draw from the target's
next row (Leviathan et al. 2023; DSpark section 2). A bonus is the replacement with q = 0, so one draw over
the vocabulary per request serves both.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from dspark_jax.core.errors import InputError
from dspark_jax.speculation.sampling import sample


@flax.struct.dataclass(kw_only=True)
class Verified:
    """What one round commits for each request."""

    tokens_BT: Array
    """int32 [B, G+1], target ids: the accepted drafts, the target's own token, then -1."""
    accepted_B: Array
    """int32 [B]: draft tokens accepted, at most the verified length."""
    anchor_B: Array
    """int32 [B]: the target's own token, the last one committed and the next round's anchor."""

    @property
    def num_committed_B(self) -> Array:
        """int32 [B]: tokens committed, the target's own token included."""
        return self.accepted_B + 1


def acceptance_probability(p: Array, q: Array) -> Array:
    """min(1, p / q), elementwise, for a token of target probability `p` drawn with probability `q`.

    Where q is 0 the token cannot have been drawn; the value is then the limit: 1, or 0 if p is 0 too.
    """
    ratio = p / jnp.where(q > 0, q, 1.0)
    return jnp.where(q > 0, jnp.minimum(ratio, 1.0), jnp.where(p > 0, 1.0, 0.0))


def residual(p: Array, q: Array) -> Array:
    """normalise(max(p - q, 0)) over the last axis: the law of the token after a rejection.

    Where p and q agree so well that rounding leaves nothing, a rejection has probability 0 up to rounding
    and the value is p itself, never NaN.

    Args:
      p: target probabilities [..., V].
      q: draft probabilities [..., V] in the target's vocabulary.
    """
    excess = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(excess, axis=-1, keepdims=True)
    return jnp.where(mass > 0, excess / jnp.where(mass > 0, mass, 1.0), p)


def slot_uniforms(keys_B: Array, num_slots: int) -> Array:
    """Independent uniforms in [0, 1) of shape [B, num_slots], one per draft slot.

    Sharing one uniform between the slots of a block would bias the second token: given that the first was
    accepted the shared value is small, and the second is accepted too often.
    """
    return jax.vmap(lambda key: jax.random.uniform(key, (num_slots,), jnp.float32))(keys_B)


def verify_block(
    target_probs_BTV: Array,
    draft_probs_BGV: Array,
    draft_ids_BG: Array,
    draft_to_target_V: Array | None,
    verify_len_B: Array,
    accept_keys_B: Array,
    target_keys_B: Array,
) -> Verified:
    """Accepts a prefix of each drafted block and adds the target's own token.

    Slots at or beyond `verify_len_B`, and target rows beyond it, may hold anything, NaN included. The result
    of a request depends neither on the other requests nor on the bucket Lv.

    Args:
      target_probs_BTV: [B, Lv+1, V], row k the target's law after k draft tokens; Lv, 0 <= Lv <= G, is the
        bucket of verified lengths that this step was compiled for.
      draft_probs_BGV: [B, G, Vd], the law that each draft token was really drawn from.
      draft_ids_BG: int32 [B, G], ids in the draft vocabulary.
      draft_to_target_V: int32 [Vd], the target id of each draft id, all different; None if they are the same.
      verify_len_B: int32 [B], draft tokens to verify; more than Lv counts as Lv.
      accept_keys_B: keys [B] of the acceptance tests.
      target_keys_B: keys [B] of the target's own token.
    """
    _, rows, vocabulary = target_probs_BTV.shape
    block_len, num_verified = draft_ids_BG.shape[1], rows - 1
    if num_verified > block_len:
        raise InputError(
            given=f"{rows} target rows for blocks of {block_len} draft tokens",
            expected=f"between 1 and {block_len + 1} rows",
            fix="verify at most the whole block: the bucket of verified lengths must not exceed block_len",
        )
    ids_BG = draft_ids_BG if draft_to_target_V is None else draft_to_target_V[draft_ids_BG]
    verify_len_B = jnp.minimum(verify_len_B, num_verified)

    p_BG = _probability_of(target_probs_BTV[:, :num_verified], ids_BG[:, :num_verified])
    q_BG = _probability_of(draft_probs_BGV[:, :num_verified], draft_ids_BG[:, :num_verified])
    uniforms_BG = slot_uniforms(accept_keys_B, block_len)
    accepted_B = accepted_prefix(p_BG, q_BG, uniforms_BG[:, :num_verified], verify_len_B)

    p_BV = _row(target_probs_BTV, accepted_B)
    if num_verified == 0:
        q_BV = jnp.zeros_like(p_BV)
    else:
        q_BV = rejected_law(
            _row(draft_probs_BGV, accepted_B), accepted_B < verify_len_B, draft_to_target_V, vocabulary
        )
    anchor_B = sample(target_keys_B, residual(p_BV, q_BV))
    return committed(ids_BG, accepted_B, anchor_B)


def accepted_prefix(p_BG: Array, q_BG: Array, uniforms_BG: Array, verify_len_B: Array) -> Array:
    """How many draft tokens stay, int32 [B]: those before the first that is rejected or not verified.

    Args:
      p_BG: the target's probability of every draft token.
      q_BG: the drafter's.
      uniforms_BG: one `slot_uniforms` for every token.
      verify_len_B: tokens to verify.
    """
    verified_BG = jnp.arange(p_BG.shape[1]) < verify_len_B[:, None]
    kept_BG = verified_BG & (uniforms_BG < acceptance_probability(p_BG, q_BG))
    return jnp.sum(jnp.cumprod(kept_BG.astype(jnp.int32), axis=1), axis=1)


def rejected_law(q_BV: Array, rejected_B: Array, draft_to_target_V: Array | None, vocabulary: int) -> Array:
    """The law of the draft token that was rejected, over the target's vocabulary; zeros where none was."""
    q_BV = jnp.where(rejected_B[:, None], q_BV, 0.0)
    if draft_to_target_V is None:
        return q_BV
    return jnp.zeros((len(q_BV), vocabulary), q_BV.dtype).at[:, draft_to_target_V].set(q_BV)


def committed(ids_BG: Array, accepted_B: Array, anchor_B: Array) -> Verified:
    """What a round commits: this many of the draft tokens (target ids), then the target's own."""
    slots_T = jnp.arange(ids_BG.shape[1] + 1)
    drafts_BT = jnp.pad(ids_BG, ((0, 0), (0, 1)))
    tokens_BT = jnp.where(slots_T < accepted_B[:, None], drafts_BT, -1)
    tokens_BT = jnp.where(slots_T == accepted_B[:, None], anchor_B[:, None], tokens_BT)
    return Verified(tokens_BT=tokens_BT.astype(jnp.int32), accepted_B=accepted_B, anchor_B=anchor_B)


def _probability_of(probs_BGV: Array, ids_BG: Array) -> Array:
    """The probability [B, G] of each slot's own token."""
    return jnp.take_along_axis(probs_BGV, ids_BG[..., None], axis=-1)[..., 0]


def _row(probs_BTV: Array, index_B: Array) -> Array:
    """Row `index_B` of each request, [B, V]; past the end the last row, which the caller then ignores."""
    return jnp.take_along_axis(probs_BTV, index_B[:, None, None], axis=1, mode="clip")[:, 0]
