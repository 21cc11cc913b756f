"""Randomness that belongs to the request, so that batch mates cannot change a result.

Every random draw of a decoding round comes from
`fold_in(fold_in(request key, anchor position), purpose)`. The anchor position grows in every round, so no
draw is ever used in two rounds: a scheduler that looks at an EARLIER round's confidences then learns nothing
about the tokens that the present round is about to draw (spec: non-anticipation).
"""

from __future__ import annotations

import enum

import jax
from jax import Array


class Purpose(enum.IntEnum):
    """What a round draws: one independent stream each."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2


def request_key(seed: int, request_number: int = 0) -> Array:
    """The key of one request: a scalar typed key from the user's seed and, for n samples, a number."""
    return jax.random.fold_in(jax.random.key(seed), request_number)


def round_keys(request_keys_B: Array, anchor_positions_B: Array, purpose: Purpose) -> Array:
    """Keys [B] of one round and purpose, from request keys [B] and anchor positions [B] (int32)."""
    fold = jax.vmap(lambda key, position: jax.random.fold_in(jax.random.fold_in(key, position), int(purpose)))
    return fold(request_keys_B, anchor_positions_B)
