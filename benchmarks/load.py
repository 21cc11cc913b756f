"""Speed under load: tokens/s of every scheduler at every number of concurrent requests, in a closed loop.

    python benchmarks/load.py --concurrency 1 2 4 8 16 32 64 --json load.json --plot load.png

At every concurrency the schedulers take turns in one process, in another order each time, so that a slow
minute of the machine hits all of them. A turn keeps exactly so many requests going, on the same prompts for
all, until the prompts run out; what is then still going is cut off. Greedy, float32; prefills count,
compilation and measuring of costs do not. Every turn is written down, and a run that was stopped goes on
where it was. `--transformers` instead compares plain decoding with transformers' batched generate.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from dspark_jax.checkpoints.drafter import LoadedDrafter, load_drafter
from dspark_jax.checkpoints.targets import LoadedTarget, load_target
from dspark_jax.core.files import atomic_write
from dspark_jax.core.user_cache import keep_compiled_programs
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import SHIPPED, drafter_directory, make_engine
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.evaluation.plotting import COLOURS, light_grid, png
from dspark_jax.evaluation.prompts import choose_prompts, read_evaluation_prompts
from dspark_jax.evaluation.provenance import plain_settings, provenance
from dspark_jax.speculation.sampling import Draw
from dspark_jax.speculation.schedule import Lagged, Scheduler
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength

PLAIN, LAGGED, TRANSFORMERS = "plain", "lagged", "transformers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What to measure."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Requests at the same time."""
    target: str = "smollm2-135m"
    """Target model."""
    drafter: str = SHIPPED
    """Drafter directory, or "shipped"."""
    calibration: Path | None = None
    """Temperatures for the confidences (`dspark calibrate`)."""
    prompts: tuple[Path, ...] = ()
    """Prompt files or evaluation sets; by default ../shared/prompts, else examples/prompts.jsonl."""
    max_prompt_tokens: int = 128
    """Longer prompts are left out."""
    max_new_tokens: int = 128
    """Longest answer."""
    requests_per_turn: int = 3
    """Requests of a turn, as a multiple of the concurrency."""
    smallest_turn: int = 6
    """Requests of a turn at least."""
    repetitions: int = 5
    """Turns of every scheduler at every concurrency."""
    lengths: tuple[int, ...] | None = None
    """Fixed verify lengths; None: all up to the block."""
    threshold: float = 0.5
    """Of the confidence threshold."""
    json: Path | None = None
    """Write every turn and the figures here, after each turn; go on from what is there."""
    plot: Path | None = None
    """Draw the figures as a PNG."""
    transformers: bool = False
    """Compare plain decoding at the largest concurrency with transformers' batched generate (torch)."""


class Contest:
    """The schedulers at one concurrency."""

    def __init__(self, config: Load, target: LoadedTarget, draft: LoadedDrafter, concurrency: int):
        self._config, self._concurrency = config, concurrency
        shapes = {
            "slots": concurrency,
            "max_context": config.max_prompt_tokens + config.max_new_tokens,
            "share_prefixes": False,
        }
        self.engines = {PLAIN: make_engine(target, None, EngineConfig(**shapes))}
        self.engines |= {
            name: make_engine(target, draft, EngineConfig(**shapes, policy=policy))
            for name, policy in policies_of(config, draft).items()
        }
        if config.calibration:
            content = json.loads(config.calibration.read_text())
            self.engines[LAGGED].calibrate(np.array([content["temperatures"], content["shifts"]]))
        # Not what some other hour has left on the disk.
        self.engines[LAGGED].cost_table(afresh=True)
        self.engines[LAGGED].warm_up((), draws=[Draw.GREEDY])
        for engine in self.engines.values():
            engine.free_memory()

    def turn(self, name: str, requests: Sequence[Request]) -> dict:
        """One scheduler on these requests."""
        engine = self.engines[name]
        compiled_s, start_s = engine.compile_s, time.perf_counter()
        before = collections.Counter(engine.budgets)
        waiting = iter(requests)
        for _ in range(self._concurrency):
            engine.submit(next(waiting))
        going = list(requests)
        while True:
            finished = engine.step()
            following = [request for _, request in zip(finished, waiting, strict=False)]
            for request in following:
                engine.submit(request)
            if len(following) < len(finished):
                break
        seconds = time.perf_counter() - start_s - (engine.compile_s - compiled_s)
        tokens = sum(len(request.emitted) for request in requests)
        for request in going:
            if not request.ended:
                engine.cancel(request)
        while engine.has_work:
            engine.step()
        engine.free_memory()
        rounds = [accepted for request in requests for accepted in request.accepted_per_round]
        budgets = engine.budgets - before
        return {
            "scheduler": name,
            "concurrency": self._concurrency,
            "tokens": tokens,
            "seconds": seconds,
            "accepted_length": 1 + statistics.fmean(rounds) if rounds else None,
            "budget": sum(b * n for b, n in budgets.items()) / max(budgets.total(), 1),
        }


