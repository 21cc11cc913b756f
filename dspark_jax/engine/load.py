"""From names on the command line to an engine that is ready to run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dspark_jax.checkpoints.drafter import LoadedDrafter, load_drafter
from dspark_jax.checkpoints.shipped import shipped_drafter
from dspark_jax.checkpoints.targets import LoadedTarget, load_target
from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.state import Weights
from dspark_jax.targets.decoder import embedding_table, lm_head_kernel

SHIPPED, NONE = "shipped", "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedEngine:
    """An engine with what belongs to it on the host.

    Attributes:
      engine: ready to take requests.
      target: the loaded target, tokenizer included.
      chat: its chat template.
    """

    engine: Engine
    target: LoadedTarget
    chat: ChatTemplate


def load_engine(*, target: str, drafter: str, config: EngineConfig) -> LoadedEngine:
    """Loads a target and a drafter.

    Args:
      target: embedded name, .gguf file, Hugging Face directory or hub id.
      drafter: directory or hub id of a drafter, "shipped" for the one in this repository, or "none" for plain
        decoding.
      config: shapes and policy.
    """
    loaded = load_target(target, dtype=config.dtype)
    draft = None
    if drafter != NONE:
        draft = load_drafter(
            shipped_drafter(target) if drafter == SHIPPED else Path(drafter), dtype=config.dtype
        )
    engine = make_engine(loaded, draft, config)
    return LoadedEngine(engine=engine, target=loaded, chat=ChatTemplate(tokenizer=loaded.tokenizer))


def make_engine(target: LoadedTarget, draft: LoadedDrafter | None, config: EngineConfig) -> Engine:
    """An engine over loaded models; without a drafter it decodes plainly.

    Raises:
      InputError: the drafter was made for another target.
    """
    if draft is None:
        weights = Weights(target=target.params, drafter=None, shared=None)
        return Engine(target=target.config, drafter=None, weights=weights, config=config)
    made_for = draft.drafter.config
    sizes = (made_for.target_vocab_size, made_for.block.width)
    if sizes != (target.config.vocab_size, target.config.block.width):
        raise InputError(
            given=f"a drafter for vocabulary and width {sizes}",
            expected=f"{(target.config.vocab_size, target.config.block.width)}, as the target has",
            fix="use the drafter that was trained for this target",
        )
    shared = draft.shared_weights(embedding_table(target.params), lm_head_kernel(target.params))
    weights = Weights(target=target.params, drafter=draft.params, shared=shared)
    return Engine(target=target.config, drafter=draft.drafter, weights=weights, config=config)
