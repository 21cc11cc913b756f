"""Full-block decoding of held-out prompts: the run that evaluation and calibration have in common."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dspark_jax.data.sources import Prompt
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import SHIPPED, LoadedEngine, load_engine
from dspark_jax.evaluation.prompts import choose_prompts, read_evaluation_prompts
from dspark_jax.speculation.verify_length import FullBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutRun:
    """What is decoded, by which models."""

    prompts: tuple[Path, ...]
    """Prompt files (only their held-out prompts are used) or evaluation sets with lines {"turns": [...]}."""
    target: str = "smollm2-135m"
    """Target model: embedded name, .gguf file, Hugging Face directory or hub id."""
    drafter: str = SHIPPED
    """Drafter directory, "shipped", or "none" for plain decoding."""
    thinking: bool = False
    """Let targets think whose chat template leaves the choice."""
    num_prompts_per_domain: int = 32
    """Prompts of every domain, always the same ones."""
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

    def load(self) -> tuple[LoadedEngine, list[Prompt]]:
        """The engine and the prompts that it can hold."""
        candidates = read_evaluation_prompts(self.prompts)
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

        return loaded, choose_prompts(candidates, self.num_prompts_per_domain, fits)
