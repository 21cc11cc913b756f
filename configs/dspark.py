"""DSpark (arXiv 2607.05147): a parallel backbone, a Markov head and a confidence head; loss CE + TV + BCE.

smollm2_135m: the drafter in assets/, for SmolLM2-135M-Instruct.
    Reproduces: a drafter like the shipped one, which took an earlier form of this recipe (see its card).
    Command: python train.py configs/dspark.py --target smollm2_135m
    Hardware: 2 CPU cores, with a feature store.
    Duration: 3.5 to 5 s a step on a machine that did other work at the same time.
    Expected figure: more than version 1 of the card: 1.67 at temperature 1, 1.90 greedy, after 1,000 steps.
    Last run: 2026-11-29, 600 steps of it.

qwen3_4b, qwen3_8b, qwen3_14b: the paper's recipe.
    Reproduces: the released block-7 drafters of the paper, on responses of the target to the prompts of
        Open-PerfectBlend (`dspark regenerate --temperature 0.7`, non-thinking template).
    Command: python train.py configs/dspark.py --target qwen3_4b
    Hardware: accelerators that hold the target beside the drafter; set --mesh and --microbatches to them.
    Duration: never run here.
    Expected figure: never run here.
    Last run: never run here.
"""

from __future__ import annotations

import math
from pathlib import Path

from dspark_jax.core.errors import InputError
from dspark_jax.data.pipeline import DataConfig
from dspark_jax.drafters.config import Markov
from dspark_jax.training.config import DrafterRecipe, LossConfig, OptimizerConfig, TrainConfig

QWEN3_TAPS = {
    "qwen3_4b": (1, 9, 17, 25, 33),
    "qwen3_8b": (1, 9, 17, 25, 33),
    "qwen3_14b": (1, 10, 19, 28, 37),
}
QWEN3_HUB_IDS = {"qwen3_4b": "Qwen/Qwen3-4B", "qwen3_8b": "Qwen/Qwen3-8B", "qwen3_14b": "Qwen/Qwen3-14B"}
QWEN3_MASK_TOKEN = 151669  # behind the tokenizer's own ids, inside the embedding table

PAPER_BATCH_SIZE, PAPER_EPOCHS = 512, 10
PAPER_SEQUENCES = 1_400_000  # about the size of the prompt set; with another number, set --steps


def get_config(target: str) -> TrainConfig:
    """The recipe for one target.

    Raises:
      InputError: no recipe has that name.
    """
    if target == "smollm2_135m":
        return smollm2_135m()
    if target in QWEN3_HUB_IDS:
        return qwen3(target)
    raise InputError(
        given=f"--target {target}",
        expected=f"one of {['smollm2_135m', *QWEN3_HUB_IDS]}",
        fix="choose one of these recipes, or copy the nearest one for a target of your own",
    )


def smollm2_135m() -> TrainConfig:
    """Small steps, a reduced draft vocabulary: made for a CPU."""
    return TrainConfig(
        run_dir=Path("runs/dspark_smollm2_135m"),
        target="smollm2-135m",
        drafter=DrafterRecipe(
            taps=(1, 8, 15, 21, 27),
            mask_token=16,
            num_layers=2,
            block_len=5,
            head=Markov(rank=64),
            draft_vocab_size=8192,
            warm_start_sequences=256,
        ),
        responses=(Path("data/responses/smollm2_135m.jsonl"),),
        data=DataConfig(batch_size=12, max_length=448, num_anchors=64),
        steps=6_000,
        optimizer=OptimizerConfig(learning_rate=1e-3, b2=0.99, orthogonalise=True),
        loss=LossConfig(chunk=32),
    )


def qwen3(target: str) -> TrainConfig:
    """The paper's hyper-parameters."""
    return TrainConfig(
        run_dir=Path(f"runs/dspark_{target}"),
        target=QWEN3_HUB_IDS[target],
        drafter=DrafterRecipe(
            taps=QWEN3_TAPS[target],
            mask_token=QWEN3_MASK_TOKEN,
            num_layers=5,
            block_len=7,
            head=Markov(rank=256),
        ),
        responses=(Path(f"data/responses/{target}.jsonl"),),
        data=DataConfig(batch_size=PAPER_BATCH_SIZE, max_length=4096, num_anchors=512),
        steps=math.ceil(PAPER_EPOCHS * PAPER_SEQUENCES / PAPER_BATCH_SIZE),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_share=0.04, clip_norm=1.0),
        microbatches=64,
    )
