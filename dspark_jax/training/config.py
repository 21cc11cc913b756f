"""What one training run is. The resolved configuration and its fingerprint are written into the run directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

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
    start_from_layers: tuple[int, ...] | None = None
    """Target layers that the backbone's layers start as copies of; None: random."""

    def resolve(self, target: DecoderConfig) -> DSparkConfig:
        """The full configuration of a drafter for this target."""
        if self.start_from_layers is not None and len(self.start_from_layers) != self.num_layers:
            raise InputError(
                given=f"start_from_layers={self.start_from_layers} with num_layers={self.num_layers}",
                expected="one target layer for every layer of the backbone",
                fix="change one of the two",
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
    """Cross-entropy to the target's whole distribution. Not in the paper: a smoother start for small budgets."""
    confidence: float = 1.0
    """Binary cross-entropy of the confidence head."""
    decay_len: float = 4.0
    """Slot k of a block weighs exp(-k / decay_len)."""
    chunk: int = 128
    """Rows per sequence whose logits exist at the same time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW without weight decay, linear warm-up, cosine to zero."""

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
        if self.data.batch_size % self.microbatches:
            raise InputError(
                given=f"batch_size={self.data.batch_size} in microbatches={self.microbatches}",
                expected="equal parts",
                fix="make the batch size a multiple of the number of microbatches",
            )
        if self.steps < 1:
            raise InputError(given=f"steps={self.steps}", expected="at least 1", fix="train for at least one step")
