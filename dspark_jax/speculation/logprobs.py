"""The target's log-probabilities of emitted tokens, out of rows that were verified anyway."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

MAX_TOP_LOGPROBS = 20
"""Alternatives that a program computes for every row; a request is told as many as it asked for."""


@flax.struct.dataclass(kw_only=True)
class TokenLogprobs:
    """What the target thought of each committed token, and of the likeliest ones in its place."""

    chosen_BT: Array
    """float32 [B, T]: natural logarithms; rows behind the committed tokens hold anything."""
    top_ids_BTJ: Array
    """int32 [B, T, J]: the likeliest tokens, the likeliest first."""
    top_BTJ: Array
    """float32 [B, T, J]: their logarithms."""


def token_logprobs(logits_BTV: Array, tokens_BT: Array) -> TokenLogprobs:
    """log softmax of the target's logits: before temperature, filters and forbidden tokens.

    The target alone decides these, so they do not depend on how a token came to be drafted.

    Args:
      logits_BTV: row k after k tokens of the round, [B, rows, V].
      tokens_BT: int32 [B, T], T >= rows; the committed tokens, then -1.

    Returns:
      T rows; J = min(V, `MAX_TOP_LOGPROBS`).
    """
    rows, V = logits_BTV.shape[1:]
    missing = tokens_BT.shape[1] - rows
    log_probs_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32), axis=-1)
    tokens_BT1 = jnp.maximum(tokens_BT[:, :rows, None], 0)
    chosen_BT = jnp.take_along_axis(log_probs_BTV, tokens_BT1, axis=-1)[..., 0]
    top_BTJ, top_ids_BTJ = jax.lax.top_k(log_probs_BTV, min(V, MAX_TOP_LOGPROBS))
    return TokenLogprobs(
        chosen_BT=jnp.pad(chosen_BT, ((0, 0), (0, missing))),
        top_ids_BTJ=jnp.pad(top_ids_BTJ.astype(jnp.int32), ((0, 0), (0, missing), (0, 0))),
        top_BTJ=jnp.pad(top_BTJ, ((0, 0), (0, missing), (0, 0))),
    )
