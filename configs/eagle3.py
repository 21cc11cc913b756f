"""Eagle3, the paper's autoregressive baseline: one layer on its own output, trained on 7 unrolled steps.

Reproduces: the paper's ttt7 Eagle3 drafters (soft cross-entropy to the target, step s weighs 0.8^s, divided
    by all tokens), on the data of configs/dspark.py. Differs: steps start at sampled anchors only.
Command: python train.py configs/eagle3.py --target qwen3_4b
Hardware: accelerators that hold the target beside the drafter; 2 CPU cores for smollm2_135m.
Duration: never run here.
Expected figure: never run here.
Last run: never run here.
"""

from __future__ import annotations

from dspark_jax.training.config import TrainConfig
from dspark_jax.training.paper import EAGLE3_LOSS, paper_target, run_on
from dspark_jax.training.recipes import Eagle3Recipe


def get_config(target: str) -> TrainConfig:
    """The recipe for one target.

    Raises:
      InputError: no recipe has that name.
    """
    chosen = paper_target(target)
    recipe = Eagle3Recipe(
        taps=chosen.taps, block_len=chosen.block_len, draft_vocab_size=chosen.draft_vocab_size
    )
    return run_on(target, "eagle3", recipe, EAGLE3_LOSS)
