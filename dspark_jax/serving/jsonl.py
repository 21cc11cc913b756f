"""`serve.py`: a file of prompts in, a file of answers out, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from dspark_jax.core.errors import InputError
from dspark_jax.core.files import sync_directory
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.load import load_engine
from dspark_jax.engine.requests import Request
from dspark_jax.serving.config import ServeConfig
from dspark_jax.serving.records import Job, JobReader
from dspark_jax.serving.summary import Summary


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
        check=config.self_check,
        thinking=config.thinking,
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
    engine.warm_up((), draws=[reader.sampling.draw])
    started_s = _decoding_s(engine)
    summary = Summary()
    with open(config.input, "rb") as lines, _complete_or_partial(config.output) as output:
        jobs = _decode(engine, reader.jobs(lines), summary)
        for job in _in_order(jobs) if config.order == "input" else jobs:
            text = loaded.target.tokenizer.decode(job.request.emitted, skip_special_tokens=True)
            output.write(json.dumps(_answer(job, str(text)), ensure_ascii=False).encode() + b"\n")
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
