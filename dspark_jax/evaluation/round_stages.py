"""A decoding round taken apart: its stages as programs of their own, the fused round, the engine's step."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dspark_jax.core.buckets import bucket_for
from dspark_jax.core.keys import request_key
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.engine import programs
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.engine.state import EngineState, Weights
from dspark_jax.speculation.sampling import Draw, SamplingParams
from dspark_jax.speculation.verify_length import FullBlock
from dspark_jax.targets.config import DecoderConfig


class RoundStages:
    """The programs of a greedy full-block round at batch 1, each timed from inputs to results at hand.

    Args:
      target: the target's dimensions.
      drafter: the drafter.
      weights: parameters of both.
      config: shapes, those of the engine that the stages are compared with.
    """

    def __init__(self, target: DecoderConfig, drafter: DSpark, weights: Weights, config: EngineConfig):
        self.models = models = programs.Models(target=target, drafter=drafter, dtype=config.dtype)
        plain_models = programs.Models(target=target, drafter=None, dtype=config.dtype)
        self.weights = weights
        self.times_ms: dict[str, list[float]] = {}
        self._config = config
        G = models.block_len
        self._prefill = jax.jit(
            functools.partial(programs.prefill, models=models, draw=Draw.GREEDY), donate_argnums=1
        )
        self.fused = jax.jit(
            functools.partial(
                programs.speculative_round, models=models, policy=FullBlock(), buckets=(G,), draw=Draw.GREEDY
            ),
            donate_argnums=1,
        )
        self.plain = jax.jit(
            functools.partial(programs.plain_round, models=plain_models, draw=Draw.GREEDY), donate_argnums=1
        )

        # Caches are arguments of their own, donated where a stage writes them, as the fused round does.
        def backbone(weights, context, rest):
            return drafter.block_hidden(
                weights.drafter, weights.shared, context, rest.anchors_B, rest.positions_B
            )

        def draft(weights, context, rest):
            return programs.draft(
                weights, dataclasses.replace(rest, context=context), drafter=drafter, draw=Draw.GREEDY
            )

        def verify(weights, cache, rest, block):
            return programs.verify(
                weights, dataclasses.replace(rest, cache=cache), block, models=models, bucket=G
            )

        def accept(weights, rest, block, logits_BTV):
            return programs.accept(weights, rest, block, logits_BTV, jnp.full(1, G), draw=Draw.GREEDY)

        def commit(weights, context, rest, output, verified):
            return programs.commit(
                weights, dataclasses.replace(rest, context=context), output, verified, drafter=drafter
            )

        self._backbone, self._draft, self._accept = jax.jit(backbone), jax.jit(draft), jax.jit(accept)
        self._verify, self._commit = (jax.jit(stage, donate_argnums=1) for stage in (verify, commit))

    def timed(self, name: str, program, *args):
        """Calls, waits, and notes the time."""
        start_s = time.perf_counter()
        result = jax.block_until_ready(program(*args))
        self.times_ms.setdefault(name, []).append(1000 * (time.perf_counter() - start_s))
        return result

    def start(self, prompt: Sequence[int]) -> EngineState:
        """The state behind a prompt."""
        buckets = self._config.prefill_buckets
        length = max(self._config.max_context + self.models.block_len + 1, buckets[-1])
        state = EngineState.create(
            self.models.target, self.models.drafter, slots=1, length=length, dtype=self._config.dtype
        )
        tokens_np = np.zeros((1, bucket_for(len(prompt), buckets)), np.int32)
        tokens_np[0, : len(prompt)] = prompt
        key_1 = request_key(0)[None]
        greedy = SamplingParams.greedy(1)
        state, _ = self._prefill(
            self.weights, state, np.int32(0), tokens_np, np.int32(len(prompt)), key_1, greedy
        )
        return jax.block_until_ready(state)

    def staged_round(self, state: EngineState) -> EngineState:
        """One round, stage by stage."""
        weights, rest = self.weights, dataclasses.replace(state, cache=None, context=None)
        self.timed("draft backbone", self._backbone, weights, state.context, rest)
        block = self.timed("draft", self._draft, weights, state.context, rest)
        output = self.timed("target verification", self._verify, weights, state.cache, rest, block)
        verified = self.timed("accept", self._accept, weights, rest, block, output.logits_BTV)
        features_only = dataclasses.replace(output, cache=None, logits_BTV=None, hidden_BTD=None)
        new = self.timed("commit", self._commit, weights, state.context, rest, features_only, verified)
        return dataclasses.replace(new, cache=output.cache)


def take_round_apart(
    stages: RoundStages,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    num_rounds: int,
    max_new_tokens: int,
) -> dict[str, float]:
    """Median ms of everything in a round, and of a plain round; all of them take turns.

    Args:
      stages: the programs.
      engine: one slot, full blocks, the same models.
      prompts: token ids, visited in turn.
      num_rounds: rounds to time.
      max_new_tokens: tokens after which the next prompt begins.
    """
    # Few enough rounds per prompt that the engine's request never ends in between.
    rounds_per_prompt = max((max_new_tokens - 2) // (stages.models.block_len + 1) - 1, 1)

    def one_prompt(prompt: Sequence[int], num_rounds: int) -> Iterator[None]:
        greedy = SamplingOptions(temperature=0.0)
        request = Request(id="", prompt_tokens=list(prompt), max_new_tokens=max_new_tokens, sampling=greedy)
        engine.submit(request)
        engine.step()  # with the prefill
        staged, fused, plain = (stages.start(prompt) for _ in range(3))
        plain = dataclasses.replace(plain, context=None)
        for _ in range(num_rounds):
            staged = stages.staged_round(staged)
            fused, _ = stages.timed("fused round", stages.fused, stages.weights, fused)
            stages.timed("engine step", engine.step)
            plain, _ = stages.timed("plain round", stages.plain, stages.weights, plain)
            yield
        engine.cancel(request)

    for _ in one_prompt(prompts[0], 1):  # compiles
        pass
    stages.times_ms.clear()
    with tqdm(total=num_rounds, desc="rounds", unit="round") as progress:
        while progress.n < num_rounds:
            prompt = prompts[progress.n // rounds_per_prompt % len(prompts)]
            for _ in one_prompt(prompt, min(rounds_per_prompt, num_rounds - progress.n)):
                progress.update()

    median = {name: statistics.median(times) for name, times in stages.times_ms.items()}
    parts = {
        "draft backbone": median["draft backbone"],
        "head and sampling": median["draft"] - median["draft backbone"],
        **{name: median[name] for name in ("target verification", "accept", "commit")},
    }
    return {
        **parts,
        "sum of stages": sum(parts.values()),
        "remainder": median["fused round"] - sum(parts.values()),
        "fused round": median["fused round"],
        "host": median["engine step"] - median["fused round"],
        "engine step": median["engine step"],
        "plain round": median["plain round"],
    }
