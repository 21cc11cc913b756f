"""MTP-k, the production baseline of the paper: k sequential modules (DeepSeek-V3), cross-entropy only.

Reproduces: multi-token prediction behind a frozen target, on the data of configs/dspark.py. Differs from
    DeepSeek-V3: the target is not trained with it. k is 1, 3 or 5 in the paper.
Command: python train.py configs/mtp.py --target qwen3_4b [--k 5]
Hardware: accelerators that hold the target beside the drafter; 2 CPU cores for smollm2_135m.
Duration: never run here.
Expected figure: never run here.
Last run: never run here.
"""

from __future__ import annotations

import math

from dspark_jax.core.errors import InputError
from dspark_jax.training.config import LossConfig, TrainConfig
from dspark_jax.training.paper import paper_target, run_on
from dspark_jax.training.recipes import MTPRecipe

DEPTHS = ("1", "3", "5")


def get_config(target: str, k: str = "3") -> TrainConfig:
    """The recipe for one target with k modules, of which all weigh the same.

    Raises:
      InputError: no recipe or depth has that name.
    """
    chosen = paper_target(target)
    if k not in DEPTHS:
        raise InputError(
            given=f"--k {k}",
            expected=f"one of {DEPTHS}",
            fix="choose one of them, or set --drafter.block-len",
        )
    loss = LossConfig(ce=1.0, tv=0.0, confidence=0.0, decay_len=math.inf)
    recipe = MTPRecipe(block_len=int(k), draft_vocab_size=chosen.draft_vocab_size)
    return run_on(target, "mtp", recipe, loss)
