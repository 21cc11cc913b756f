"""DFlash, the paper's parallel baseline: the network of DSpark without its two heads, cross-entropy only.

Reproduces: the paper's block-7 DFlash drafters (anchor-first layout), on the data of configs/dspark.py.
Command: python train.py configs/dflash.py --target qwen3_4b
Hardware: accelerators that hold the target beside the drafter; 2 CPU cores for smollm2_135m.
Duration: never run here.
Expected figure: never run here.
Last run: never run here.
"""

from __future__ import annotations

from dspark_jax.training.config import LossConfig, TrainConfig
from dspark_jax.training.paper import paper_target, run_on
from dspark_jax.training.recipes import DSparkRecipe


def get_config(target: str) -> TrainConfig:
    """The recipe for one target.

    Raises:
      InputError: no recipe has that name.
    """
    chosen = paper_target(target)
    loss = LossConfig(ce=1.0, tv=0.0, confidence=0.0, decay_len=4.0)
    recipe = DSparkRecipe(
        taps=chosen.taps,
        mask_token=chosen.mask_token,
        num_layers=chosen.num_layers,
        block_len=chosen.block_len,
        head=None,
        confidence=None,
        draft_vocab_size=chosen.draft_vocab_size,
    )
    return run_on(target, "dflash", recipe, loss)
