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
    """The pages and slots of an engine. Donated to every program that returns the next one.

    Attributes:
      cache: target keys and values of all committed tokens but the anchor.
      context: what the drafter keeps of the same tokens, in pages of the same numbers, or None.
      anchors_B: last committed token of each slot, not in the cache yet.
      positions_B: its position.
      active_B: slots whose request has not come to its end.
      remaining_B: tokens that its request may still emit.
      stops_BW: tokens that end it; -1 fills up.
      keys_B: request keys.
      sampling: per-slot sampling parameters.
    """

    cache: KVCache
    context: Context
    anchors_B: Array
    positions_B: Array
    active_B: Array
    remaining_B: Array
    stops_BW: Array
    keys_B: Array
    sampling: SamplingParams

    @classmethod
    def create(
        cls,
        target: DecoderConfig,
        drafter: Drafter | None,
        *,
        slots: int,
        num_pages: int,
        page_len: int,
        num_stops: int,
        dtype: DTypeLike,
    ):
        """Empty pages and slots."""
        pages = {"num_pages": num_pages, "page_len": page_len}
        return cls(
            cache=KVCache.create(target.layers, **pages, dtype=dtype),
            context=None if drafter is None else drafter.create_context(slots=slots, **pages),
            anchors_B=jnp.zeros(slots, jnp.int32),
            positions_B=jnp.zeros(slots, jnp.int32),
            active_B=jnp.zeros(slots, bool),
            remaining_B=jnp.zeros(slots, jnp.int32),
            stops_BW=jnp.full((slots, num_stops), -1, jnp.int32),
            keys_B=jax.random.split(jax.random.key(0), slots),
            sampling=SamplingParams.greedy(slots),
        )


@flax.struct.dataclass
class Drafts:
    """The latest block of every slot. Donated to the program that drafts.

    Attributes:
      tokens_BG: target ids.
      q_BG: probability of each token under the law that it was drawn from.
      probs_BGV: these laws, over the draft vocabulary; stale when the round is greedy.
      confidence_logits_BG: of the confidence head.
      usable_B: whether every number of the block is finite.
    """

    tokens_BG: Array
    q_BG: Array
    probs_BGV: Array
    confidence_logits_BG: Array
    usable_B: Array

    @classmethod
    def create(cls, *, slots: int, block_len: int, vocab_size: int):
        """Nothing drafted yet."""
        return cls(
            tokens_BG=jnp.zeros((slots, block_len), jnp.int32),
            q_BG=jnp.ones((slots, block_len)),
            probs_BGV=jnp.zeros((slots, block_len, vocab_size)),
            confidence_logits_BG=jnp.zeros((slots, block_len)),
            usable_B=jnp.zeros(slots, bool),
        )


@flax.struct.dataclass
class Admission:
    """What a program that takes in a chunk of a prompt must know of the request; scalars, and [1, ...].

    Attributes:
      slot: where it sits.
      start: position of the chunk's first token.
      num_tokens: tokens in the chunk, without padding.
      is_last: whether the prompt ends with it.
      anchor: the token behind the prompt if it is known already (of a preempted request), or -1 to draw it.
      remaining: tokens that the request may emit from here on.
      stops_W: tokens that end it.
      key_1: its key.
      sampling_1: its sampling parameters.
      table_1N: its pages.
    """

    slot: Array
    start: Array
    num_tokens: Array
    is_last: Array
    anchor: Array
    remaining: Array
    stops_W: Array
    key_1: Array
    sampling_1: SamplingParams
    table_1N: Array


@flax.struct.dataclass
class RoundResult:
    """What the host reads after a round, for the R requests of the step.

    Attributes:
      tokens_RT: committed tokens, then -1; only -1 for a request that had come to its end before.
      accepted_R: draft tokens accepted.
      verified_R: draft tokens verified.
      survival_RG: predicted survival of the latest block.
      confidence_logits_RG: what it was predicted from.
      usable_R: whether the drafter's numbers were finite.
      logprobs: of the committed tokens, or None from a program that does not report them.
    """

    tokens_RT: Array
    accepted_R: Array
    verified_R: Array
    survival_RG: Array
    confidence_logits_RG: Array
    usable_R: Array
    logprobs: TokenLogprobs | None


def at_slots(tree, slots_R: Array):
    """The entries [R, ...] of these slots in arrays [B, ...]; those of some slot for padding."""
    return jax.tree.map(lambda x: x.at[slots_R].get(mode="clip"), tree)


def put_at_slots(tree, values, slots_R: Array):
    """Arrays [B, ...] with entries [R, ...] in these slots; padding goes nowhere."""
    return jax.tree.map(lambda x, new: x.at[slots_R].set(new.astype(x.dtype), mode="drop"), tree, values)
