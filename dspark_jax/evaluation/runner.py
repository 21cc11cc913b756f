"""Decode prompts with an engine and record what every round delivered."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from dspark_jax.data.sources import Prompt
from dspark_jax.engine.load import LoadedEngine
from dspark_jax.engine.requests import FinishReason, Request, SamplingOptions
from dspark_jax.evaluation.accepted_length import PromptRounds, accepted_length
from dspark_jax.evaluation.prompts import prompt_hash


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Prompts decoded at one temperature.

    Attributes:
      records: one for each prompt, in the order of the prompts.
      seconds: wall time for all of them, prefill included, compilation excluded.
    """

    records: list[PromptRounds]
    seconds: float

    @property
    def new_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(record.new_tokens for record in self.records)

    @property
    def tokens_per_s(self) -> float:
        """Throughput over all slots."""
        return self.new_tokens / self.seconds


def measure(
    loaded: LoadedEngine, prompts: Sequence[Prompt], *, temperature: float, max_new_tokens: int, seed: int = 0
) -> Measurement:
    """Decodes all prompts, batched over the engine's slots, and shows progress.

    Args:
      loaded: the engine; for a drafter in memory build one with `engine.load.make_engine`.
      prompts: what to answer.
      temperature: 0 is greedy.
      max_new_tokens: longest answer.
      seed: with a prompt's id it decides that prompt's draws.
    """
    requests = {
        prompt.id: Request(
            id=prompt.id,
            prompt_tokens=loaded.chat.render_prompt([{"role": "user", "content": prompt.text}]),
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(loaded.target.eos_ids),
            sampling=SamplingOptions(temperature=temperature, seed=prompt_hash(prompt.id, f"answer {seed}")),
        )
        for prompt in prompts
    }
    config = loaded.engine.config
    needed = set().union(
        *(config.prompt_buckets(len(request.prompt_tokens)) for request in requests.values())
    )
    loaded.engine.warm_up(needed, draws={request.sampling.draw for request in requests.values()})

    records: dict[str, PromptRounds] = {}
    domains = {prompt.id: prompt.domain for prompt in prompts}
    start_s = time.perf_counter()
    with tqdm(total=len(requests), unit="prompt", desc=f"temperature {temperature:g}") as progress:
        for finished in loaded.engine.run(requests.values()):
            records[finished.id] = rounds_of(finished, domains[finished.id])
            progress.set_postfix(
                accepted_length=f"{accepted_length(list(records.values())):.2f}", refresh=False
            )
            progress.update()
    seconds = time.perf_counter() - start_s
    return Measurement(records=[records[prompt.id] for prompt in prompts], seconds=seconds)


def rounds_of(request: Request, domain: str) -> PromptRounds:
    """The rounds of a finished request, up to its stop token.

    Drafts accepted behind a stop token are never emitted, so they do not count. Tokens cut off by the limit
    do: the limit belongs to the measurement, not to the drafter.
    """
    accepted_np = np.array(request.accepted_per_round, np.int64)
    verified_np = np.array(request.verified_per_round, np.int64)
    committed_np = accepted_np + 1
    if request.finish_reason is FinishReason.STOP and len(committed_np):
        # The first token of an answer comes from the prefill, not from a round.
        in_last_round = len(request.emitted) - 1 - committed_np[:-1].sum()
        if in_last_round <= accepted_np[-1]:
            committed_np[-1] = accepted_np[-1] = verified_np[-1] = in_last_round
    return PromptRounds(
        id=request.id,
        domain=domain,
        new_tokens=len(request.emitted),
        committed_np=committed_np,
        accepted_np=accepted_np,
        verified_np=verified_np,
        confidence_np=np.array(request.confidence_per_round, np.float32),
    )
