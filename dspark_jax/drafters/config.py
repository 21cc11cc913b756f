"""What a DSpark drafter is. Variants are types in a union, never a string with ifs."""

from __future__ import annotations

import dataclasses

from dspark_jax.core.errors import InputError
from dspark_jax.nn.config import BlockConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Markov:
    """bias = W1[prev] W2 (DSpark eq. 5)."""

    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gated:
    """bias = (sigmoid(Wg [h; W1[prev]] + b) * W1[prev]) W2."""

    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RNN:
    """A gated recurrence over the block (DSpark eq. 6)."""

    rank: int


SequentialHead = Markov | Gated | RNN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confidence:
    """The confidence head.

    Attributes:
      with_markov: read W1[prev] beside the hidden state.
    """

    with_markov: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """A DSpark drafter; with neither head it is DFlash in the anchor-first layout.

    Attributes:
      target_vocab_size: V of the target: ids that may stand before a prediction.
      vocab_size: ids that the drafter can propose; less than V means a reduced draft vocabulary.
      num_layers: layers of the backbone.
      block: dimensions of its layers; the width is the target's.
      taps: target layers whose outputs are the features; -1 is the embedding.
      block_len: G, tokens proposed per round.
      mask_token: target id whose embedding stands in the rows to predict.
      head: the sequential head, or None.
      confidence: the confidence head, or None.
    """

    target_vocab_size: int
    vocab_size: int
    num_layers: int
    block: BlockConfig
    taps: tuple[int, ...]
    block_len: int
    mask_token: int
    head: SequentialHead | None = dataclasses.field(default_factory=lambda: Markov(rank=256))
    confidence: Confidence | None = dataclasses.field(default_factory=Confidence)

    def __post_init__(self):
        def require(legal: bool, given: str, expected: str, fix: str):
            if not legal:
                raise InputError(given=given, expected=expected, fix=fix)

        require(
            0 <= self.mask_token < self.target_vocab_size,
            f"mask_token={self.mask_token}",
            f"an id of the target's vocabulary, 0..{self.target_vocab_size - 1}",
            "choose a token that never occurs in text; never the padding id or -1",
        )
        require(
            0 < self.vocab_size <= self.target_vocab_size,
            f"vocab_size={self.vocab_size}",
            f"1..{self.target_vocab_size}",
            "draft at most the target's vocabulary",
        )
        require(
            len(set(self.taps)) == len(self.taps) > 0 and min(self.taps) >= -1,
            f"taps={self.taps}",
            "one or more distinct layer numbers, -1 for the embedding",
            "list each tapped target layer once",
        )
        require(
            self.block_len >= 1, f"block_len={self.block_len}", "at least 1", "propose at least one token"
        )
        require(
            self.num_layers >= 1, f"num_layers={self.num_layers}", "at least 1", "give the backbone a layer"
        )
        require(
            not (self.confidence and self.confidence.with_markov and self.head is None),
            "confidence.with_markov without a sequential head",
            "a head whose W1 the confidence head can read",
            "set Confidence(with_markov=False) or add a head",
        )
