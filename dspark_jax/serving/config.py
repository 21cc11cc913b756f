"""The flags of `serve.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dspark_jax.core.errors import InputError
from dspark_jax.engine.load import SHIPPED
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength, FullBlock, VerifyPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Answer every prompt of a JSON lines file by speculative decoding, losslessly."""

    input: Path
    """JSON lines: "prompt" or "messages"; optional "id", "domain", "temperature", "top_k", "top_p", "min_p",
    "seed", "max_new_tokens"."""
    output: Path
    """JSON lines: the answers. Grows as OUTPUT.partial and gets its name when it is complete."""
    target: str = "smollm2-135m"
    """Target model: embedded name, .gguf file, Hugging Face directory or hub id."""
    drafter: str = SHIPPED
    """Drafter directory, "shipped", or "none" for plain decoding."""
    slots: int = 4
    """Requests decoded at the same time."""
    max_context: int = 1024
    """Longest prompt plus answer, in tokens."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float | None = None
    """0 is greedy. By default what the target's generation_config recommends, else 0."""
    top_k: int | None = None
    """Draw among the k most likely tokens; 0 is off. Default: as recommended, else off."""
    top_p: float | None = None
    """Draw among the fewest tokens of this probability; 1 is off. Default: as recommended, else off."""
    min_p: float | None = None
    """Drop tokens below this share of the likeliest; 0 is off. Default: as recommended, else off."""
    seed: int = 0
    """With a line's id it decides the line's draws."""
    verify_tokens: int | None = None
    """Verify this many drafted tokens in every round; by default the full block."""
    confidence_threshold: float | None = None
    """Verify up to the first drafted token with a confidence below this."""
    order: Literal["input", "completion"] = "input"
    """Order of the answers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype in which the models run."""
    thinking: bool = False
    """Let targets think whose chat template leaves the choice."""
    self_check: bool = True
    """Try whether the drafter fits the target, and stop if it does not."""

    def __post_init__(self):
        if self.verify_tokens is not None and self.confidence_threshold is not None:
            raise InputError(
                given="both verify_tokens and confidence_threshold",
                expected="at most one rule for how much is verified",
                fix="leave one of them out",
            )
        if self.max_new_tokens < 1:
            raise InputError(
                given=f"max_new_tokens={self.max_new_tokens}",
                expected="at least 1",
                fix="raise max_new_tokens",
            )

    @property
    def policy(self) -> VerifyPolicy:
        """How many drafted tokens of a block are verified."""
        if self.verify_tokens is not None:
            return FixedLength(length=self.verify_tokens)
        if self.confidence_threshold is not None:
            return ConfidenceThreshold(threshold=self.confidence_threshold)
        return FullBlock()

    def sampling(self, generation: Mapping[str, Any]) -> SamplingOptions:
        """How a line is answered that says nothing else.

        Args:
          generation: fields of the target's generation_config.json; they count if it recommends sampling.
        """
        options: dict[str, Any] = {"temperature": 0.0}
        if generation.get("do_sample"):
            options = {"temperature": 1.0, **generation}
        options |= {name: value for name, value in vars(self).items() if value is not None}
        names = {field.name for field in dataclasses.fields(SamplingOptions)}
        return SamplingOptions(**{name: options[name] for name in names if options.get(name) is not None})
