"""The exact output law of speculative decoding on a tiny vocabulary, by enumerating everything.

Every drafted block, every accepted prefix and every replacement is weighted by its exact probability; what
comes out is compared with the target's own law, to rounding and without a random number. The acceptance
test and the residual are the float32 functions that the engine runs, so an error in them shows here.

    decoding = TinyDecoding(target=..., drafter=..., verify_length=..., block_len=2)
    largest_difference(continuation_law(decoding, (), 3), target_law(decoding.target, (), 3))  # about 1e-7

Cost: V^G blocks for each of V^n prefixes. V = 4, G = 2, n = 3 takes a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dspark_jax.speculation.rejection import acceptance_probability, residual
from dspark_jax.speculation.verify_length import VerifyPolicy, verify_lengths

Tokens = tuple[int, ...]
Law = Mapping[Tokens, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyDecoding:
    """Everything that the output of speculative decoding depends on, as functions of the tokens so far.

    Tokens are target ids everywhere. The functions are called again and again with the same arguments and
    must be deterministic.
    """

    target: Callable[[Tokens], np.ndarray]
    """tokens so far -> float64 [V], the target's law of the next token."""
    drafter: Callable[[Tokens, Tokens], np.ndarray]
    """tokens at the start of the round, tokens drafted in it -> float64 [Vd], the law of the next draft."""
    verify_length: Callable[[Tokens, Tokens], int]
    """tokens at the start of the round, the WHOLE drafted block -> tokens to verify. It is given the whole
    block so that a scheduler that anticipates can be written down, and caught."""
    block_len: int
    """G, the tokens drafted per round."""
    draft_to_target_np: np.ndarray | None = None
    """int [Vd], the target id of each draft id; None if they are the same."""


def policy_length(
    policy: VerifyPolicy, confidence: Callable[[Tokens, Tokens], float], block_len: int
) -> Callable[[Tokens, Tokens], int]:
    """`TinyDecoding.verify_length` for one of the engine's policies.

    Args:
      policy: the policy.
      confidence: tokens at the start of the round, tokens drafted before this one -> confidence logit.
      block_len: G.
    """

    @functools.cache
    def decide(logits_G: tuple[float, ...]) -> int:
        return int(verify_lengths(policy, jnp.asarray([logits_G], jnp.float32), block_len)[0])

    def length(prefix: Tokens, block: Tokens) -> int:
        return decide(tuple(confidence(prefix, block[:slot]) for slot in range(block_len)))

    return length


def round_law(decoding: TinyDecoding, prefix: Tokens) -> Law:
    """The law of what one round commits after `prefix`: 1 to G+1 tokens, the last one the target's."""
    law: dict[Tokens, float] = defaultdict(float)
    vocabulary = decoding.target(prefix).size
    ids = range(vocabulary) if decoding.draft_to_target_np is None else decoding.draft_to_target_np.tolist()
    slots = {
        drafted: slot_laws
        for length in range(decoding.block_len)
        for drafted, slot_laws in _slot_laws(decoding, prefix, list(itertools.product(ids, repeat=length)))
    }
    for block in itertools.product(ids, repeat=decoding.block_len):
        drafted = 1.0
        for slot, token in enumerate(block):
            drafted *= slots[block[:slot]].draft_V[token]
        if drafted == 0:
            continue
        surviving, length = drafted, decoding.verify_length(prefix, block)
        for slot, token in enumerate(block[:length]):
            slot_laws = slots[block[:slot]]
            rejected = surviving * (1 - slot_laws.accept_V[token])
            for replacement, probability in enumerate(slot_laws.residual_V):
                law[*block[:slot], replacement] += rejected * probability
            surviving *= slot_laws.accept_V[token]
        for bonus, probability in enumerate(decoding.target(prefix + block[:length]).tolist()):
            law[*block[:length], bonus] += surviving * probability
    return law


def continuation_law(decoding: TinyDecoding, prefix: Tokens, num_tokens: int) -> Law:
    """The law of the first `num_tokens` tokens after `prefix`, rounds iterated and the last one cut."""

    @functools.cache
    def law_after(tokens: Tokens) -> Law:
        missing = num_tokens - (len(tokens) - len(prefix))
        if missing == 0:
            return {(): 1.0}
        law: dict[Tokens, float] = defaultdict(float)
        for committed, probability in round_law(decoding, tokens).items():
            committed = committed[:missing]
            for rest, rest_probability in law_after(tokens + committed).items():
                law[committed + rest] += probability * rest_probability
        return law

    return law_after(prefix)


def target_law(target: Callable[[Tokens], np.ndarray], prefix: Tokens, num_tokens: int) -> Law:
    """The law of `num_tokens` tokens after `prefix` under plain decoding."""
    law: dict[Tokens, float] = {(): 1.0}
    for _ in range(num_tokens):
        law = {
            (*tokens, token): probability * float(step)
            for tokens, probability in law.items()
            for token, step in enumerate(target(prefix + tokens))
        }
    return law


def largest_difference(first: Law, second: Law) -> float:
    """The largest difference between two laws in the probability of one outcome."""
    return max(abs(first.get(tokens, 0.0) - second.get(tokens, 0.0)) for tokens in {*first, *second})


class _SlotLaws(NamedTuple):
    """What one slot does with each target id."""

    draft_V: list[float]
    accept_V: list[float]
    residual_V: list[float]


def _slot_laws(
    decoding: TinyDecoding, prefix: Tokens, contexts: list[Tokens]
) -> Iterator[tuple[Tokens, _SlotLaws]]:
    """The laws of the slot after each of `contexts`, tokens drafted in this round; all of one length."""
    p_NV = np.stack([decoding.target(prefix + drafted) for drafted in contexts])
    q_NV = np.zeros_like(p_NV)
    ids = slice(None) if decoding.draft_to_target_np is None else decoding.draft_to_target_np
    q_NV[:, ids] = np.stack([decoding.drafter(prefix, drafted) for drafted in contexts])
    p, q = jnp.asarray(p_NV, jnp.float32), jnp.asarray(q_NV, jnp.float32)
    accept_NV, residual_NV = np.asarray(acceptance_probability(p, q)), np.asarray(residual(p, q))
    for drafted, *laws in zip(contexts, q_NV, accept_NV, residual_NV, strict=True):
        yield drafted, _SlotLaws(*(np.asarray(law_V, np.float64).tolist() for law_V in laws))
