"""What the device keeps between rounds."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.drafters.contract import Context, Drafter, Params, SharedWeights
from dspark_jax.nn.kv_cache import KVCache
from dspark_jax.speculation.logprobs import TokenLogprobs
from dspark_jax.speculation.sampling import SamplingParams
from dspark_jax.targets.config import DecoderConfig


@flax.struct.dataclass
class Weights:
    """Parameters that rounds read; never donated.

    Attributes:
      target: the target's parameters.
      drafter: the drafter's parameters, or None for plain decoding.
      shared: the embedding and LM head that the drafter borrows, or None.
    """

    target: Params
    drafter: Params | None
    shared: SharedWeights | None


@flax.struct.dataclass
class EngineState:
    """The slots of a batch. Donated to every program that returns the next one.

    Attributes:
      cache: target keys and values of all committed tokens but the anchor.
      context: what the drafter keeps of the same tokens, or None.
      anchors_B: last committed token of each slot, not in the cache yet.
      positions_B: its position.
      active_B: slots that hold a request; the others run along and are ignored.
      keys_B: request keys.
      sampling: per-slot sampling parameters.
    """

    cache: KVCache
    context: Context
    anchors_B: Array
    positions_B: Array
    active_B: Array
    keys_B: Array
    sampling: SamplingParams

    @classmethod
    def create(
        cls, target: DecoderConfig, drafter: Drafter | None, *, slots: int, length: int, dtype: DTypeLike
    ):
        """Empty slots of `length` positions each."""
        return cls(
            cache=KVCache.create(target.layers, batch=slots, length=length, dtype=dtype),
            context=None if drafter is None else drafter.create_context(batch=slots, length=length),
            anchors_B=jnp.zeros(slots, jnp.int32),
            positions_B=jnp.zeros(slots, jnp.int32),
            active_B=jnp.zeros(slots, bool),
            keys_B=jax.random.split(jax.random.key(0), slots),
            sampling=SamplingParams.greedy(slots),
        )


@flax.struct.dataclass
class RoundResult:
    """What the host reads after a round.

    Attributes:
      tokens_BT: committed tokens, then -1.
      accepted_B: draft tokens accepted.
      verified_B: draft tokens verified.
      confidence_logits_BG: of the drafted block; [B, 0] without a drafter.
      logprobs: of the committed tokens, or None from a program that does not report them.
    """

    tokens_BT: Array
    accepted_B: Array
    verified_B: Array
    confidence_logits_BG: Array
    logprobs: TokenLogprobs | None


def put_row(slots, row, slot: Array):
    """Writes a tree of one-request arrays [1, ...] into slot number `slot` of arrays [B, ...]."""

    def put(array: Array, value: Array) -> Array:
        return jax.lax.dynamic_update_slice(
            array, value.astype(array.dtype), (slot,) + (0,) * (array.ndim - 1)
        )

    return jax.tree.map(put, slots, row)
