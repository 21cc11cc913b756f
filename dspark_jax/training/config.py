"""What one training run is. Its resolved form and fingerprint are written into the run directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dspark_jax.core.errors import InputError
from dspark_jax.data.pipeline import DataConfig
from dspark_jax.drafters.config import Confidence, DSparkConfig, Markov, SequentialHead
from dspark_jax.targets.config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterRecipe:
    """A drafter, as far as the target does not decide it."""

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

    def resolve(self, target: DecoderConfig) -> DSparkConfig:
        """The full configuration of a drafter for this target.

        Raises:
          InputError: the recipe names layers or ids that the target does not have.
        """
        _require(
            max(self.taps, default=-1) < target.num_layers,
            given=f"taps={self.taps}",
            expected=f"layer numbers from -1 (the embedding) to {target.num_layers - 1}",
            fix="choose taps that this target has",
        )
        _require(
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
class LossConfig:
    """Weights of the loss terms (spec section 5)."""

    ce: float = 0.1
    """Cross-entropy to the true token."""
    tv: float = 0.9
    """Distance ||q - p||_1 to the target's distribution."""
    kl: float = 0.0
    """Cross-entropy to the target's whole distribution. Not in the paper: a smoother start for few steps."""
    confidence: float = 1.0
    """Binary cross-entropy of the confidence head."""
    decay_len: float = 4.0
    """Slot k of a block weighs exp(-k / decay_len)."""
    chunk: int = 128
    """Rows per sequence whose logits exist at the same time."""

    def __post_init__(self):
        for name in ("ce", "tv", "kl", "confidence"):
            _require(
                getattr(self, name) >= 0,
                given=f"loss weight {name}={getattr(self, name)}",
                expected="0 or more",
                fix="switch a term off with 0",
            )
        _require(
            self.decay_len > 0 and self.chunk >= 1,
            given=f"decay_len={self.decay_len}, chunk={self.chunk}",
            expected="decay_len above 0 and chunk at least 1",
            fix="raise them",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW without weight decay (or Muon), linear warm-up, cosine to zero."""

    learning_rate: float = 6e-4
    """Peak learning rate."""
    warmup_share: float = 0.04
    """Share of all steps in which the learning rate rises."""
    clip_norm: float = 1.0
    """Largest global gradient norm."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of the second moment."""
    orthogonalise: bool = False
    """Muon for the matrices of the backbone's layers: twice the progress per step, for a dearer step."""

    def __post_init__(self):
        _require(
            self.learning_rate > 0 and self.clip_norm > 0 and 0 <= self.warmup_share < 1,
            given=f"learning_rate={self.learning_rate}, clip_norm={self.clip_norm}, "
            f"warmup_share={self.warmup_share}",
            expected="positive numbers, and a share in [0, 1)",
            fix="correct the optimiser's settings",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices per mesh axis; -1 takes the rest."""

    data: int = -1
    """Copies of the parameters, each with its part of the batch."""
    fsdp: int = 1
    """Parts of the batch and of the parameters' width."""
    tensor: int = 1
    """Parts of heads, MLP width and vocabulary."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    run_dir: Path
    """Checkpoints, metrics and the exported drafter go here; an existing run is resumed."""
    target: str
    """Frozen target: embedded name, .gguf file, Hugging Face directory or hub id."""
    drafter: DrafterRecipe
    """The drafter to train."""
    responses: tuple[Path, ...]
    """The target's own responses (JSONL, as `dspark regenerate` writes them)."""
    feature_store: Path | None = None
    """Store written by `dspark cache-features` for these responses; None: the target runs online."""
    data: DataConfig
    """Batch shape and order."""
    steps: int
    """Optimiser steps of the whole run."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """Optimiser."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    """Loss terms."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Devices."""
    microbatches: int = 1
    """Parts of the batch that are run one after the other."""
    dtype: str = "bfloat16"
    """dtype in which matrix products read their inputs; master weights stay float32."""
    init_from: Path | None = None
    """Exported drafter to start from (a new run); the step and the optimiser start afresh."""
    seed: int = 0
    """Seed of the initial parameters."""
    log_every_steps: int = 20
    """Steps between two lines of metrics."""
    save_every_steps: int = 500
    """Steps between two checkpoints."""
    keep_checkpoints: int = 2
    """Latest checkpoints to keep."""

    def __post_init__(self):
        for name in ("steps", "microbatches", "log_every_steps", "save_every_steps", "keep_checkpoints"):
            _require(
                getattr(self, name) >= 1,
                given=f"{name}={getattr(self, name)}",
                expected="at least 1",
                fix=f"raise {name}",
            )
        _require(
            self.data.batch_size % self.microbatches == 0,
            given=f"batch_size={self.data.batch_size} in microbatches={self.microbatches}",
            expected="equal parts",
            fix="make the batch size a multiple of the number of microbatches",
        )
        _require(
            self.dtype in ("bfloat16", "float32"),
            given=f"dtype={self.dtype!r}",
            expected="bfloat16 or float32",
            fix="choose one of the two; the master weights are float32 in any case",
        )


def as_json(value: Any) -> Any:
    """A configuration as plain JSON; dataclasses name their type, since variants can have the same fields."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _require(legal: bool, *, given: str, expected: str, fix: str) -> None:
    if not legal:
        raise InputError(given=given, expected=expected, fix=fix)
