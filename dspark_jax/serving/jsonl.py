"""`serve.py`: a file of prompts in, a file of answers out, one JSON object a line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from tqdm import tqdm

from dspark_jax.core.errors import InputError
from dspark_jax.core.files import sync_directory
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.load import SHIPPED, load_engine
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.serving.records import Job, JobReader
from dspark_jax.serving.summary import Summary
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
        options = (
            {"temperature": 1.0} | dict(generation) if generation.get("do_sample") else {"temperature": 0.0}
        )
        options |= {name: value for name, value in vars(self).items() if value is not None}
        names = {field.name for field in dataclasses.fields(SamplingOptions)}
        return SamplingOptions(**{name: options[name] for name in names if options.get(name) is not None})


def serve_file(config: ServeConfig) -> int:
    """Answers a file; see `ServeConfig`.

    Returns:
      The exit code: 0, or 1 when lines were refused (each is named on stderr).

    Raises:
      InputError: nothing could be answered with this configuration.
    """
    if not config.input.is_file():
        raise InputError(
            given=f"{config.input}: no such file", expected="a file of prompts", fix="check --input"
        )
    started_s = time.perf_counter()
    loaded = load_engine(
        target=config.target,
        drafter=config.drafter,
        config=EngineConfig(
            slots=config.slots, max_context=config.max_context, policy=config.policy, dtype=config.dtype
        ),
    )
    load_s = time.perf_counter() - started_s
    engine = loaded.engine
    reader = JobReader(
        chat=loaded.chat,
        engine=engine,
        sampling=config.sampling(loaded.target.generation),
        max_new_tokens=config.max_new_tokens,
        stop_ids=frozenset(loaded.target.eos_ids),
        on_refused=lambda line, reason: tqdm.write(
            f"{config.input}:{line}: refused: {reason}", file=sys.stderr
        ),
    )
    # Prompt shapes are known only as the lines come: their programs compile then, off the decoding clock.
    engine.warm_up((), filters=[reader.sampling.uses_filters])
    started_s = _decoding_s(engine)
    summary = Summary()
    with open(config.input, "rb") as lines, _complete_or_partial(config.output) as output:
        jobs = _decode(engine, reader.jobs(lines), summary)
        for job in _in_order(jobs) if config.order == "input" else jobs:
            text = loaded.target.tokenizer.decode(job.request.emitted, skip_special_tokens=True)
            output.write(json.dumps(_answer(job, text), ensure_ascii=False).encode() + b"\n")
            output.flush()
    report = summary.report(
        block_len=engine.models.block_len,
        refused=reader.refused,
        load_s=load_s,
        compile_s=engine.compile_s,
        decode_s=_decoding_s(engine) - started_s,
    )
    print(f"\n{report}\nanswers: {config.output}")
    return 1 if reader.refused else 0


def _decode(engine: Engine, jobs: Iterable[Job], summary: Summary) -> Iterator[Job]:
    """Jobs as they finish, counted and shown; takes new ones only as slots free up."""
    decoding: dict[str, Job] = {}

    def requests() -> Iterator[Request]:
        for job in jobs:
            decoding[job.request.id] = job
            yield job.request

    started_s = _decoding_s(engine)
    with tqdm(unit=" requests") as progress:
        for request in engine.run(requests()):
            job = decoding.pop(request.id)
            summary.add(request, job.domain)
            tokens_per_s = summary.all.tokens / (_decoding_s(engine) - started_s)
            progress.set_postfix_str(
                f"{tokens_per_s:.1f} tokens/s, accepted length {summary.all.accepted_length:.2f}",
                refresh=False,
            )
            progress.update()
            yield job


def _decoding_s(engine: Engine) -> float:
    """A clock that stands still while programs compile."""
    return time.perf_counter() - engine.compile_s


def _in_order(jobs: Iterable[Job]) -> Iterator[Job]:
    """Holds early jobs back until those before them are there."""
    held: dict[int, Job] = {}
    following = 0
    for job in jobs:
        held[job.number] = job
        while following in held:
            yield held.pop(following)
            following += 1


def _answer(job: Job, text: str) -> dict[str, Any]:
    request = job.request
    accepted = request.accepted_per_round
    assert request.finish_reason is not None, "the engine yields finished requests only"
    return {
        "id": request.id,
        "domain": job.domain,
        "text": text,
        "tokens": len(request.emitted),
        "prompt_tokens": len(request.prompt_tokens),
        "finish_reason": request.finish_reason.value,
        "accepted_length": round(1 + sum(accepted) / len(accepted), 4) if accepted else None,
        "rounds": len(accepted),
    }


@contextlib.contextmanager
def _complete_or_partial(path: Path) -> Iterator[IO[bytes]]:
    """A file that has its name once it is complete; until then, and after a fault, it is PATH.partial."""
    partial = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(partial, "wb") as file:
        try:
            yield file
        except BaseException:
            print(f"stopped; the answers so far are in {partial}", file=sys.stderr)
            raise
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_directory(path.parent)
