"""A decoding round taken apart: its stages as programs of their own, the fused round, the engine's step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dspark_jax.core.buckets import bucket_for
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.engine import programs
from dspark_jax.engine.compiled import Programs
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.engine.state import EngineState, Weights
from dspark_jax.speculation.calibration import unscaled
from dspark_jax.speculation.sampling import Draw
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
        self.weights = weights
        self.times_ms: dict[str, list[float]] = {}
        self._fused = Programs(models, config, weights)
        plain_models = programs.Models(target=target, drafter=None, dtype=config.dtype)
        self._plain = Programs(plain_models, config, weights)
        G = models.block_len
        pages_1N = jnp.arange(config.pages_per_slot(G))[None]
        self._places = places = (jnp.zeros(1, jnp.int32), pages_1N)
        shapes = {"block_len": G, "num_rows": 1 + G, "longest": G}

        # Caches are arguments of their own, donated where a stage writes them, as the round does.
        def backbone(weights, context, rest):
            step = programs.lay_out(rest, None, *places, jnp.zeros(1, jnp.int32), **shapes)
            anchors = (rest.anchors_B, rest.positions_B, step.paging)
            return drafter.block_hidden(weights.drafter, weights.shared, context, *anchors)

        def verify(weights, cache, rest, drafts, lengths_R):
            step = programs.lay_out(rest, drafts, *places, lengths_R, **shapes)
            return models.run_target(weights, step.tokens_M, cache, step.paging), step

        def accept(weights, rest, drafts, step, logits_MV):
            return programs.accept(weights, rest, drafts, step, logits_MV, longest=G, draw=Draw.GREEDY)

        def commit(weights, context, rest, output, verified, step):
            rest = dataclasses.replace(rest, context=context)
            return programs.commit(weights, rest, output, verified, step, models=models)

        self._backbone, self._accept = jax.jit(backbone), jax.jit(accept)
        self._verify, self._commit = (jax.jit(stage, donate_argnums=1) for stage in (verify, commit))

    def timed(self, name: str, program, *args):
        """Calls, waits, and notes the time."""
        start_s = time.perf_counter()
        result = jax.block_until_ready(program(*args))
        self.times_ms.setdefault(name, []).append(1000 * (time.perf_counter() - start_s))
        return result

    def start(self, prompt: Sequence[int], *, plain: bool = False) -> EngineState:
        """The state behind a prompt."""
        compiled = self._plain if plain else self._fused
        state = compiled.new_state()
        tokens_np = np.zeros(bucket_for(len(prompt), compiled.config.prefill_buckets) + 1, np.int32)
        tokens_np[: len(prompt)] = prompt
        request = Request(
            id="stages",
            prompt_tokens=list(prompt),
            max_new_tokens=2**30,
            sampling=SamplingOptions(temperature=0.0),
        )
        admission = compiled.admission(
            request, slot=0, start=0, num_tokens=len(prompt), is_last=True, pages=self._places[1][0]
        )
        state, _ = compiled.prefill(len(tokens_np) - 1)(state, tokens_np, admission)
        return jax.block_until_ready(state)

    def fused_round(self, state: EngineState) -> EngineState:
        """One round as the engine dispatches it, without the host around it."""
        G = self.models.block_len
        drafts, lengths = self._drafted(state)
        state, _ = self._fused.verify(1, 1 + G, Draw.GREEDY)(state, drafts, *self._places, *lengths)
        return state

    def plain_round(self, state: EngineState) -> EngineState:
        """One round of plain decoding."""
        nothing = (np.zeros(1, np.int32), np.zeros((1, 0), np.float32))
        state, _ = self._plain.verify(1, 1, Draw.GREEDY)(state, None, *self._places, *nothing)
        return state

    def _drafted(self, state: EngineState):
        """(blocks, (lengths, survival)) of a round."""
        G = self.models.block_len
        drafts = self._fused.draft(1, Draw.GREEDY)(state, self._fused.new_drafts(), *self._places)
        asked = (
            np.ones(1, bool),
            np.int32(0),
            np.zeros(G + 1, np.float32),
            unscaled(G)[None].astype(np.float32),
        )
        return drafts, self._fused.select(1)(state, drafts, self._places[0], *asked)

    def staged_round(self, state: EngineState) -> EngineState:
        """One round, stage by stage."""
        weights, rest = self.weights, dataclasses.replace(state, cache=None, context=None)
        self.timed("draft backbone", self._backbone, weights, state.context, rest)
        drafts, (lengths_R, _) = self.timed("draft", self._drafted, state)
        arguments = (weights, state.cache, rest, drafts, lengths_R)
        output, step = self.timed("target verification", self._verify, *arguments)
        logits_MV = output.logits_BTV[0]
        verified = self.timed("accept", self._accept, weights, rest, drafts, step, logits_MV)
        features_only = dataclasses.replace(output, cache=(), logits_BTV=None, hidden_BTD=None)
        new = self.timed("commit", self._commit, weights, state.context, rest, features_only, verified, step)
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
        staged, fused = stages.start(prompt), stages.start(prompt)
        plain = stages.start(prompt, plain=True)
        for _ in range(num_rounds):
            staged = stages.staged_round(staged)
            fused = stages.timed("fused round", stages.fused_round, fused)
            stages.timed("engine step", engine.step)
            plain = stages.timed("plain round", stages.plain_round, plain)
            yield
        engine.cancel(request)
        engine.step()  # reads what was on its way

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
