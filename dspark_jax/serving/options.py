"""What a line may ask for beside its prompt, and what it gets if it says nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.core.errors import InputError, require
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.serving.output import MAX_SAMPLES
from dspark_jax.speculation.sampling import Draw

_INTEGER, _NUMBER = ((int,), "an integer"), ((int, float), "a number")
SAMPLING_KEYS = {
    "temperature": _NUMBER,
    "top_k": _INTEGER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "seed": _INTEGER,
}
OPTION_KEYS = {
    **SAMPLING_KEYS,
    "n": _INTEGER,
    "max_new_tokens": _INTEGER,
    "min_new_tokens": _INTEGER,
    "stop": ((str, list), "a string or a list of strings"),
    "stop_token_ids": ((list,), "a list of integers"),
    "ignore_eos": ((bool,), "true or false"),
    "logprobs": _INTEGER,
}
"""Option of a line -> (its types in Python, their name in a message)."""
_REWEIGHTING = (
    "it would change the distribution from token to token inside a drafted block, on both sides of every "
    "acceptance test, which this engine does not do; silently leaving it out would answer another question"
)
UNSUPPORTED = {
    "repetition_penalty": _REWEIGHTING,
    "presence_penalty": _REWEIGHTING,
    "frequency_penalty": _REWEIGHTING,
    "logit_bias": "neither the drafter's nor the target's distribution can be re-weighted token by token; "
    "silently leaving it out would answer another question",
}
"""Options that other servers know -> why this one refuses them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How a prompt is answered.

    Attributes:
      sampling: how tokens are drawn; its seed belongs to the job, a line without one derives its own.
      max_new_tokens: longest answer.
      min_new_tokens: shortest answer.
      n: number of answers.
      stop: strings that end an answer.
      stop_token_ids: tokens that end an answer, beside the target's end tokens.
      ignore_eos: whether the target's end tokens are tokens like any other.
      logprobs: number of alternatives to report beside the log-probability of every token; None for neither.
    """

    sampling: SamplingOptions
    max_new_tokens: int
    min_new_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        require(
            1 <= self.n <= MAX_SAMPLES, given=f"n={self.n}", expected=f"1 to {MAX_SAMPLES}", fix="correct n"
        )
        require(
            self.n == 1 or self.sampling.temperature > 0,
            given=f"n={self.n} answers at temperature 0",
            expected="one answer, since greedy answers are all the same",
            fix="leave out n, or raise temperature",
        )
        require(
            all(self.stop), given="an empty stop string", expected="some text", fix="leave the string out"
        )

    @property
    def draws(self) -> frozenset[Draw]:
        """What rounds of requests with these options ask for."""
        if self.logprobs is not None:
            return frozenset({Draw.LOGPROBS})
        masked = {Draw.MASKED} if self.min_new_tokens else set()
        return frozenset({self.sampling.draw} | masked)

    def of_line(self, fields: Mapping[str, Any], *, line_seed: int) -> AnswerOptions:
        """These options, but for what a line says itself.

        Args:
          fields: the line's fields, of the types of `OPTION_KEYS`.
          line_seed: the seed of a line that gives none.

        Raises:
          InputError: an option is out of range, or a list holds something else.
        """
        sampling: dict[str, Any] = {"seed": line_seed}
        sampling |= {key: fields[key] for key in SAMPLING_KEYS if key in fields}
        own: dict[str, Any] = {
            key: fields[key] for key in OPTION_KEYS if key in fields and key not in SAMPLING_KEYS
        }
        if "stop" in own:
            own["stop"] = (own["stop"],) if isinstance(own["stop"], str) else _all_of(str, "stop", own)
        if "stop_token_ids" in own:
            own["stop_token_ids"] = _all_of(int, "stop_token_ids", own)
        return dataclasses.replace(self, sampling=dataclasses.replace(self.sampling, **sampling), **own)


def _all_of(kind: type, name: str, fields: Mapping[str, Any]) -> tuple:
    for value in fields[name]:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(
                given=f"{name} holds {str(value)[:80]!r}",
                expected=OPTION_KEYS[name][1],
                fix=f"correct {name}",
            )
    return tuple(fields[name])
