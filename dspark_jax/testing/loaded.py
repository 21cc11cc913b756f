"""Tiny models as they come from files, for tests of what loads models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.targets import LoadedTarget
from dspark_jax.testing.tiny import TinyDrafter, TinyTarget
from dspark_jax.testing.tokenizer import tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def as_loaded_target(
    tiny: TinyTarget, *, tokenizer: PreTrainedTokenizerFast | None = None, eos_ids: tuple[int, ...] = (2,)
) -> LoadedTarget:
    """A target of at least 259 tokens with the byte tokenizer."""
    return LoadedTarget(
        config=tiny.config,
        params=tiny.params,
        tokenizer=tokenizer or tiny_tokenizer(),
        identity="tiny",
        eos_ids=eos_ids,
        generation={},
        hf_config=tiny.hf_config,
    )


def as_loaded_drafter(tiny: TinyDrafter) -> LoadedDrafter:
    """A drafter of the whole vocabulary that shares the target's embedding and LM head."""
    return LoadedDrafter(
        drafter=tiny.drafter, params=tiny.params, draft_to_target_np=None, embedding_VD=None, head_DV=None
    )