def policies_of(config: Load, draft: LoadedDrafter) -> dict[str, Scheduler]:
    """Every scheduler but plain decoding."""
    G = draft.drafter.config.block_len
    lengths = range(1, G + 1) if config.lengths is None else config.lengths
    return {
        **{f"fixed {length}": FixedLength(length=length) for length in lengths},
        "threshold": ConfidenceThreshold(threshold=config.threshold),
        LAGGED: Lagged(),
    }


def requests_of(prompts: Sequence[list[int]], start: int, count: int, config: Load, target) -> list[Request]:
    """So many greedy requests, from prompt number `start` on."""
    return [
        Request(
            id=str(number),
            prompt_tokens=prompts[number % len(prompts)],
            max_new_tokens=config.max_new_tokens,
            stop_ids=frozenset(target.eos_ids),
            sampling=SamplingOptions(temperature=0.0),
        )
        for number in range(start, start + count)
    ]


def load_prompts(config: Load, target: LoadedTarget) -> list[list[int]]:
    """Token ids of real prompts that no drafter was trained on, as far as there are any."""
    chat = ChatTemplate(tokenizer=target.tokenizer)

    def render(text: str) -> list[int]:
        return chat.render_prompt([{"role": "user", "content": text}])

    shared = sorted(Path("../shared/prompts").glob("*.jsonl*"))
    if paths := config.prompts or shared:
        candidates = read_evaluation_prompts(paths)
        chosen = choose_prompts(
            candidates, 64, lambda prompt: len(render(prompt.text)) <= config.max_prompt_tokens
        )
        texts = [prompt.text for prompt in chosen]
    else:
        print("no ../shared/prompts: the example prompts are used instead")
        lines = Path("examples/prompts.jsonl").read_text().splitlines()
        texts = [json.loads(line)["prompt"] for line in lines]
    prompts = [tokens for tokens in map(render, texts) if len(tokens) <= config.max_prompt_tokens]
    random.Random(0).shuffle(prompts)
    return prompts


def turns_of(config: Load, target, draft, prompts, done: list[dict]) -> Iterator[dict]:
    """Every turn that is not done yet."""
    counted = collections.Counter((turn["scheduler"], turn["concurrency"]) for turn in done)
    for concurrency in config.concurrency:
        names = sorted([PLAIN, *policies_of(config, draft)])
        count = max(concurrency * config.requests_per_turn, config.smallest_turn)
        turns = [
            (repetition, name)
            for repetition in range(config.repetitions)
            for name in random.Random(repetition).sample(names, len(names))
            if counted[name, concurrency] <= repetition
        ]
        if not turns:
            continue
        contest = Contest(config, target, draft, concurrency)
        for name in names:  # compiles, and is not counted
            contest.turn(name, requests_of(prompts, 0, concurrency + 1, config, target))
        for repetition, name in tqdm(turns, desc=f"concurrency {concurrency}", unit="turn"):
            requests = requests_of(prompts, repetition * count, count, config, target)
            yield {"repetition": repetition, **contest.turn(name, requests)}


def figures(turns: list[dict]) -> list[dict]:
    """One row for every scheduler and concurrency."""
    groups = collections.defaultdict(list)
    for turn in turns:
        groups[turn["concurrency"], turn["scheduler"]].append(turn)
    rows = []
    for (concurrency, scheduler), of_group in sorted(groups.items()):
        speeds = [turn["tokens"] / turn["seconds"] for turn in of_group]
        lengths = [turn["accepted_length"] for turn in of_group if turn["accepted_length"]]
        tokens_per_s = sum(turn["tokens"] for turn in of_group) / sum(turn["seconds"] for turn in of_group)
        rows.append(
            {
                "scheduler": scheduler,
                "concurrency": concurrency,
                "tokens_per_s": tokens_per_s,
                "tokens_per_s_per_request": tokens_per_s / concurrency,
                "slowest": min(speeds),
                "fastest": max(speeds),
                "accepted_length": statistics.fmean(lengths) if lengths else None,
                "budget": statistics.fmean(turn["budget"] for turn in of_group),
            }
        )
    return rows


def show(rows: list[dict]) -> None:
    """The figures for a terminal: tokens/s, and how lagged compares."""
    for concurrency in sorted({row["concurrency"] for row in rows}):
        speeds = {r["scheduler"]: r["tokens_per_s"] for r in rows if r["concurrency"] == concurrency}
        print(f"\nconcurrency {concurrency}")
        for name, speed in sorted(speeds.items(), key=lambda item: -item[1]):
            print(f"  {name:12s}{speed:8.1f} tokens/s {speed / speeds.get(PLAIN, speed):6.2f} of plain")
        others = [speed for name, speed in speeds.items() if name != LAGGED]
        if LAGGED in speeds and others:
            print(f"  lagged is {speeds[LAGGED] / max(others):.3f} of the best of the others")


