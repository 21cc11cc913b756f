"""Full-block decoding of held-out prompts: the run that evaluation and calibration have in common."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dspark_jax.core.errors import require
from dspark_jax.data.sources import Prompt
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import SHIPPED, LoadedEngine, load_engine
from dspark_jax.evaluation.prompts import choose_prompts, read_evaluation_prompts
from dspark_jax.evaluation.suites import read_suites, suite_limits
from dspark_jax.speculation.verify_length import FullBlock

PROMPTS_PER_DOMAIN = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationPrompts:
    """What is decoded.

    Attributes:
      prompts: the chosen prompts.
      missing_suites: suites that were asked for with "all" and have no file.
    """

    prompts: list[Prompt]
    missing_suites: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutRun:
    """What is decoded, by which models."""

    prompts: tuple[Path, ...] = ()
    """Prompt files (only their held-out prompts are used) or own evaluation sets, lines {"turns": [...]}."""
    suites: tuple[str, ...] = ()
    """Benchmarks of the paper: gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench, alpaca,
    arena-hard, or all."""
    data_dir: Path | None = None
    """Directory with NAME.jsonl for every suite; None: from the hub, with `datasets`."""
    target: str = "smollm2-135m"
    """Target model: embedded name, .gguf file, Hugging Face directory or hub id."""
    drafter: str = SHIPPED
    """Drafter directory, "shipped", or "none" for plain decoding."""
    thinking: bool = False
    """Let targets think whose chat template leaves the choice."""
    num_prompts_per_domain: int | None = None
    """Prompts of every domain, always the same ones; None: as many as the paper takes of a suite, and 32 of
    any other domain."""
    max_new_tokens: int = 128
    """Longest answer."""
    max_prompt_tokens: int = 256
    """Longer prompts are left out."""
    slots: int = 16
    """Requests decoded at the same time."""
    seed: int = 0
    """Decides the draws at temperatures above 0, and the bootstrap."""
    dtype: str = "float32"
    """dtype in which the models run."""
    self_check: bool = True
    """Try whether the drafter fits the target, and stop if it does not."""

    def __post_init__(self):
        require(
            bool(self.prompts or self.suites),
            given="neither --prompts nor --suites",
            expected="something to decode",
            fix="pass prompt files, or names of suites",
        )

    def load(self) -> tuple[LoadedEngine, EvaluationPrompts]:
        """The engine and the prompts that it can hold."""
        candidates = read_evaluation_prompts(self.prompts) if self.prompts else []
        missing: tuple[str, ...] = ()
        if self.suites:
            of_suites = read_suites(self.suites, self.data_dir)
            candidates += of_suites.prompts
            missing = of_suites.missing
        loaded = load_engine(
            target=self.target,
            drafter=self.drafter,
            config=EngineConfig(
                slots=self.slots,
                max_context=self.max_prompt_tokens + self.max_new_tokens,
                policy=FullBlock(),
                dtype=self.dtype,
            ),
            check=self.self_check,
            thinking=self.thinking,
        )

        def fits(prompt: Prompt) -> bool:
            tokens = loaded.chat.render_prompt([{"role": "user", "content": prompt.text}])
            return len(tokens) <= self.max_prompt_tokens

        limits = suite_limits()
        wanted = {
            prompt.domain: self.num_prompts_per_domain or limits.get(prompt.domain, PROMPTS_PER_DOMAIN)
            for prompt in candidates
        }
        chosen = choose_prompts(candidates, wanted, fits)
        return loaded, EvaluationPrompts(prompts=chosen, missing_suites=missing)
