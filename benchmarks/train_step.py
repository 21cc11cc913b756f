"""One training step against the same step in plain PyTorch, on this CPU: `python benchmarks/train_step.py`.

Both sides start from the same weights and must give the same losses, or the comparison means nothing. They
live in processes of their own and take turns, so that what else the machine does hits both; the medians are
compared. Peak memory is the resident memory of a process while it trains, over what it had before its first
array.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

Side = Literal["jax", "torch"]
SIDES: tuple[Side, ...] = ("jax", "torch")
LEARNING_RATE = 1e-3
REQUIRED_SPEED, REQUIRED_MEMORY = 2.0, 1 / 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Sizes of the step."""

    batch_size: int = 4
    """Sequences."""
    length: int = 512
    """Tokens per sequence."""
    anchors: int = 64
    """Draft blocks per sequence."""
    block_len: int = 7
    vocab_size: int = 32_000
    width: int = 256
    target_layers: int = 4
    drafter_layers: int = 5
    rank: int = 64
    loss_chunk: int = 32
    """Ours: rows per sequence whose logits exist at the same time."""
    block_chunk: int = 16
    """Ours: blocks per sequence whose activations exist at the same time."""
    steps: int = 7
    """Timed steps of each side, after two to warm up."""
    worker: Side | None = None
    """Internal: be one of the two processes."""
    json: Path | None = None
    """Also write the figures here."""


def make_batch(config: TrainStep) -> dict[str, np.ndarray]:
    """Random tokens, of which the first eighth is a prompt."""
    from dspark_jax.data.anchors import sample_anchors

    rng = np.random.default_rng(0)
    B, T = config.batch_size, config.length
    mask_BT = np.tile(np.arange(T) >= T // 8, (B, 1))
    anchors, keep = zip(*(sample_anchors(rng, mask_T, config.anchors) for mask_T in mask_BT), strict=True)
    return {
        "tokens_BT": rng.integers(0, config.vocab_size - 1, (B, T)).astype(np.int32),
        "loss_mask_BT": mask_BT,
        "anchors_BA": np.stack(anchors),
        "keep_BA": np.stack(keep),
    }


def networks(config: TrainStep) -> tuple[Any, Any, Any]:
    """(target's dimensions, drafter's, the drafter)."""
    from dspark_jax.drafters.config import DSparkConfig, Markov
    from dspark_jax.drafters.dspark import DSpark
    from dspark_jax.nn.config import BlockConfig
    from dspark_jax.nn.rope import DefaultRope
    from dspark_jax.targets.config import DecoderConfig

    D = config.width
    block = BlockConfig(
        width=D,
        mlp_width=3 * D,
        num_heads=D // 64,
        num_kv_heads=D // 128,
        head_dim=64,
        rope=DefaultRope(theta=1e4),
    )
    target = DecoderConfig(
        family="llama",
        vocab_size=config.vocab_size,
        layers=(block,) * config.target_layers,
        tie_embeddings=True,
        max_positions=config.length,
    )
    drafter = DSparkConfig(
        target_vocab_size=config.vocab_size,
        vocab_size=config.vocab_size,
        num_layers=config.drafter_layers,
        block=block,
        taps=tuple(range(0, config.target_layers)),
        block_len=config.block_len,
        mask_token=config.vocab_size - 1,
        head=Markov(rank=config.rank),
    )
    return target, drafter, DSpark(drafter)


def weights_np(config: TrainStep) -> tuple[dict, dict]:
    """Random weights of target and drafter, the same in every process."""
    import flax.linen as nn
    import jax

    from dspark_jax.targets.decoder import Decoder

    target, _, drafter = networks(config)
    tokens = np.zeros((1, 1), np.int32)
    variables: Any = jax.jit(Decoder(target).init)(jax.random.key(0), tokens)
    trained: Any = jax.jit(drafter.init)(jax.random.key(1))
    both = nn.meta.unbox((variables["params"], trained))
    return jax.tree.map(np.asarray, both)


def jax_step(config: TrainStep, weights: tuple[dict, dict]) -> Callable[[], float]:
    """Our step: each call trains once and returns the loss."""
    import jax
    import jax.numpy as jnp
    import optax

    from dspark_jax.drafters.contract import SharedWeights
    from dspark_jax.targets.decoder import embedding_table, lm_head_kernel
    from dspark_jax.training.config import LossConfig
    from dspark_jax.training.state import Frozen, TrainBatch, TrainState
    from dspark_jax.training.step import train_step

    target, _, drafter = networks(config)
    target_params, params = jax.tree.map(jnp.asarray, weights)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    shared = SharedWeights.cut(
        embedding_table(target_params), lm_head_kernel(target_params), None, target.scaling
    )
    frozen = Frozen(target_params=target_params, shared=shared)
    loss = LossConfig(chunk=config.loss_chunk, block_chunk=config.block_chunk)
    step = jax.jit(
        functools.partial(train_step, drafter=drafter, optimizer=optimizer, target=target, loss=loss),
        donate_argnums=0,
    )
    batch = TrainBatch.from_host(make_batch(config))

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batch, frozen)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return run


