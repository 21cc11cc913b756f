"""What one training run is. Its resolved form and fingerprint are written into the run directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from etils import epath
from jax import Array

from dspark_jax.core.distributed import DistributedConfig
from dspark_jax.core.errors import require
from dspark_jax.data.pipeline import DataConfig
from dspark_jax.training.recipes import DrafterRecipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerWeight:
    """The loss is a weighted mean over the supervised rows of the whole batch (DSpark)."""

    def denominator(self, weight: Array, tokens: Array) -> Array:
        """What the summed loss is divided by: the sum of all row weights."""
        return weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerToken:
    """The loss is a sum over rows per token of the batch, padding included (Eagle3)."""

    def denominator(self, weight: Array, tokens: Array) -> Array:
        """What the summed loss is divided by: B T."""
        return tokens


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
    normaliser: PerWeight | PerToken = dataclasses.field(default_factory=PerWeight)
    """What the sum over rows is divided by."""
    chunk: int = 128
    """Rows per sequence whose logits exist at the same time."""
    block_chunk: int = 128
    """Blocks per sequence whose activations exist at the same time."""
    dtype: str | None = None
    """dtype in which the loss reads LM head and hidden states; None: the drafter's."""

    def __post_init__(self):
        for name in ("ce", "tv", "kl", "confidence"):
            require(
                getattr(self, name) >= 0,
                given=f"loss weight {name}={getattr(self, name)}",
                expected="0 or more",
                fix="switch a term off with 0",
            )
        require(
            self.decay_len > 0 and self.chunk >= 1 and self.block_chunk >= 1,
            given=f"decay_len={self.decay_len}, chunk={self.chunk}, block_chunk={self.block_chunk}",
            expected="decay_len above 0 and chunks of at least 1",
            fix="raise them",
        )
        _require_dtype("loss.dtype", self.dtype)


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
        require(
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
    expert: int = 1
    """Parts of the batch, and of the experts of a target that has them."""
    tensor: int = 1
    """Parts of heads, MLP width and vocabulary."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepConfig:
    """Which checkpoints stay: the union of the latest, the best, and every so many steps."""

    latest: int = 2
    """Latest checkpoints."""
    best: int = 1
    """Checkpoints with the best metric; 0 for none."""
    metric: str = "expected_tau"
    """What makes a checkpoint the best: any scalar of metrics.jsonl, as its mean since the checkpoint before;
    `accepted_length` where `evaluation` decodes."""
    lowest: bool = False
    """Whether a smaller metric is better."""
    every_steps: int | None = None
    """Checkpoints at multiples of this step stay for ever."""

    def __post_init__(self):
        require(
            self.latest >= 1 and self.best >= 0 and (self.every_steps is None or self.every_steps >= 1),
            given=f"keep.latest={self.latest}, keep.best={self.best}, keep.every_steps={self.every_steps}",
            expected="at least one latest checkpoint, and no negative number",
            fix="correct them",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What stops a run that goes wrong, and what looks inside of it."""

    spike_factor: float = 5.0
    """A loss above this many times the median of the last steps stops the run; 0: only NaN and infinity."""
    spike_window_steps: int = 50
    """Steps in that median; less than half of them say nothing yet."""
    profile_steps: tuple[int, int] | None = None
    """First and last step of a profiler trace, written into the run directory."""

    def __post_init__(self):
        require(
            (self.spike_factor == 0 or self.spike_factor > 1) and self.spike_window_steps >= 2,
            given=f"spike_factor={self.spike_factor}, spike_window_steps={self.spike_window_steps}",
            expected="a factor above 1, or 0, and at least 2 steps",
            fix="correct them",
        )
        first, last = self.profile_steps or (1, 1)
        require(
            1 <= first <= last,
            given=f"profile_steps={self.profile_steps}",
            expected="first and last step, from 1",
            fix="correct them",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Decoding with the drafter as it is: the accepted length in fact, beside the loss's estimate of it."""

    prompts: tuple[Path, ...] = ()
    """Prompt files or evaluation sets, as `dspark evaluate` takes them; none: no evaluation."""
    every_steps: int = 500
    """Steps between two evaluations."""
    num_prompts_per_domain: int = 8
    """Prompts of every domain, always the same ones."""
    max_new_tokens: int = 128
    """Longest answer."""
    max_prompt_tokens: int = 256
    """Longer prompts are left out."""
    slots: int = 16
    """Requests decoded at the same time."""
    temperature: float = 1.0
    """0 is greedy."""

    def __post_init__(self):
        for name in ("every_steps", "num_prompts_per_domain", "max_new_tokens", "max_prompt_tokens", "slots"):
            require(
                getattr(self, name) >= 1,
                given=f"evaluation.{name}={getattr(self, name)}",
                expected="at least 1",
                fix=f"raise {name}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    run_name: str
    """Names the run: a directory in `runs`. A run of this name that exists goes on where it was."""
    runs: Path = Path("runs")
    """Where runs lie: metrics, exported drafters, and checkpoints unless `checkpoint_root` says otherwise."""
    checkpoint_root: str | None = None
    """Where checkpoints go instead, under the run's name: a directory that all processes see, or gs://..."""
    target: str
    """Frozen target: embedded name, .gguf file, Hugging Face directory or hub id."""
    drafter: DrafterRecipe
    """The drafter to train."""
    responses: tuple[Path, ...]
    """The target's own responses, as `dspark regenerate` writes them, or conversations: JSON lines, parquet,
    directories, data sets of the hub (`data/rows.py`)."""
    feature_store: Path | None = None
    """Store written by `dspark cache-features` for these responses, or a cache of DeepSpec, which has its own
    sequences (the responses are not read then); None: the target runs online."""
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
    target_parts: int = 1
    """Parts of a microbatch that the online target is run on one after the other."""
    dtype: str = "bfloat16"
    """dtype in which matrix products read their inputs; master weights stay float32."""
    target_dtype: str | None = None
    """dtype of the target's weights and matrix products; None: `dtype`."""
    init_from: Path | None = None
    """Exported drafter to start from (a new run); the step and the optimiser start afresh."""
    resume_from: str | None = None
    """Checkpoints of another run to go on from in a new one (their directory, or one step's in it, local or
    gs://): parameters, optimiser, step and position in the data."""
    seed: int = 0
    """Seed of the initial parameters."""
    log_every_steps: int = 20
    """Steps between two lines of metrics."""
    save_every_steps: int = 500
    """Steps between two checkpoints."""
    keep: KeepConfig = dataclasses.field(default_factory=KeepConfig)
    """Which checkpoints stay."""
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    """What stops a run that goes wrong."""
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    """Decoding now and then."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """Several processes."""

    @property
    def run_dir(self) -> Path:
        """Metrics, exported drafter, configuration; written by process 0."""
        return self.runs / self.run_name

    @property
    def checkpoint_dir(self) -> epath.Path:
        """Checkpoints; written and read by all processes."""
        root = epath.Path(self.runs if self.checkpoint_root is None else self.checkpoint_root)
        return root / self.run_name / "checkpoints"

    def __post_init__(self):
        require(
            bool(self.run_name) and "/" not in self.run_name and self.run_name not in (".", ".."),
            given=f"run_name={self.run_name!r}",
            expected="the name of a directory",
            fix="choose a name without a slash; --runs says where it lies",
        )
        require(
            self.init_from is None or self.resume_from is None,
            given=f"init_from={self.init_from} and resume_from={self.resume_from}",
            expected="one of the two",
            fix="keep init_from for the parameters alone, or resume_from for the whole state",
        )
        for name in ("steps", "microbatches", "target_parts", "log_every_steps", "save_every_steps"):
            require(
                getattr(self, name) >= 1,
                given=f"{name}={getattr(self, name)}",
                expected="at least 1",
                fix=f"raise {name}",
            )
        require(
            self.data.batch_size % self.microbatches == 0,
            given=f"batch_size={self.data.batch_size} in microbatches={self.microbatches}",
            expected="equal parts",
            fix="make the batch size a multiple of the number of microbatches",
        )
        require(
            self.data.batch_size // self.microbatches % self.target_parts == 0,
            given=f"microbatches of {self.data.batch_size // self.microbatches} rows in "
            f"target_parts={self.target_parts}",
            expected="equal parts",
            fix="lower target_parts",
        )
        _require_dtype("dtype", self.dtype)
        _require_dtype("target_dtype", self.target_dtype)


def _require_dtype(name: str, dtype: str | None) -> None:
    require(
        dtype in (None, "bfloat16", "float32"),
        given=f"{name}={dtype!r}",
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
