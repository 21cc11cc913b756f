"""Lines of a prompt file: each becomes a request, or a reason why not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.requests import Request, SamplingOptions

_TEXT, _INTEGER, _NUMBER = ((str,), "a string"), ((int,), "an integer"), ((int, float), "a number")
SAMPLING_KEYS = {
    "temperature": _NUMBER,
    "top_k": _INTEGER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "seed": _INTEGER,
}
KEYS = {
    "id": _TEXT,
    "domain": _TEXT,
    "prompt": _TEXT,
    "messages": ((list,), "a list of messages"),
    **SAMPLING_KEYS,
    "max_new_tokens": _INTEGER,
}
"""What a line may hold: key -> (its types in Python, their name in a message)."""
MESSAGE_KEYS = {"role": _TEXT, "content": _TEXT}


class _Refused(Exception):
    """Why a line cannot be answered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A line that will be answered.

    Attributes:
      number: its place among the lines that will be answered, from 0.
      domain: the caller's name for its kind of prompt, or None.
      request: what the engine runs.
    """

    number: int
    domain: str | None
    request: Request


@dataclasses.dataclass(kw_only=True)
class JobReader:
    """Turns lines into jobs, reading no further than it is asked to.

    Attributes:
      chat: makes prompt tokens out of messages.
      engine: has the last word on what it can hold.
      sampling: how a line is answered that says nothing else; its seed and a line's id make the line's seed.
      max_new_tokens: longest answer to a line that says nothing else.
      stop_ids: tokens that end an answer.
      on_refused: is told (line number, reason) of every line that cannot be answered.
      refused: number of those lines.
    """

    chat: ChatTemplate
    engine: Engine
    sampling: SamplingOptions
    max_new_tokens: int
    stop_ids: frozenset[int]
    on_refused: Callable[[int, str], None]
    refused: int = 0

    def jobs(self, lines: Iterable[bytes]) -> Iterator[Job]:
        """The lines that can be answered; blank ones are skipped, bad ones reported, only ids remembered."""
        ids: set[str] = set()
        for line_number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                fields = _parse(line)
                request = self._request(fields, default_id=f"line-{line_number}")
                if request.id in ids:
                    raise _Refused(f"a second line with the id {request.id!r}")
                self.engine.check(request)
            except (_Refused, InputError) as error:
                self.refused += 1
                reason = (
                    f"{error.given}; expected {error.expected}"
                    if isinstance(error, InputError)
                    else str(error)
                )
                self.on_refused(line_number, reason)
            else:
                yield Job(number=len(ids), domain=fields.get("domain"), request=request)
                ids.add(request.id)

    def _request(self, fields: Mapping[str, Any], default_id: str) -> Request:
        request_id = fields.get("id", default_id)
        # From the id rather than the line number: answers stay the same when lines are added or reordered.
        digest = hashlib.sha256(f"{self.sampling.seed}:{request_id}".encode()).digest()
        own = {key: fields[key] for key in SAMPLING_KEYS if key in fields}
        return Request(
            id=request_id,
            prompt_tokens=self._prompt_tokens(fields),
            max_new_tokens=fields.get("max_new_tokens", self.max_new_tokens),
            stop_ids=self.stop_ids,
            sampling=dataclasses.replace(self.sampling, **{"seed": int.from_bytes(digest[:4], "big")} | own),
        )

    def _prompt_tokens(self, fields: Mapping[str, Any]) -> list[int]:
        prompt = [{"role": "user", "content": fields.get("prompt")}]
        return self.chat.render_prompt(fields.get("messages", prompt))


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
    if unknown := sorted(set(fields) - set(keys)):
        raise _Refused(f"unknown keys {', '.join(unknown)} in {what}; known are {', '.join(keys)}")
    for key, value in fields.items():
        types, name = keys[key]
        if not isinstance(value, types) or isinstance(value, bool):
            raise _Refused(f"{key} is {json.dumps(value)[:80]}; expected {name}")


def _no_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")