def torch_step(config: TrainStep, weights: tuple[dict, dict]) -> Callable[[], float]:
    """The plain step in PyTorch."""
    import torch
    from torch_train_step import Dimensions, Step

    target, drafter, _ = networks(config)
    block = target.block
    dimensions = Dimensions(
        num_heads=block.num_heads,
        num_kv_heads=block.num_kv_heads,
        head_dim=block.head_dim,
        target_layers=config.target_layers,
        drafter_layers=config.drafter_layers,
        taps=drafter.taps,
        block_len=config.block_len,
        mask_token=drafter.mask_token,
    )
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    step = Step(*weights, dimensions, learning_rate=LEARNING_RATE)
    return functools.partial(step, make_batch(config))


def status_bytes(field: str) -> int:
    """VmRSS (resident now) or VmHWM (the most since the last reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def work(config: TrainStep) -> None:
    """One side: trains a step for every line that arrives, and answers with seconds, loss and peak memory."""
    if config.worker == "torch":
        import torch  # noqa: F401  what an import costs is not the step's
    weights = weights_np(config)
    before_bytes = status_bytes("VmRSS")
    step = {"jax": jax_step, "torch": torch_step}[config.worker or "jax"](config, weights)
    for number, _ in enumerate(sys.stdin):
        if number == 2:  # compiled and warm: give back what the compiler took
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        start_s = time.perf_counter()
        loss = step()
        row = {"seconds": time.perf_counter() - start_s, "loss": loss}
        print(json.dumps({**row, "peak_bytes": status_bytes("VmHWM") - before_bytes}), flush=True)


def main(config: TrainStep) -> None:
    """Runs both sides in turn, prints the figures, and fails when they are not what is promised."""
    from dspark_jax.core.files import atomic_write
    from dspark_jax.evaluation.provenance import provenance

    command = [sys.executable, *sys.argv, "--worker"]
    workers = {
        side: subprocess.Popen([*command, side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for side in SIDES
    }
    rows: dict[str, list[dict]] = {side: [] for side in SIDES}
    for _ in range(config.steps + 2):
        for side, worker in workers.items():
            assert worker.stdin and worker.stdout
            print("step", file=worker.stdin, flush=True)
            rows[side].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.communicate()

    first = [rows[side][0]["loss"] for side in SIDES]
    assert abs(first[0] - first[1]) < 1e-4 * first[1], f"not the same step: losses {first}"
    figures = {
        side: {
            "median_s": statistics.median(row["seconds"] for row in rows[side][2:]),
            "peak_bytes": rows[side][-1]["peak_bytes"],
            "losses": [row["loss"] for row in rows[side]],
        }
        for side in SIDES
    }
    ours, plain = figures["jax"], figures["torch"]
    speed, memory = plain["median_s"] / ours["median_s"], ours["peak_bytes"] / plain["peak_bytes"]
    about = provenance()
    print(f"{about['date']}, {about['machine']['cpu']}, jax {about['versions']['jax']}")
    for side, found in figures.items():
        print(
            f"{side:6s}{found['median_s']:7.2f} s per step, peak {found['peak_bytes'] / 2**20:6.0f} MiB, "
            f"loss {found['losses'][0]:.5f} -> {found['losses'][-1]:.5f}"
        )
    print(f"{speed:.2f} times faster, {memory:.2f} of the memory")
    if config.json:
        options = {name: value for name, value in dataclasses.asdict(config).items() if name != "json"}
        with atomic_write(config.json, "w") as file:
            json.dump({**about, "config": options, "figures": figures}, file, indent=2)
    if speed < REQUIRED_SPEED or memory > REQUIRED_MEMORY:
        sys.exit(f"promised: {REQUIRED_SPEED:g} times faster with {REQUIRED_MEMORY:.2f} of the memory")


if __name__ == "__main__":
    parsed = tyro.cli(TrainStep, description=__doc__)
    work(parsed) if parsed.worker else main(parsed)
