"""The setting of the paper's experiments, once for all methods: targets, data, optimiser (spec section 5)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from dspark_jax.core.errors import InputError
from dspark_jax.data.pipeline import DataConfig
from dspark_jax.training.config import LossConfig, OptimizerConfig, PerToken, TrainConfig
from dspark_jax.training.recipes import DrafterRecipe

EAGLE3_LOSS = LossConfig(
    ce=0.0, tv=0.0, kl=1.0, confidence=0.0, decay_len=-1 / math.log(0.8), normaliser=PerToken()
)
"""The reference's loss for Eagle3: step s of the training-time test weighs 0.8^s."""
BATCH_SIZE, EPOCHS = 512, 10
SEQUENCES = 1_400_000  # about the size of the prompt set; with another number, set --steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperTarget:
    """A target of the paper, or one in its setting, with its drafters' size.

    Attributes:
      name: as `--target` of the commands takes it.
      taps: layers whose outputs drafters read.
      mask_token: target id in the rows to predict.
      block_len: tokens proposed per round.
      num_layers: layers of a parallel drafter.
      rank: of a sequential head.
      draft_vocab_size: ids that drafters can propose; None: all.
    """

    name: str
    taps: tuple[int, ...]
    mask_token: int
    block_len: int = 7
    num_layers: int = 5
    rank: int = 256
    draft_vocab_size: int | None = None


QWEN3_MASK_TOKEN = 151669  # behind the tokenizer's own ids, inside the embedding table
SMALL = "smollm2_135m"
TARGETS = {
    "qwen3_4b": PaperTarget(name="Qwen/Qwen3-4B", taps=(1, 9, 17, 25, 33), mask_token=QWEN3_MASK_TOKEN),
    "qwen3_8b": PaperTarget(name="Qwen/Qwen3-8B", taps=(1, 9, 17, 25, 33), mask_token=QWEN3_MASK_TOKEN),
    "qwen3_14b": PaperTarget(name="Qwen/Qwen3-14B", taps=(1, 10, 19, 28, 37), mask_token=QWEN3_MASK_TOKEN),
    "gemma4_12b": PaperTarget(name="google/gemma-4-12B-it", taps=(5, 17, 29, 41, 46), mask_token=4),
    # Not of the paper: a target with experts, and the small one that stands in for all of them on a CPU.
    "qwen3_30b_a3b": PaperTarget(
        name="Qwen/Qwen3-30B-A3B", taps=(1, 12, 23, 34, 45), mask_token=QWEN3_MASK_TOKEN
    ),
    SMALL: PaperTarget(
        name="smollm2-135m",
        taps=(1, 8, 15, 21, 27),
        mask_token=16,
        block_len=5,
        num_layers=2,
        rank=64,
        draft_vocab_size=8192,
    ),
}


def paper_target(key: str) -> PaperTarget:
    """A target by the name that recipes give it.

    Raises:
      InputError: no recipe has that name.
    """
    if key not in TARGETS:
        raise InputError(
            given=f"--target {key}",
            expected=f"one of {sorted(TARGETS)}",
            fix="choose one of these recipes, or copy the nearest one for a target of your own",
        )
    return TARGETS[key]


def run_on(key: str, method: str, drafter: DrafterRecipe, loss: LossConfig) -> TrainConfig:
    """One run: in the paper's setting, or on the small target in one that suits a CPU."""
    run = TrainConfig(
        run_name=f"{method}_{key}",
        target=paper_target(key).name,
        drafter=drafter,
        responses=(Path(f"data/responses/{key}.jsonl"),),
        data=DataConfig(batch_size=BATCH_SIZE, max_length=4096, num_anchors=512),
        steps=math.ceil(EPOCHS * SEQUENCES / BATCH_SIZE),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_share=0.04, clip_norm=1.0),
        loss=loss,
        microbatches=64,
    )
    if key != SMALL:
        return run
    return dataclasses.replace(
        run,
        data=DataConfig(batch_size=12, max_length=448, num_anchors=64),
        steps=6_000,
        optimizer=OptimizerConfig(learning_rate=1e-3, b2=0.99, orthogonalise=True),
        loss=dataclasses.replace(loss, chunk=32),
        microbatches=1,
    )
