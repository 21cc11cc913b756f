"""What a drafter is, one type per kind. Variants are types in a union, never a string with ifs."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar

from dspark_jax.core.errors import require
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


class Layout(enum.StrEnum):
    """Which rows of a block predict. Weights of one layout drafted in the other accept next to nothing."""

    ANCHOR_FIRST = "anchor-first"
    """G rows; each predicts the token after its own position, the anchor's row first."""
    FILL_IN = "fill-in"
    """G + 1 rows; each mask row predicts the token at its own position, the anchor's row predicts nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """A DSpark drafter; with neither head it is DFlash.

    Attributes:
      target_vocab_size: V of the target: ids that may stand before a prediction.
      vocab_size: ids that the drafter can propose; less than V means a reduced draft vocabulary.
      num_layers: layers of the backbone.
      block: dimensions of its layers; the width is the target's.
      taps: target layers whose outputs are the features; -1 is the embedding.
      block_len: G, tokens proposed per round.
      mask_token: target id whose embedding stands in the rows to predict.
      layout: which rows predict.
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
    layout: Layout = Layout.ANCHOR_FIRST
    head: SequentialHead | None = dataclasses.field(default_factory=lambda: Markov(rank=256))
    confidence: Confidence | None = dataclasses.field(default_factory=Confidence)

    @property
    def block_rows(self) -> int:
        """Rows of a block that the backbone reads."""
        return self.block_len + (self.layout is Layout.FILL_IN)

    def __post_init__(self):
        _check(self)
        require(
            0 <= self.mask_token < self.target_vocab_size,
            given=f"mask_token={self.mask_token}",
            expected=f"an id of the target's vocabulary, 0..{self.target_vocab_size - 1}",
            fix="choose a token that never occurs in text; never the padding id or -1",
        )
        require(
            self.num_layers >= 1,
            given=f"num_layers={self.num_layers}",
            expected="at least 1",
            fix="give the backbone a layer",
        )
        require(
            not (self.confidence and self.confidence.with_markov and self.head is None),
            given="confidence.with_markov without a sequential head",
            expected="a head whose W1 the confidence head can read",
            fix="set Confidence(with_markov=False) or add a head",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An Eagle3 drafter: one layer that is run on its own output, token after token (spec section 10).

    Attributes:
      target_vocab_size: V of the target.
      vocab_size: ids that the drafter can propose; less than V means a reduced draft vocabulary.
      block: dimensions of the layer, whose queries, keys and values read 2 D; the width is the target's.
      taps: target layers whose outputs are the features; -1 is the embedding.
      block_len: G, tokens proposed per round, and steps of the training-time test (DeepSpec's `ttt_length`).
    """

    target_vocab_size: int
    vocab_size: int
    block: BlockConfig
    taps: tuple[int, ...]
    block_len: int

    num_layers: ClassVar[int] = 1
    confidence: ClassVar[None] = None

    def __post_init__(self):
        _check(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Sequential multi-token prediction: G modules, each predicts one token further (DeepSeek-V3).

    Attributes:
      target_vocab_size: V of the target.
      vocab_size: ids that the drafter can propose; less than V means a reduced draft vocabulary.
      block: dimensions of the modules' decoder blocks; the width is the target's.
      taps: target layers whose outputs the first module reads; DeepSeek's reads the last one alone.
      block_len: G, tokens proposed per round: the number of modules.
    """

    target_vocab_size: int
    vocab_size: int
    block: BlockConfig
    taps: tuple[int, ...]
    block_len: int

    confidence: ClassVar[None] = None

    def __post_init__(self):
        _check(self)

    @property
    def num_layers(self) -> int:
        """Decoder blocks: one in every module."""
        return self.block_len


def _check(config: DSparkConfig | Eagle3Config | MTPConfig) -> None:
    """What holds for every kind of drafter."""
    require(
        0 < config.vocab_size <= config.target_vocab_size,
        given=f"vocab_size={config.vocab_size}",
        expected=f"1..{config.target_vocab_size}",
        fix="draft at most the target's vocabulary",
    )
    require(
        len(set(config.taps)) == len(config.taps) > 0 and min(config.taps) >= -1,
        given=f"taps={config.taps}",
        expected="one or more distinct layer numbers, -1 for the embedding",
        fix="list each tapped target layer once",
    )
    require(
        config.block_len >= 1,
        given=f"block_len={config.block_len}",
        expected="at least 1",
        fix="propose at least one token",
    )
    require(
        config.block.window is None,
        given=f"layers with a window of {config.block.window}",
        expected="layers that see the whole context",
        fix="repeat a layer of the target that does",
    )
