"""From logits to the probabilities that tokens are really drawn from, and the draw itself.

Target and drafter must both pass through `distribution` with the same parameters: rejection sampling is
lossless only for the q that a draft token was really drawn from and the p that plain decoding would use.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax

MAX_STOP_IDS = 16
"""Stop tokens that can be forbidden for a request."""


class Draw(enum.IntEnum):
    """What the rows of a compiled program may ask for: each includes those before it, and costs more."""

    GREEDY = 0
    TEMPERATURE = 1
    FILTERED = 2
    MASKED = 3
    """Stop tokens are forbidden before some position."""
    LOGPROBS = 4
    """The target's log-probabilities are reported (`speculation/logprobs.py`)."""


@flax.struct.dataclass(kw_only=True)
class SamplingParams:
    """How each request of a batch turns logits into probabilities."""

    temperature_B: Array
    """Divides the logits; 0 means greedy: the whole probability on the argmax."""
    top_k_B: Array
    """Keep the k most probable tokens (int32); 0 keeps all."""
    top_p_B: Array
    """Keep the most probable tokens whose mass first reaches this share; 1 keeps all."""
    min_p_B: Array
    """Keep tokens at least this probable relative to the most probable one; 0 keeps all."""
    stop_ids_BJ: Array
    """Target ids that may not be drawn early (int32), -1 where there are fewer; read by `Draw.MASKED` on."""
    stop_from_B: Array
    """The first position at which they may stand (int32); 0 forbids nothing."""

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingParams:
        """Greedy rows with every filter off; `replace` makes others of them."""
        return cls(
            temperature_B=jnp.zeros(num_rows),
            top_k_B=jnp.zeros(num_rows, jnp.int32),
            top_p_B=jnp.ones(num_rows),
            min_p_B=jnp.zeros(num_rows),
            stop_ids_BJ=jnp.full((num_rows, MAX_STOP_IDS), -1, jnp.int32),
            stop_from_B=jnp.zeros(num_rows, jnp.int32),
        )


def distribution(
    logits: Array,
    sampling: SamplingParams,
    *,
    draw: Draw,
    positions: Array | None = None,
    draft_to_target_V: Array | None = None,
) -> Array:
    """Probabilities that a token is drawn from: forbidden tokens, temperature, then top-k, top-p and min-p.

    top-p counts the mass that top-k has left. Each filter is a threshold on probability, so tokens of equal
    probability stay or go together and the result does not depend on how the vocabulary is ordered.

    Args:
      logits: [B, ..., V], any float type; -inf marks a forbidden token. The parameters broadcast over the
        axes between B and V.
      sampling: parameters [B].
      draw: static; the most that any row asks for. What lies beyond it is not computed.
      positions: int32 [B, ...], where in its sequence the token of each row will stand. Needed from
        `Draw.MASKED` on, and by position rather than by round: a block may begin before `stop_from_B` and end
        behind it.
      draft_to_target_V: int32 [Vd], the target id of each column; None if they are the same.

    Returns:
      float32 probabilities of the shape of `logits`. Greedy rows are exactly one-hot at the argmax (the
      lowest id wins a tie), whatever their filters say.
    """

    def per_row(option_B: Array) -> Array:
        option_B = jnp.asarray(option_B)
        return option_B.reshape(option_B.shape + (1,) * (logits.ndim - option_B.ndim))

    logits = logits.astype(jnp.float32)
    if draw >= Draw.MASKED:
        assert positions is not None, "whether a stop token is forbidden depends on where it would stand"
        stop_BV = _stop_columns(sampling, logits.shape[-1], draft_to_target_V)
        early = (positions < per_row(sampling.stop_from_B)[..., 0])[..., None]
        stop = stop_BV.reshape(stop_BV.shape[:1] + (1,) * (logits.ndim - 2) + stop_BV.shape[1:])
        logits = jnp.where(early & stop, -jnp.inf, logits)
    one_hot = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    if draw == Draw.GREEDY:
        return one_hot
    temperature = per_row(sampling.temperature_B)
    greedy = temperature <= 0
    # Relative to the best token first: a tiny temperature then sends the others to 0, and nothing to NaN.
    below_best = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(below_best / jnp.where(greedy, 1.0, temperature))
    if draw >= Draw.FILTERED:
        threshold = _filter_threshold(
            weights, per_row(sampling.top_k_B), per_row(sampling.top_p_B), per_row(sampling.min_p_B)
        )
        weights = jnp.where(weights >= threshold, weights, 0.0)
    probs = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(greedy, one_hot, probs)


