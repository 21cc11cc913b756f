"""Speed at batch 1, float32, greedy: plain, speculative with every verify length, and transformers.

    python benchmarks/speed.py --drafter DIR --transformers --json speed.json

Contestants take turns prompt by prompt in one process, so that a slow minute of the machine hits all of them.
Tokens/s include the prefill and exclude compilation. The round of the full block is then taken apart: its
stages as programs of their own, the fused round, and the engine's step around it, in turns as well.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.embedded import EMBEDDED_NAME, fetch_embedded_target
from dspark_jax.checkpoints.shipped import shipped_drafter
from dspark_jax.checkpoints.targets import LoadedTarget, load_target
from dspark_jax.core.files import atomic_write
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.load import SHIPPED
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.engine.state import Weights
from dspark_jax.evaluation.accepted_length import accepted_length
from dspark_jax.evaluation.provenance import plain_settings, provenance
from dspark_jax.evaluation.round_stages import RoundStages, take_round_apart
from dspark_jax.evaluation.runner import rounds_of
from dspark_jax.speculation.verify_length import FixedLength, FullBlock
from dspark_jax.targets.decoder import embedding_table, lm_head_kernel

PLAIN, FULL, TRANSFORMERS = "plain", "full block", "transformers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """What to measure."""

    target: str = EMBEDDED_NAME
    """Target model."""
    drafter: str = SHIPPED
    """Drafter directory, or "shipped"."""
    prompts: Path = Path("examples/prompts.jsonl")
    """JSON lines with a prompt each."""
    num_prompts: int | None = None
    """Only the first prompts of the file."""
    max_new_tokens: int = 128
    """Longest answer."""
    repetitions: int = 5
    """Times that every contestant answers every prompt."""
    lengths: tuple[int, ...] | None = None
    """Fixed verify lengths; None: all that are shorter than the block."""
    rounds: int = 200
    """Rounds to take apart."""
    transformers: bool = False
    """Also generate with transformers on torch CPU float32 (extra [parity])."""
    json: Path | None = None
    """Also write the figures here."""


def transformers_generate(target: str) -> Callable[[list[int], int], list[int]]:
    """(prompt, number of new tokens) -> the answer, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    place, options = target, {}
    if target == EMBEDDED_NAME:
        model_file = fetch_embedded_target()
        place, options = model_file.parent, {"gguf_file": model_file.name}
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options).eval()
    # Without a stop token it generates exactly as many tokens as ours did.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)
        return answer[0, len(prompt) :].tolist()

    return generate


def race(engines: dict[str, Engine], prompts: list[list[int]], target: LoadedTarget, config: Speed) -> dict:
    """Tokens/s, ratios to plain decoding and accepted lengths."""

    def answer(engine: Engine, prompt: list[int]) -> Request:
        request = Request(
            id="prompt",
            prompt_tokens=prompt,
            max_new_tokens=config.max_new_tokens,
            stop_ids=frozenset(target.eos_ids),
            sampling=SamplingOptions(temperature=0.0),
        )
        (finished,) = engine.run([request])
        return finished

    # The first answers warm everything up; greedy answers are the same ever after.
    answers = {name: [answer(engine, prompt) for prompt in prompts] for name, engine in engines.items()}
    expected = [request.emitted for request in answers[PLAIN]]
    contestants = {name: functools.partial(answer, engine) for name, engine in engines.items()}
    emitted = {name: [request.emitted for request in requests] for name, requests in answers.items()}
    if config.transformers:
        generate = transformers_generate(config.target)
        wanted = {tuple(prompt): len(tokens) for prompt, tokens in zip(prompts, expected, strict=True)}
        contestants[TRANSFORMERS] = lambda prompt: generate(prompt, wanted[tuple(prompt)])
        emitted[TRANSFORMERS] = [contestants[TRANSFORMERS](prompt) for prompt in prompts]

    seconds = {name: np.zeros(config.repetitions) for name in contestants}
    turns = [(repetition, prompt) for repetition in range(config.repetitions) for prompt in prompts]
    for repetition, prompt in tqdm(turns, desc="race", unit="prompt"):
        for name, contestant in contestants.items():
            start_s = time.perf_counter()
            contestant(prompt)
            seconds[name][repetition] += time.perf_counter() - start_s

    figures = {}
    for name, times in seconds.items():
        tokens = sum(map(len, emitted[name]))
        figures[name] = {
            "new_tokens": tokens,
            "tokens_per_s": spread(tokens / times),
            "over_plain": spread(tokens / times / (sum(map(len, expected)) / seconds[PLAIN])),
            "same_answers_as_plain": sum(a == b for a, b in zip(emitted[name], expected, strict=True)),
        }
        if name in answers:
            records = [rounds_of(request, domain="") for request in answers[name]]
            figures[name]["accepted_length"] = accepted_length(records)
    return figures


