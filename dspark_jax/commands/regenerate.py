"""`dspark regenerate`: the target answers prompts itself; drafters must learn from its own words."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from dspark_jax.core.jsonl import JsonLinesLog
from dspark_jax.data.sources import Prompt, is_held_out, read_prompts
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import NONE, LoadedEngine, load_engine
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.speculation.verify_length import FullBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regenerate:
    """Write the target's responses to prompts as JSON lines; killed at any moment, it goes on later."""

    prompts: tuple[Path, ...]
    """Prompt files: JSONL or .jsonl.gz with id, domain, source, prompt."""
    output: Path
    """Response file: id, domain, source, template, prompt_ids, response_ids, finish."""
    target: str = "smollm2-135m"
    """Target model: embedded name, .gguf file, Hugging Face directory or hub id."""
    drafter: str = NONE
    """Drafter directory, "shipped" or "none": speculation changes the speed, not the law of the answers."""
    thinking: bool = False
    """Let targets think whose chat template leaves the choice; drafters serve the mode that they learnt."""
    temperature: float = 1.0
    """Sampling temperature."""
    max_new_tokens: int = 256
    """Longest response."""
    max_prompt_tokens: int = 192
    """Longer prompts are left out."""
    slots: int = 64
    """Requests decoded at the same time."""
    seed: int = 0
    """With the prompt's id it decides the response."""
    limit: int | None = None
    """Stop after this many responses in the file."""
    dtype: str = "float32"
    """dtype in which the models run."""
    self_check: bool = True
    """Try whether the drafter fits the target, and stop if it does not."""


def run(config: Regenerate) -> None:
    """Answers every prompt that the output does not hold yet, in an order that mixes the files."""
    prompts = [prompt for prompt in read_prompts(config.prompts) if not is_held_out(prompt.id)]
    prompts.sort(key=lambda prompt: hashlib.sha256(f"{config.seed}:{prompt.id}".encode()).digest())
    loaded = load_engine(
        target=config.target,
        drafter=config.drafter,
        config=EngineConfig(
            slots=config.slots,
            max_context=config.max_prompt_tokens + config.max_new_tokens,
            policy=FullBlock(),
            dtype=config.dtype,
        ),
        check=config.self_check,
        thinking=config.thinking,
    )
    log = JsonLinesLog(config.output)
    by_id = {prompt.id: prompt for prompt in prompts}
    limit = len(prompts) if config.limit is None else config.limit
    todo = [prompt for prompt in prompts if prompt.id not in log.done_ids]
    todo = todo[: max(limit - len(log.done_ids), 0)]
    tokens = 0
    with tqdm(total=len(todo), unit="response") as progress:
        for request in loaded.engine.run(_requests(todo, loaded, config)):
            prompt = by_id[request.id]
            assert request.finish_reason is not None  # the engine yields finished requests
            log.append(
                {
                    "id": prompt.id,
                    "domain": prompt.domain,
                    "source": prompt.source,
                    "template": loaded.chat.name,
                    "prompt_ids": request.prompt_tokens,
                    "response_ids": request.emitted,
                    "finish": request.finish_reason.value,
                }
            )
            tokens += len(request.emitted)
            progress.update()
            progress.set_postfix(tokens_per_s=f"{tokens / progress.format_dict['elapsed']:.0f}")
    log.close()


def _requests(prompts: list[Prompt], loaded: LoadedEngine, config: Regenerate) -> Iterator[Request]:
    for prompt in prompts:
        tokens = loaded.chat.render_prompt([{"role": "user", "content": prompt.text}])
        if len(tokens) <= config.max_prompt_tokens:
            digest = hashlib.sha256(f"{config.seed}:{prompt.id}".encode()).digest()
            yield Request(
                id=prompt.id,
                prompt_tokens=tokens,
                max_new_tokens=config.max_new_tokens,
                stop_ids=frozenset(loaded.target.eos_ids),
                sampling=SamplingOptions(
                    temperature=config.temperature, seed=int.from_bytes(digest[8:12], "big")
                ),
            )
