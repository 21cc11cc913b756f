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
from dspark_jax.evaluation.rounds_log import Answer, RoundsLog, answer_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Prompts decoded at one temperature.

    Attributes:
      records: one for each answer, in the order of the repeats and of the prompts.
      seconds: wall time for all of them, prefill included, compilation excluded. Of an interrupted run: up to
        the last answer that was finished, in each of its parts.
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
    loaded: LoadedEngine,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    repeats: int = 1,
    log: RoundsLog | None = None,
) -> Measurement:
    """Decodes all prompts, batched over the engine's slots, and shows progress.

    Args:
      loaded: the engine; for a drafter in memory build one with `engine.load.make_engine`.
      prompts: what to answer.
      temperature: 0 is greedy.
      max_new_tokens: longest answer.
      seed: with a prompt's id it decides that prompt's draws.
      repeats: answers to each prompt, from seeds seed, seed + 1, ...
      log: takes every answer as it is finished; those that it already has are not drawn again.
    """
    answers = {} if log is None else log.answers
    requests: dict[str, Request] = {}
    wanted = {
        answer_key(temperature, repeat, prompt.id): (repeat, prompt)
        for repeat in range(repeats)
        for prompt in prompts
    }
    for key, (repeat, prompt) in wanted.items():
        if key in answers:
            continue
        draw_seed = prompt_hash(prompt.id, f"answer {seed + repeat}")
        requests[key] = Request(
            id=key,
            prompt_tokens=loaded.chat.render_prompt([{"role": "user", "content": prompt.text}]),
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(loaded.target.eos_ids),
            sampling=SamplingOptions(temperature=temperature, seed=draw_seed),
        )
    if requests:
        config = loaded.engine.config
        needed = set().union(
            *(config.prompt_buckets(len(request.prompt_tokens)) for request in requests.values())
        )
        loaded.engine.warm_up(needed, draws={request.sampling.draw for request in requests.values()})

    done = {key: answers[key] for key in wanted if key in answers}
    last_s = time.perf_counter()
    with tqdm(
        total=len(wanted), initial=len(done), unit="answer", desc=f"temperature {temperature:g}"
    ) as progress:
        for finished in loaded.engine.run(requests.values()):
            now_s = time.perf_counter()
            repeat, prompt = wanted[finished.id]
            rounds = dataclasses.replace(rounds_of(finished, prompt.domain), id=prompt.id, repeat=repeat)
            answer = Answer(rounds=rounds, temperature=temperature, seconds=now_s - last_s)
            last_s = now_s
            done[finished.id] = answer
            if log is not None:
                log.append(answer)
            so_far = accepted_length([answer.rounds for answer in done.values()])
            progress.set_postfix(accepted_length=f"{so_far:.2f}", refresh=False)
            progress.update()
    return Measurement(
        records=[done[key].rounds for key in wanted],
        seconds=sum(answer.seconds for answer in done.values()),
    )


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
        prompt_tokens=len(request.prompt_tokens),
        new_tokens=len(request.emitted),
        committed_np=committed_np,
        accepted_np=accepted_np,
        verified_np=verified_np,
        confidence_np=np.array(request.confidence_per_round, np.float32),
    )
