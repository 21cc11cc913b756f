"""What a training step holds at a time at true size, as compiled: `python benchmarks/train_memory.py`.

A drafter for Qwen3-4B (V = 151,936), features given. Nothing is allocated, nothing runs. Two claims:
four times the draft blocks at fixed chunk sizes need less than a tenth more memory, and the loss makes no
array larger than one chunk of logits beside the gradients that it returns.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import tyro
from loss_memory import QWEN3_4B, RECIPE, LossMemory, loss_arguments, split, step_shapes, value_and_grad

from dspark_jax.core.files import atomic_write
from dspark_jax.core.program_costs import largest_array_bytes
from dspark_jax.evaluation.provenance import provenance
from dspark_jax.losses import block_loss
from dspark_jax.training.config import LossConfig

ALLOWED_GROWTH = 1.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainMemory:
    """What to compile."""

    anchors: tuple[int, int] = (128, 512)
    """Draft blocks per sequence of the two steps."""
    tokens: int = 4096
    """Sequence length."""
    block_chunk: int = 64
    """Blocks per sequence whose activations exist at the same time."""
    loss_chunk: int = 128
    """Rows per sequence whose logits do."""
    json: Path | None = None
    """Also write the figures here."""


def step_bytes(anchors: int, config: TrainMemory) -> tuple[int, int]:
    """(peak, temporaries) of a whole step."""
    step, arguments = step_shapes(RECIPE, LossMemory(anchors=anchors, step_tokens=config.tokens))
    loss = LossConfig(chunk=config.loss_chunk, block_chunk=config.block_chunk)
    program = jax.jit(functools.partial(step, loss=loss), donate_argnums=0)
    memory = program.lower(*arguments).compile().memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return kept + memory.temp_size_in_bytes, memory.temp_size_in_bytes


def loss_array_bytes(config: TrainMemory) -> int:
    """The largest array that the loss of all blocks makes for itself."""
    rows = config.anchors[1] * RECIPE.block_len
    shapes = split(loss_arguments(rows, QWEN3_4B.block.width, RECIPE.head.rank, QWEN3_4B.vocab_size))
    # W2 and its gradient [R, V] would hide behind a chunk of more rows than R; without W2 nothing can hide.
    shapes[0].update(latent_BMR=None, w2_RV=None)
    loss = functools.partial(block_loss, chunk=config.loss_chunk)
    return largest_array_bytes(value_and_grad(loss).lower(*shapes).compile())


def main(config: TrainMemory) -> None:
    """Compiles, prints the figures, and fails when a claim does not hold."""
    about = provenance()
    print(f"{about['date']}, {about['machine']['cpu']}, jax {about['versions']['jax']}")
    chunk_bytes = 4 * config.loss_chunk * QWEN3_4B.vocab_size
    array_bytes = loss_array_bytes(config)
    print(f"loss: largest array {array_bytes / chunk_bytes:.2f} chunks of {chunk_bytes / 2**20:.0f} MiB")
    figures = {anchors: step_bytes(anchors, config) for anchors in config.anchors}
    for anchors, (peak, temporaries) in figures.items():
        print(
            f"step with {anchors} blocks of {RECIPE.block_len}: {peak / 2**30:.2f} GiB, "
            f"{temporaries / 2**30:.2f} of them temporaries"
        )
    growth = figures[config.anchors[1]][0] / figures[config.anchors[0]][0]
    print(f"{config.anchors[1] / config.anchors[0]:g} times the blocks, {growth:.3f} times the memory")
    if config.json:
        options = {name: value for name, value in dataclasses.asdict(config).items() if name != "json"}
        content = {"largest_loss_array_bytes": array_bytes, "chunk_bytes": chunk_bytes, "step_bytes": figures}
        with atomic_write(config.json, "w") as file:
            json.dump({**about, "config": options, **content}, file, indent=2)
    if growth > ALLOWED_GROWTH or array_bytes > chunk_bytes:
        sys.exit("a claim does not hold")


if __name__ == "__main__":
    main(tyro.cli(TrainMemory, description=__doc__))
