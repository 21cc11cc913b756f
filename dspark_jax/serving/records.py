"""Lines of a prompt file: each becomes requests, or a reason why not; and answers become lines."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.data.detokenize import TextStream
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.requests import FinishReason, Request, Status
from dspark_jax.serving.id_set import IdSet, hash64
from dspark_jax.serving.options import OPTION_KEYS, UNSUPPORTED, AnswerOptions

_TEXT = ((str,), "a string")
KEYS = {
    "id": _TEXT,
    "domain": _TEXT,
    "prompt": _TEXT,
    "messages": ((list,), "a list of messages"),
    **OPTION_KEYS,
}
"""What a line may hold: key -> (its types in Python, their name in a message)."""
MESSAGE_KEYS = {"role": _TEXT, "content": _TEXT}
LOGPROB_DIGITS = 5


class _Refused(Exception):
    """Why a line cannot be answered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One answer that is to be given.

    Attributes:
      id: the line's.
      line: its number in the input, from 1.
      sample: number of the answer among those to this line, from 0.
      request: what the engine runs.
      stream: finds stop strings, where there are any to find.
    """

    id: str
    line: int
    sample: int
    request: Request
    stream: TextStream | None


@dataclasses.dataclass(kw_only=True)
class JobReader:
    """Turns lines into jobs, reading no further than it is asked to.

    Attributes:
      chat: makes prompt tokens out of messages.
      engine: has the last word on what it can hold.
      options: how a line is answered that says nothing else; its seed and a line's id make the line's seed.
      eos_ids: the target's end tokens.
      on_refused: is told (line number, reason, line) of every line that cannot be answered.
      is_done: (line number, sample) -> whether this answer is there already.
      shard: (i, n): only the lines whose id falls into part i of n, the same part in every process.
      refused: number of lines that could not be answered.
    """

    chat: ChatTemplate
    engine: Engine
    options: AnswerOptions
    eos_ids: frozenset[int]
    on_refused: Callable[[int, str, bytes], None]
    is_done: Callable[[int, int], bool] = lambda line, sample: False
    shard: tuple[int, int] = (0, 1)
    refused: int = 0

    def jobs(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[Job]:
        """The answers to be given; blank lines are skipped, bad ones reported, ids remembered compactly.

        Args:
          lines: (number from 1, line).
        """
        ids = IdSet()
        for number, line in lines:
            if not line.strip():
                continue
            try:
                fields = None
                fields = _parse(line)
                if not self._is_mine(number, fields):
                    continue
                jobs = self._jobs(number, fields, ids)
            except (_Refused, InputError) as error:
                # A line without a readable id goes by its number, as a good line without an id does.
                if fields is None and not self._is_mine(number, {}):
                    continue
                self.refused += 1
                given = isinstance(error, InputError)
                reason = f"{error.given}; expected {error.expected}" if given else str(error)
                self.on_refused(number, reason, line)
            else:
                yield from jobs

    def decode(self, tokens: list[int]) -> str:
        """Tokens of an answer -> its text."""
        return str(self.chat.tokenizer.decode(tokens, skip_special_tokens=True))

    def _is_mine(self, number: int, fields: Mapping[str, Any]) -> bool:
        # By id, so that two lines with one id meet in one shard. The low bits are the id set's.
        part, parts = self.shard
        return parts == 1 or (hash64(_id_of(number, fields)) >> 32) % parts == part

    def _jobs(self, number: int, fields: Mapping[str, Any], ids: IdSet) -> list[Job]:
        line_id = _id_of(number, fields)
        # From the id rather than the line number: answers stay the same when lines are added or reordered.
        digest = hashlib.sha256(f"{self.options.sampling.seed}:{line_id}".encode()).digest()
        options = self.options.of_line(fields, line_seed=int.from_bytes(digest[:4], "big"))
        if line_id in ids:
            raise _Refused(f"a second line with the id {line_id!r}")
        todo = [sample for sample in range(options.n) if not self.is_done(number, sample)]
        prompt_tokens = self._prompt_tokens(fields) if todo else []
        jobs = [self._job(number, line_id, fields, options, prompt_tokens, sample) for sample in todo]
        if jobs:
            self.engine.check(jobs[0].request)
        ids.add(line_id)
        return jobs

    def _job(
        self,
        number: int,
        line_id: str,
        fields: Mapping[str, Any],
        options: AnswerOptions,
        prompt_tokens: list[int],
        sample: int,
    ) -> Job:
        stream = TextStream(self.decode, options.stop) if options.stop else None
        end_tokens = frozenset() if options.ignore_eos else self.eos_ids
        return Job(
            id=line_id,
            line=number,
            sample=sample,
            stream=stream,
            request=Request(
                id=line_id if options.n == 1 else f"{line_id}#{sample}",
                prompt_tokens=list(prompt_tokens),
                max_new_tokens=options.max_new_tokens,
                min_new_tokens=options.min_new_tokens,
                stop_ids=end_tokens | frozenset(options.stop_token_ids),
                stop_check=stream and stream.push,
                logprobs=options.logprobs,
                sampling=dataclasses.replace(options.sampling, sample=sample),
                domain=fields.get("domain"),
            ),
        )

    def _prompt_tokens(self, fields: Mapping[str, Any]) -> list[int]:
        prompt = [{"role": "user", "content": fields.get("prompt")}]
        return self.chat.render_prompt(fields.get("messages", prompt))

    def record(self, job: Job) -> dict[str, Any]:
        """The line of the output for a job that has ended."""
        request = job.request
        record: dict[str, Any] = {
            "id": job.id,
            "line": job.line,
            "sample": job.sample,
            "domain": job.request.domain,
        }
        if request.status is not Status.FINISHED or request.finish_reason is None:
            return record | {"error": str(getattr(request, "error", None) or request.status.value)}
        accepted = request.accepted_per_round
        record |= {
            "text": self._text(job),
            "tokens": len(request.emitted),
            "prompt_tokens": len(request.prompt_tokens),
            "finish_reason": request.finish_reason.value,
            "accepted_length": round(1 + sum(accepted) / len(accepted), 4) if accepted else None,
            "rounds": len(accepted),
        }
        if request.logprobs is not None:
            record["logprobs"] = [
                {
                    "token": token,
                    "logprob": round(of_token.logprob, LOGPROB_DIGITS),
                    "top": [[other, round(logprob, LOGPROB_DIGITS)] for other, logprob in of_token.top],
                }
                for token, of_token in zip(request.emitted, request.emitted_logprobs, strict=True)
            ]
        return record

    def _text(self, job: Job) -> str:
        """The answer up to where it was stopped, without what stopped it."""
        if job.stream is not None and job.stream.stopped:
            return job.stream.text
        tokens = job.request.emitted
        ended_by_token = job.request.finish_reason is FinishReason.STOP
        return self.decode(tokens[:-1] if ended_by_token else tokens)


def _id_of(number: int, fields: Mapping[str, Any]) -> str:
    return fields.get("id", f"line-{number}")


def _parse(line: bytes) -> dict[str, Any]:
    """The fields of a line; known keys only, each of the right type."""
    try:
        fields = json.loads(line, parse_constant=_no_constant)
        # A lone surrogate is legal in JSON, but no text: it could not be written out again.
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _Refused(f"not JSON: {error}") from error
    _check_types("the line", fields, KEYS)
    if ("prompt" in fields) == ("messages" in fields):
        raise _Refused("both prompt and messages" if "prompt" in fields else "neither prompt nor messages")
    if not fields.get("prompt", fields.get("messages")):
        raise _Refused("an empty prompt")
    for number, message in enumerate(fields.get("messages", [])):
        _check_types(f"message {number}", message, MESSAGE_KEYS)
    return fields


def _check_types(what: str, fields: Any, keys: Mapping[str, tuple[tuple[type, ...], str]]) -> None:
    if not isinstance(fields, dict):
        raise _Refused(f"{what} is not a JSON object")
    if refused := sorted(set(fields) & set(UNSUPPORTED)):
        raise _Refused("; ".join(f"{name} is not supported: {UNSUPPORTED[name]}" for name in refused))
    if unknown := sorted(set(fields) - set(keys)):
        raise _Refused(f"unknown keys {', '.join(unknown)} in {what}; known are {', '.join(keys)}")
    for key, value in fields.items():
        types, name = keys[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _Refused(f"{key} is {json.dumps(value)[:80]}; expected {name}")


def _no_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")