def _stop_columns(sampling: SamplingParams, num_columns: int, draft_to_target_V: Array | None) -> Array:
    """bool [B, V]: which columns are stop tokens of each request."""
    target_ids_V = jnp.arange(num_columns) if draft_to_target_V is None else draft_to_target_V
    return jnp.any(sampling.stop_ids_BJ[:, :, None] == target_ids_V, axis=1)


def sample(keys_B: Array, probs_BV: Array) -> Array:
    """One token id per row; a token of probability 0 is never drawn.

    Two Gumbel-max draws, a group of tokens by its mass and then a token within it, give the same law as one
    over the vocabulary, with sqrt(V) random numbers instead of V: noise for every token of every row costs
    more than the softmax.

    Args:
      keys_B: one typed key per row.
      probs_BV: probabilities [B, V]; they need not be normalised.

    Returns:
      int32 ids [B].
    """
    B, V = probs_BV.shape
    size = math.isqrt(V - 1) + 1
    groups_BNS = jnp.pad(probs_BV, ((0, 0), (0, -V % size))).reshape(B, -1, size)
    group_noise_BN, token_noise_BS = draw_noise(keys_B, groups_BNS.shape[1], size)
    group_B = jnp.argmax(jnp.log(groups_BNS.sum(-1)) + group_noise_BN, axis=-1)
    within_BS = jnp.take_along_axis(groups_BNS, group_B[:, None, None], axis=1)[:, 0]
    return (group_B * size + jnp.argmax(jnp.log(within_BS) + token_noise_BS, axis=-1)).astype(jnp.int32)


def draw_noise(keys_B: Array, num_groups: int, size: int) -> tuple[Array, Array]:
    """Gumbel noise [B, num_groups] for the groups of `sample`, and [B, size] for the tokens of one.

    Drawn in the high-resolution mode: the default one is capped near 16, so it would never draw anything of
    probability under about 1e-7.
    """

    def noise(keys_B: Array, number: int) -> Array:
        return jax.vmap(lambda key: jax.random.gumbel(key, (number,), jnp.float32, mode="high"))(keys_B)

    group_keys_B, token_keys_B = jnp.moveaxis(jax.vmap(jax.random.split)(keys_B), 1, 0)
    return noise(group_keys_B, num_groups), noise(token_keys_B, size)


def _filter_threshold(weights: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """The weight [B, ..., 1] below which some filter drops a token; weights are relative to the best."""
    kth = _largest_threshold(lambda t: jnp.sum(weights >= t, axis=-1, keepdims=True) >= top_k, weights)
    kth = jnp.where(top_k > 0, kth, 0.0)

    def mass_above(threshold: Array) -> Array:
        kept = weights >= jnp.maximum(threshold, kth)
        return jnp.sum(jnp.where(kept, weights, 0.0), axis=-1, keepdims=True)

    wanted_mass = top_p * mass_above(kth)
    nucleus = _largest_threshold(lambda t: mass_above(t) >= wanted_mass, weights)
    nucleus = jnp.where(top_p < 1, nucleus, 0.0)
    # The best token has weight exactly 1, so a threshold of at most 1 always keeps it.
    return jnp.minimum(jnp.maximum(jnp.maximum(kth, nucleus), min_p), 1.0)


def _largest_threshold(holds: Callable[[Array], Array], weights: Array) -> Array:
    """The largest threshold [B, ..., 1] in [0, 2) for which `holds` is true, exactly.

    Bisection on the bits of a float32, which are ordered like the number itself: 30 reductions over the
    vocabulary find what a sort would, about ten times faster on a CPU and without gathering a sharded axis.
    `holds` must be true at 0 and never become true again once false.
    """

    def try_bit(step: Array, bits: Array) -> Array:
        candidate = bits | (1 << (29 - step))
        return jnp.where(holds(lax.bitcast_convert_type(candidate, jnp.float32)), candidate, bits)

    zeros = jnp.zeros((*weights.shape[:-1], 1), jnp.int32)
    return lax.bitcast_convert_type(lax.fori_loop(0, 30, try_bit, zeros), jnp.float32)
