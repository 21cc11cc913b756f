"""A drafter in training, decoding for real: the accepted length that its loss only estimates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.targets import LoadedTarget, load_target
from dspark_jax.core.distributed import sum_over_processes
from dspark_jax.core.errors import require
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.data.sources import Prompt
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import LoadedEngine, make_engine
from dspark_jax.evaluation.prompts import choose_prompts, read_evaluation_prompts
from dspark_jax.evaluation.runner import measure
from dspark_jax.speculation.verify_length import FullBlock
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.loop import Snapshot


class TrainingEvaluation:
    """Decodes a fixed set of prompts with every snapshot of a run.

    Every process decodes its share of the prompts on one device of its own, which must hold the target beside
    its part of the training state. Where the run has a single device the target is shared with the training.

    Args:
      config: the run, with evaluation prompts.

    Raises:
      InputError: the prompts cannot be read.
    """

    def __init__(self, config: TrainConfig):
        self._config, self._settings = config, config.evaluation
        self._candidates = read_evaluation_prompts(self._settings.prompts)
        self._target: LoadedTarget | None = None
        self._prompts: list[Prompt] = []

    def __call__(self, snapshot: Snapshot) -> dict[str, float]:
        """Accepted length of every domain, `accepted_length/domain`, and their mean, `accepted_length`."""
        if self._target is None:
            self._target = self._on_one_device(snapshot.target)
            self._prompts = self._choose(ChatTemplate.of(self._target.tokenizer))
        draft = LoadedDrafter(
            drafter=snapshot.drafter,
            params=jax.tree.map(lambda x: jnp.asarray(x, self._config.dtype), snapshot.params),
            draft_to_target_np=snapshot.draft_to_target_np,
            embedding_VD=None,
            head_DV=None,
        )
        settings = self._settings
        engine_config = EngineConfig(
            slots=settings.slots,
            max_context=settings.max_prompt_tokens + settings.max_new_tokens,
            policy=FullBlock(),
            dtype=self._config.dtype,
        )
        loaded = LoadedEngine(
            engine=make_engine(self._target, draft, engine_config),
            target=self._target,
            chat=ChatTemplate.of(self._target.tokenizer),
        )
        domains = sorted({prompt.domain for prompt in self._prompts})
        mine = self._prompts[jax.process_index() :: jax.process_count()]
        measured = measure(
            loaded, mine, temperature=settings.temperature, max_new_tokens=settings.max_new_tokens
        )
        committed_np, rounds_np = np.zeros((2, len(domains)))
        for record in measured.records:
            domain = domains.index(record.domain)
            committed_np[domain] += record.committed_np.sum()
            rounds_np[domain] += len(record.committed_np)
        committed_np, rounds_np = sum_over_processes(np.stack([committed_np, rounds_np]))
        lengths_np = committed_np / np.maximum(rounds_np, 1)
        by_domain = {f"accepted_length/{name}": float(x) for name, x in zip(domains, lengths_np, strict=True)}
        return {"accepted_length": float(lengths_np.mean()), **by_domain}

    def _on_one_device(self, target: LoadedTarget) -> LoadedTarget:
        devices = {device for x in jax.tree.leaves(target.params) for device in x.sharding.device_set}
        return target if len(devices) == 1 else load_target(self._config.target, dtype=self._config.dtype)

    def _choose(self, chat: ChatTemplate) -> list[Prompt]:
        def fits(prompt: Prompt) -> bool:
            tokens = chat.render_prompt([{"role": "user", "content": prompt.text}])
            return len(tokens) <= self._settings.max_prompt_tokens

        chosen = choose_prompts(self._candidates, self._settings.num_prompts_per_domain, fits)
        require(
            bool(chosen),
            given=f"no evaluation prompt of at most {self._settings.max_prompt_tokens} tokens",
            expected="at least one",
            fix="raise --evaluation.max-prompt-tokens",
        )
        return chosen
