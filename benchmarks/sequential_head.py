"""What the heads of DSpark add to a round: a drafter against itself without them (DFlash), rounds in turns.

    python benchmarks/sequential_head.py --slots 1 32 --json sequential_head.json

Both engines verify whole blocks of greedy requests, so that their rounds differ in the sequential head
and the confidence head alone. They take turns round by round; the overhead is the median over pairs.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from dspark_jax.checkpoints.drafter import LoadedDrafter, load_drafter
from dspark_jax.checkpoints.targets import LoadedTarget, load_target
from dspark_jax.core.files import atomic_write
from dspark_jax.drafters.registry import make_drafter
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.load import SHIPPED, drafter_directory, make_engine
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.evaluation.provenance import plain_settings, provenance
from dspark_jax.speculation.verify_length import FullBlock

WITH, WITHOUT = "DSpark round", "DFlash round"
HEADS = ("head", "confidence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequentialHead:
    """What to measure."""

    target: str = "smollm2-135m"
    """Target model."""
    drafter: str = SHIPPED
    """DSpark drafter directory, or "shipped"."""
    slots: tuple[int, ...] = (1, 8, 32)
    """Requests decoded at the same time."""
    rounds: int = 40
    """Pairs of rounds."""
    prompt_tokens: int = 48
    """Length of every prompt."""
    json: Path | None = None
    """Also write the figures here."""


def without_heads(draft: LoadedDrafter) -> LoadedDrafter:
    """The same backbone as DFlash has it."""
    config = dataclasses.replace(draft.drafter.config, head=None, confidence=None)
    params = {name: values for name, values in draft.params.items() if name not in HEADS}
    return dataclasses.replace(draft, drafter=make_drafter(config), params=params)


def busy_engine(target: LoadedTarget, draft: LoadedDrafter, slots: int, config: SequentialHead) -> Engine:
    """An engine with a request in every slot, warmed up, that will not finish within the rounds to time."""
    block = draft.drafter.config.block_len + 1
    new_tokens = (config.rounds + 8) * block
    engine = make_engine(
        target,
        draft,
        EngineConfig(slots=slots, max_context=config.prompt_tokens + new_tokens, policy=FullBlock()),
    )
    generator = np.random.default_rng(0)
    for number in range(slots):
        tokens = generator.integers(100, 20_000, config.prompt_tokens).tolist()
        greedy = SamplingOptions(temperature=0.0)
        engine.submit(
            Request(id=str(number), prompt_tokens=tokens, max_new_tokens=new_tokens, sampling=greedy)
        )
    for _ in range(4):  # prefills, compiles, and fills whatever runs ahead
        engine.step()
    return engine


def main(config: SequentialHead) -> None:
    """Times both in turns at every batch, reports."""
    target = load_target(config.target)
    draft = load_drafter(drafter_directory(config.target, config.drafter))
    round_ms: dict[str, float] = {}
    overheads: dict[int, dict[str, float]] = {}
    for slots in config.slots:
        engines = {
            WITHOUT: busy_engine(target, without_heads(draft), slots, config),
            WITH: busy_engine(target, draft, slots, config),
        }
        times_ms = {name: np.zeros(config.rounds) for name in engines}
        for turn in tqdm(range(config.rounds), desc=f"batch {slots}", unit="pair"):
            # Whoever is first alternates: the caches of the machine belong to the one before.
            for name in list(engines)[:: 1 if turn % 2 else -1]:
                start_s = time.perf_counter()
                engines[name].step()
                times_ms[name][turn] = 1000 * (time.perf_counter() - start_s)
        for name, times in times_ms.items():
            round_ms[f"{name}, batch {slots}"] = float(np.median(times))
        ratios = times_ms[WITH] / times_ms[WITHOUT] - 1
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        overheads[slots] = {"median": float(middle), "quartile_1": float(low), "quartile_3": float(high)}
    for slots, overhead in overheads.items():
        print(
            f"batch {slots:3d}: {round_ms[f'{WITHOUT}, batch {slots}']:8.2f} ms without,"
            f" {round_ms[f'{WITH}, batch {slots}']:8.2f} ms with the heads:"
            f" {100 * overhead['median']:+.1f} % ({100 * overhead['quartile_1']:+.1f} .."
            f" {100 * overhead['quartile_3']:+.1f})"
        )
    if config.json:
        report = {
            "kind": "speed",
            **provenance(),
            "config": plain_settings(config),
            "round_ms": round_ms,
            "overhead": overheads,
        }
        with atomic_write(config.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main(tyro.cli(SequentialHead, description=__doc__))
