"""Finished answers beside a result, one JSON line each.

A killed evaluation continues from them, and diagnostics are computed from them without any model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.core.jsonl import JsonLinesLog
from dspark_jax.data.sources import Prompt
from dspark_jax.evaluation.accepted_length import PromptRounds

HEADER = "configuration"
SUFFIX = ".rounds.jsonl"
DECIMALS = 4
"""Of confidence logits in the file: far finer than any bin of a reliability diagram."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One finished answer.

    Attributes:
      rounds: what its rounds delivered.
      temperature: at which it was drawn.
      seconds: wall time between the answer that finished before it in the same session and this one.
    """

    rounds: PromptRounds
    temperature: float
    seconds: float

    @property
    def key(self) -> str:
        """Which of an evaluation's answers it is."""
        return answer_key(self.temperature, self.rounds.repeat, self.rounds.id)


def answer_key(temperature: float, repeat: int, prompt_id: str) -> str:
    """The name of one answer within an evaluation."""
    return f"{temperature:g}/{repeat}/{prompt_id}"


def rounds_path(output: Path) -> Path:
    """Where the rounds behind a result file lie."""
    return output.with_name(output.stem + SUFFIX)


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """What the prompts say, in short."""
    text = json.dumps(sorted((prompt.id, prompt.text) for prompt in prompts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RoundsLog:
    """Appends answers to a file that belongs to one configuration.

    Args:
      path: created when absent.
      binding: everything that decides the rounds, plain JSON.

    Attributes:
      answers: key -> answer, those that were already there included.

    Raises:
      InputError: the file belongs to another configuration.
    """

    def __init__(self, path: Path, binding: Mapping[str, Any]):
        self._log = JsonLinesLog(path)  # cuts off a torn last line
        header, self.answers = _read(path)
        if not header:
            self._log.append({"id": HEADER, HEADER: binding})
        elif header != binding:
            self._log.close()
            changed = sorted(name for name in {*header, *binding} if header.get(name) != binding.get(name))
            raise InputError(
                given=f"{path} from a run with other values of {changed}",
                expected="the configuration with which it was started, which an unfinished run continues",
                fix="choose another --output, or delete that file to start again",
            )

    def append(self, answer: Answer) -> None:
        """Keeps one answer."""
        self.answers[answer.key] = answer
        rounds = answer.rounds
        confidence_np = rounds.confidence_np if rounds.confidence_np.any() else np.zeros(0)
        self._log.append(
            {
                "id": answer.key,
                "temperature": answer.temperature,
                "seconds": round(answer.seconds, 4),
                "prompt": rounds.id,
                "repeat": rounds.repeat,
                "domain": rounds.domain,
                "prompt_tokens": rounds.prompt_tokens,
                "new_tokens": rounds.new_tokens,
                "committed": rounds.committed_np.tolist(),
                "accepted": rounds.accepted_np.tolist(),
                "verified": rounds.verified_np.tolist(),
                "confidence": np.round(confidence_np.astype(np.float64), DECIMALS).tolist(),
            }
        )

    def close(self) -> None:
        """Makes everything durable."""
        self._log.close()


def read_rounds(path: Path) -> tuple[dict[str, Any], list[Answer]]:
    """(configuration, answers) of a file.

    Raises:
      InputError: there is no such file, or it is none of these.
    """
    if not path.is_file():
        raise InputError(
            given=f"{path}: no such file",
            expected=f"the rounds of an evaluation (NAME{SUFFIX} beside its result)",
            fix="run `dspark evaluate` first",
        )
    header, answers = _read(path)
    if not header:
        raise InputError(
            given=f"{path} without a configuration in its first line",
            expected=f"the rounds of an evaluation (NAME{SUFFIX} beside its result)",
            fix="pass a file that `dspark evaluate` wrote",
        )
    return header, list(answers.values())


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Answer]]:
    header: dict[str, Any] = {}
    answers: dict[str, Answer] = {}
    with open(path) as file:
        for line in file:
            if not line.endswith("\n"):
                break  # being written
            row = json.loads(line)
            if HEADER in row:
                header = row[HEADER]
            elif "accepted" in row:
                answers[row["id"]] = _answer(row)
    return header, answers


def _answer(row: dict[str, Any]) -> Answer:
    rounds = PromptRounds(
        id=row["prompt"],
        repeat=row["repeat"],
        domain=row["domain"],
        prompt_tokens=row["prompt_tokens"],
        new_tokens=row["new_tokens"],
        committed_np=np.array(row["committed"], np.int64),
        accepted_np=np.array(row["accepted"], np.int64),
        verified_np=np.array(row["verified"], np.int64),
        confidence_np=np.array(row["confidence"], np.float32),
    )
    return Answer(rounds=rounds, temperature=row["temperature"], seconds=row["seconds"])
