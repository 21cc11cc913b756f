"""How many tokens of a drafted block are worth verifying, decided by each request on its own.

NON-ANTICIPATION. Whether x_j is verified may depend on c_1 .. c_j only. c_j is computed before x_j is drawn
(from the tokens before it), so the decision says nothing about x_j and the output law stays the target's.
A rule that also looks at c_{j+1} .. c_G looks at x_j through them: a block would be cut exactly when its
tokens look bad, and the survivors would be biased. All policies here decide slot by slot from the left.
"""

from __future__ import annotations

import dataclasses
from typing import assert_never

import jax
import jax.numpy as jnp
from jax import Array

from dspark_jax.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedLength:
    """Verify the same number of draft tokens always; 0 is plain decoding."""

    length: int

    def __post_init__(self):
        if self.length < 0:
            raise InputError(
                given=f"a fixed verify length of {self.length}",
                expected="0 (plain decoding) or more",
                fix="choose a length between 0 and the drafter's block length",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfidenceThreshold:
    """Verify until the first token whose confidence is below the threshold; 0 or less verifies all."""

    threshold: float

    def __post_init__(self):
        # Written so that NaN is refused as well.
        if not self.threshold <= 1:
            raise InputError(
                given=f"a confidence threshold of {self.threshold}",
                expected="a probability, or 0 or less to verify every token",
                fix="choose a threshold of at most 1; FixedLength(length=0) turns speculation off",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullBlock:
    """Verify every token that was drafted."""


VerifyPolicy = FixedLength | ConfidenceThreshold | FullBlock


def verify_lengths(policy: VerifyPolicy, confidence_logits_BG: Array, block_len: int) -> Array:
    """Draft tokens to verify for each request, non-anticipating (see the module).

    Args:
      policy: the rule; static.
      confidence_logits_BG: [B, G], logit k the conditional acceptance of draft token k. A NaN stops there,
        so a broken confidence head costs speed only.
      block_len: G, the number of tokens drafted.

    Returns:
      int32 [B], each between 0 and `block_len`.
    """
    batch = confidence_logits_BG.shape[0]
    match policy:
        case FullBlock():
            return jnp.full((batch,), block_len, jnp.int32)
        case FixedLength(length=length):
            if length > block_len:
                raise InputError(
                    given=f"a fixed verify length of {length}",
                    expected=f"at most the {block_len} tokens that this drafter proposes",
                    fix="lower the length, or use FullBlock()",
                )
            return jnp.full((batch,), length, jnp.int32)
        case ConfidenceThreshold(threshold=threshold):
            if threshold <= 0:
                return jnp.full((batch,), block_len, jnp.int32)
            confident_BG = jax.nn.sigmoid(confidence_logits_BG.astype(jnp.float32)) >= threshold
            return jnp.sum(jnp.cumprod(confident_BG.astype(jnp.int32), axis=1), axis=1)
        case _:
            assert_never(policy)