def spread(values) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": float(np.median(values)), "min": float(np.min(values)), "max": float(np.max(values))}


def show(about: dict, figures: dict, round_ms: dict[str, float], config: Speed) -> None:
    """The report for a terminal."""
    machine = about["machine"]
    print(f"\n{about['date']}, {machine['cpu']}, {machine['cores']} cores, jax {about['versions']['jax']}")
    print(f"batch 1, float32, greedy, median (min .. max) of {config.repetitions} interleaved repetitions\n")
    print(f"{'':16s}{'tokens/s':>22s}{'over plain':>22s}{'accepted length':>17s}{'answers as plain':>18s}")
    for name, row in figures.items():
        speed, ratio = _cell(row["tokens_per_s"], 1), _cell(row["over_plain"], 2)
        length = f"{row['accepted_length']:.2f}" if "accepted_length" in row else ""
        print(f"{name:16s}{speed:>22s}{ratio:>22s}{length:>17s}{row['same_answers_as_plain']:>18d}")
    print(f"\none round of the full block, median ms of {config.rounds} rounds")
    for name, value in round_ms.items():
        print(f"  {name:22s}{value:8.2f}")


def _cell(values: dict[str, float], digits: int) -> str:
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f} .. {values['max']:.{digits}f})"


def main(config: Speed) -> None:
    """Loads once, races, takes the round apart, reports."""
    target = load_target(config.target)
    draft = load_drafter(shipped_drafter(config.target) if config.drafter == SHIPPED else config.drafter)
    weights = Weights(
        target=target.params,
        drafter=draft.params,
        shared=draft.shared_weights(
            embedding_table(target.params), lm_head_kernel(target.params), target.config.scaling
        ),
    )
    chat = ChatTemplate(tokenizer=target.tokenizer)
    lines = config.prompts.read_text().splitlines()[: config.num_prompts]
    texts = [json.loads(line)["prompt"] for line in lines]
    prompts = [chat.render_prompt([{"role": "user", "content": text}]) for text in texts]
    max_context = max(map(len, prompts)) + config.max_new_tokens

    block_len = draft.drafter.config.block_len
    lengths = range(block_len) if config.lengths is None else config.lengths
    policies = {FULL: FullBlock(), **{f"fixed length {n}": FixedLength(length=n) for n in lengths}}
    plain = EngineConfig(max_context=max_context)
    plain_weights = weights.replace(drafter=None, shared=None)
    engines = {PLAIN: Engine(target=target.config, drafter=None, weights=plain_weights, config=plain)}
    for name, policy in policies.items():
        engine_config = EngineConfig(max_context=max_context, policy=policy)
        engines[name] = Engine(
            target=target.config, drafter=draft.drafter, weights=weights, config=engine_config
        )

    figures = race(engines, prompts, target, config)
    stages = RoundStages(target.config, draft.drafter, weights, engines[FULL].config)
    round_ms = take_round_apart(
        stages, engines[FULL], prompts, num_rounds=config.rounds, max_new_tokens=config.max_new_tokens
    )
    about = provenance()
    show(about, figures, round_ms, config)
    if config.json:
        report = {
            **about,
            "config": plain_settings(config),
            "block_len": block_len,
            "race": figures,
            "round_ms": round_ms,
        }
        with atomic_write(config.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main(tyro.cli(Speed, description=__doc__))
