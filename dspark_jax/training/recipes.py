"""What a drafter is before its target is known: one recipe per kind, all with the same interface."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from dspark_jax.core.errors import require
from dspark_jax.drafters.config import (
    Confidence,
    DSparkConfig,
    Eagle3Config,
    Markov,
    MTPConfig,
    SequentialHead,
)
from dspark_jax.targets.config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkRecipe:
    """A DSpark drafter, as far as the target does not decide it; DFlash has neither of the heads."""

    taps: tuple[int, ...]
    """Target layers whose outputs are the features; -1 is the embedding."""
    mask_token: int
    """Target id that stands in the rows to predict; a token that never occurs in text."""
    num_layers: int = 5
    """Layers of the backbone."""
    block_len: int = 7
    """Tokens proposed per round (G)."""
    head: SequentialHead | None = dataclasses.field(default_factory=lambda: Markov(rank=256))
    """Sequential head."""
    confidence: Confidence | None = dataclasses.field(default_factory=Confidence)
    """Confidence head."""
    draft_vocab_size: int | None = None
    """Draft only the most frequent tokens of the training responses; None: the whole vocabulary."""
    warm_start_sequences: int = 0
    """Training sequences for the regression that parameters start from (warm_start.py); 0: random."""

    def resolve(self, target: DecoderConfig, *, padding_id: int | None = None) -> DSparkConfig:
        """The full configuration of a drafter for this target.

        Args:
          target: the target's dimensions.
          padding_id: its padding token, which cannot be a mask token.

        Raises:
          InputError: the recipe names layers or ids that the target does not have.
        """
        _require_taps(self.taps, target)
        require(
            self.mask_token != padding_id,
            given=f"mask_token={self.mask_token}, the target's padding id",
            expected="a token that never occurs in text",
            fix="choose another mask token",
        )
        require(
            not (self.warm_start_sequences and target.block.qk_norm),
            given=f"warm_start_sequences={self.warm_start_sequences} for a target with head norms",
            expected="0: the regression sets the size of queries and keys, which head norms undo",
            fix="start from random parameters",
        )
        return DSparkConfig(
            target_vocab_size=target.vocab_size,
            vocab_size=self.draft_vocab_size or target.vocab_size,
            num_layers=self.num_layers,
            block=target.block,
            taps=self.taps,
            block_len=self.block_len,
            mask_token=self.mask_token,
            head=self.head,
            confidence=self.confidence,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Recipe:
    """An Eagle3 drafter, as far as the target does not decide it."""

    taps: tuple[int, ...]
    """Target layers whose outputs are the features; -1 is the embedding."""
    block_len: int = 7
    """Tokens proposed per round (G), and steps of the training-time test."""
    draft_vocab_size: int | None = None
    """Draft only the most frequent tokens of the training responses; None: the whole vocabulary."""

    warm_start_sequences: ClassVar[int] = 0

    def resolve(self, target: DecoderConfig, *, padding_id: int | None = None) -> Eagle3Config:
        """The full configuration of a drafter for this target; its padding token does not matter.

        Raises:
          InputError: the recipe names layers that the target does not have.
        """
        _require_taps(self.taps, target)
        return Eagle3Config(
            target_vocab_size=target.vocab_size,
            vocab_size=self.draft_vocab_size or target.vocab_size,
            block=target.block,
            taps=self.taps,
            block_len=self.block_len,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPRecipe:
    """An MTP-k drafter, as far as the target does not decide it."""

    block_len: int = 3
    """Tokens proposed per round (G): k, the number of modules."""
    taps: tuple[int, ...] | None = None
    """Target layers whose outputs the first module reads; None: the last layer alone."""
    draft_vocab_size: int | None = None
    """Draft only the most frequent tokens of the training responses; None: the whole vocabulary."""

    warm_start_sequences: ClassVar[int] = 0

    def resolve(self, target: DecoderConfig, *, padding_id: int | None = None) -> MTPConfig:
        """The full configuration of a drafter for this target; its padding token does not matter.

        Raises:
          InputError: the recipe names layers that the target does not have.
        """
        taps = (target.num_layers - 1,) if self.taps is None else self.taps
        _require_taps(taps, target)
        return MTPConfig(
            target_vocab_size=target.vocab_size,
            vocab_size=self.draft_vocab_size or target.vocab_size,
            block=target.block,
            taps=taps,
            block_len=self.block_len,
        )


DrafterRecipe = DSparkRecipe | Eagle3Recipe | MTPRecipe


def _require_taps(taps: tuple[int, ...], target: DecoderConfig) -> None:
    require(
        max(taps, default=-1) < target.num_layers,
        given=f"taps={taps}",
        expected=f"layer numbers from -1 (the embedding) to {target.num_layers - 1}",
        fix="choose taps that this target has",
    )