def draw(rows: list[dict], path: Path) -> None:
    """Aggregate tokens/s against tokens/s of a request; the budget against concurrency."""
    with png(path, width=11, height=4.5) as figure:
        speed, budget = figure.subplots(1, 2)
        for axes in (speed, budget):
            light_grid(axes)
        names = sorted({row["scheduler"] for row in rows}, key=lambda name: (name == LAGGED, name))
        for number, name in enumerate(names):
            own = [row for row in rows if row["scheduler"] == name]
            style = {"color": COLOURS[0], "linewidth": 2.5} if name == LAGGED else {"linewidth": 1}
            if name == PLAIN:
                style = {"color": COLOURS[6], "linewidth": 1.5}
            elif name != LAGGED:
                style["color"] = COLOURS[1 + number % 5]
            per_request = [row["tokens_per_s_per_request"] for row in own]
            speed.plot(per_request, [row["tokens_per_s"] for row in own], "o-", ms=3, label=name, **style)
            if name != PLAIN:
                at = [row["concurrency"] for row in own]
                budget.plot(at, [row["budget"] / row["concurrency"] for row in own], "o-", ms=3, **style)
        speed.set_xlabel("tokens/s of each request")
        speed.set_ylabel("tokens/s of all requests")
        speed.set_xscale("log")
        speed.xaxis.set_major_formatter("{x:g}")
        speed.set_title("Speed under load")
        speed.legend(frameon=False, fontsize=8)
        budget.set_xscale("log", base=2)
        budget.set_xticks(ticks := sorted({row["concurrency"] for row in rows}), map(str, ticks))
        budget.minorticks_off()
        budget.set_xlabel("concurrent requests")
        budget.set_ylabel("verified draft tokens per request and round")
        budget.set_title("What the schedulers verify")


def against_transformers(config: Load, target: LoadedTarget, prompts: list[list[int]]) -> list[dict]:
    """Total seconds for the same prompts: our plain engine, and batches of transformers' generate."""
    import torch
    from transformers import AutoModelForCausalLM

    from dspark_jax.checkpoints.embedded import fetch_embedded_target

    slots = max(config.concurrency)
    file = fetch_embedded_target()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    engine_config = EngineConfig(slots=slots, max_context=config.max_prompt_tokens + config.max_new_tokens)
    engine = make_engine(target, None, engine_config)
    pad, count = target.tokenizer.pad_token_id or 0, slots * config.requests_per_turn

    def ours(start: int) -> int:
        requests = list(engine.run(requests_of(prompts, start, count, config, target)))
        return sum(len(request.emitted) for request in requests)

    def theirs(start: int) -> int:
        tokens = 0
        for first in range(start, start + count, slots):
            batch = [prompts[number % len(prompts)] for number in range(first, first + slots)]
            width = max(map(len, batch))
            ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            with torch.inference_mode():
                answers = model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=config.max_new_tokens,
                    do_sample=False,
                    eos_token_id=list(target.eos_ids),
                    pad_token_id=pad,
                )
            for answer in answers[:, width:].tolist():
                ends = [answer.index(stop) + 1 for stop in target.eos_ids if stop in answer]
                tokens += min([*ends, len(answer)])
        return tokens

    ours(0)  # compiles
    turns = []
    for repetition in tqdm(range(config.repetitions), desc="against transformers", unit="turn"):
        for name, contestant in ((PLAIN, ours), (TRANSFORMERS, theirs)):
            compiled_s, start_s = engine.compile_s, time.perf_counter()
            tokens = contestant(repetition * count)
            seconds = time.perf_counter() - start_s - (engine.compile_s - compiled_s)
            turns.append(
                {
                    "scheduler": name,
                    "concurrency": slots,
                    "repetition": repetition,
                    "tokens": tokens,
                    "seconds": seconds,
                    "accepted_length": None,
                    "budget": 0.0,
                }
            )
    total = {
        name: sum(t["seconds"] for t in turns if t["scheduler"] == name) for name in (PLAIN, TRANSFORMERS)
    }
    print(f"total time: transformers / ours = {total[TRANSFORMERS] / total[PLAIN]:.2f}")
    return turns


def main(config: Load) -> None:
    """Runs what is missing, reports."""
    settings = plain_settings(dataclasses.replace(config, json=None, plot=None))
    turns: list[dict] = []
    if config.json and config.json.is_file():
        stored = json.loads(config.json.read_text())
        if stored["config"] == settings:
            turns = stored["turns"]
    target = load_target(config.target)
    prompts = load_prompts(config, target)

    def report() -> None:
        if config.json:
            with atomic_write(config.json, "w") as file:
                content = {**provenance(), "config": settings, "rows": figures(turns), "turns": turns}
                json.dump(content, file, indent=1)

    if config.transformers:
        turns = against_transformers(config, target, prompts)
    else:
        draft = load_drafter(drafter_directory(config.target, config.drafter))
        for turn in turns_of(config, target, draft, prompts, turns):
            turns.append(turn)
            report()
    report()
    show(figures(turns))
    if config.plot:
        draw(figures(turns), config.plot)


if __name__ == "__main__":
    keep_compiled_programs()
    main(tyro.cli(Load, description=__doc__))
