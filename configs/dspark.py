"""DSpark (arXiv 2607.05147): a parallel backbone, a sequential head and a confidence head; CE + TV + BCE.

smollm2_135m: the drafter in assets/, for SmolLM2-135M-Instruct.
    Reproduces: a drafter like the shipped one, which took an earlier form of this recipe (see its card).
    Command: python train.py configs/dspark.py --target smollm2_135m
    Hardware: 2 CPU cores, with a feature store.
    Duration: 3.5 to 5 s a step on a machine that did other work at the same time.
    Expected figure: what the card says, 1.74 at temperature 1 and 2.03 greedy, after 2,000 steps.
    Last run: 2026-11-30, 1,050 steps of it with --data.balance-domains.

qwen3_4b, qwen3_8b, qwen3_14b, gemma4_12b: the paper's recipe; qwen3_30b_a3b: that for a target with experts.
    Reproduces: the released block-7 drafters of the paper, on responses of the target to the prompts of
        Open-PerfectBlend (`dspark regenerate --temperature 0.7`, non-thinking template).
    Command: python train.py configs/dspark.py --target qwen3_4b [--head gated]
    Hardware: accelerators that hold the target beside the drafter; set --mesh and --microbatches to them.
    Duration: never run here.
    Expected figure: never run here.
    Last run: never run here.
"""

from __future__ import annotations

from dspark_jax.core.errors import InputError
from dspark_jax.drafters.config import RNN, Gated, Markov
from dspark_jax.training.config import LossConfig, TrainConfig
from dspark_jax.training.paper import SMALL, paper_target, run_on
from dspark_jax.training.recipes import DSparkRecipe

HEADS = {"markov": Markov, "gated": Gated, "rnn": RNN}


def get_config(target: str, head: str = "markov") -> TrainConfig:
    """The recipe for one target with one kind of sequential head.

    Raises:
      InputError: no recipe or head has that name.
    """
    if head not in HEADS:
        raise InputError(given=f"--head {head}", expected=f"one of {sorted(HEADS)}", fix="choose one of them")
    chosen = paper_target(target)
    loss = LossConfig(ce=0.1, tv=0.9, confidence=1.0, decay_len=4.0)
    recipe = DSparkRecipe(
        taps=chosen.taps,
        mask_token=chosen.mask_token,
        num_layers=chosen.num_layers,
        block_len=chosen.block_len,
        head=HEADS[head](rank=chosen.rank),
        warm_start_sequences=256 if target == SMALL else 0,
        draft_vocab_size=chosen.draft_vocab_size,
    )
    return run_on(target, "dspark", recipe, loss)
