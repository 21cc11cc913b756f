"""Requests on the host: what was asked, how far it is, and the one table of legal transitions."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dspark_jax.core.errors import InputError, require
from dspark_jax.speculation.logprobs import MAX_TOP_LOGPROBS
from dspark_jax.speculation.sampling import MAX_STOP_IDS, Draw


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How one request draws its tokens; temperature first, then the filters.

    Attributes:
      temperature: 0 is greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of tokens with this probability; 1 keeps all.
      min_p: drop tokens less likely than this share of the most likely one; 0 keeps all.
      seed: decides every draw of the request, whatever else runs beside it.
      sample: number of the answer among several to one prompt; each draws from keys of its own.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0

    def __post_init__(self):
        legal = {
            "temperature": (0 <= self.temperature <= 1e6, "0 to 1e6"),
            "top_k": (0 <= self.top_k < 2**31, "0 (off) to 2**31 - 1"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "seed": (0 <= self.seed < 2**32, "0 to 2**32 - 1"),
            "sample": (0 <= self.sample < 2**32, "0 to 2**32 - 1"),
        }
        for name, (ok, expected) in legal.items():
            if not ok:
                raise InputError(
                    given=f"{name}={getattr(self, name)}", expected=expected, fix=f"correct {name}"
                )

    @property
    def law(self) -> str:
        """How tokens are drawn, in words; what a calibration is bound to."""
        if self.temperature == 0:
            return "greedy"
        off = SamplingOptions()
        filters = [n for n in ("top_k", "top_p", "min_p") if getattr(self, n) != getattr(off, n)]
        return ", ".join(f"{name} {getattr(self, name):g}" for name in ["temperature", *filters])

    @property
    def draw(self) -> Draw:
        """The least that a program must be able to do for this request; greedy decoding knows no filters."""
        if self.temperature <= 0:
            return Draw.GREEDY
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return Draw.FILTERED if filtered else Draw.TEMPERATURE


class Status(enum.Enum):
    """Where a request is in its life."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_ENDED_FROM_OUTSIDE = frozenset({Status.CANCELLED, Status.FAILED})

TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.PREFILLING}) | _ENDED_FROM_OUTSIDE,
    Status.PREFILLING: frozenset({Status.DECODING, Status.PREEMPTED}) | _ENDED_FROM_OUTSIDE,
    Status.DECODING: frozenset({Status.FINISHED, Status.PREEMPTED}) | _ENDED_FROM_OUTSIDE,
    Status.PREEMPTED: frozenset({Status.PREFILLING}) | _ENDED_FROM_OUTSIDE,
    Status.FINISHED: frozenset(),
    Status.CANCELLED: frozenset(),
    Status.FAILED: frozenset(),
}


class Mode(enum.Enum):
    """How a decoding request advances."""

    SPECULATIVE = "speculative"
    FALLBACK_AR = "fallback_ar"
    """Plainly, because its drafts cannot be used."""


class FinishReason(enum.Enum):
    """Why a request ended: at a stop token or stop string, or at its token limit."""

    STOP = "stop"
    LENGTH = "length"


class TokenLogprob(NamedTuple):
    """The target's natural log-probability of an emitted token, and of the likeliest ones in its place.

    Attributes:
      logprob: of the emitted token, at temperature 1 and before any filter.
      top: (id, log-probability), the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(kw_only=True, eq=False)
class Request:
    """One prompt and its growing answer. Two requests are never equal, however much they ask for the same.

    Attributes:
      id: the caller's name for it.
      prompt_tokens: ids of the rendered prompt.
      max_new_tokens: exact limit on emitted tokens.
      min_new_tokens: before so many tokens no stop token can be drawn, and no stop string ends the answer.
      stop_ids: tokens that end the answer; the stop token itself is emitted.
      stop_check: is told every emitted token in turn; true where the text so far ends the answer
        (`data.detokenize.TextStream`).
      logprobs: how many alternatives to report beside the log-probability of every emitted token; None
        reports nothing.
      sampling: how tokens are drawn.
      domain: the caller's name for its kind of prompt; predictions are watched for each kind.
      emitted: tokens of the answer so far.
      emitted_logprobs: one for each of them, if `logprobs` asks for it.
      accepted_per_round: draft tokens accepted in each round.
      verified_per_round: draft tokens verified in each round.
      confidence_per_round: confidence logits [G] of each round's block; [0] without a drafter.
      finish_reason: set when finished.
      mode: how it decodes.
      preemptions: how often it lost its pages.
    """

    id: str
    prompt_tokens: list[int]
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_check: Callable[[int], bool] | None = None
    logprobs: int | None = None
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    domain: str | None = None
    emitted: list[int] = dataclasses.field(default_factory=list)
    emitted_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    accepted_per_round: list[int] = dataclasses.field(default_factory=list)
    verified_per_round: list[int] = dataclasses.field(default_factory=list)
    confidence_per_round: list[np.ndarray] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    mode: Mode = Mode.SPECULATIVE
    preemptions: int = 0
    _status: Status = Status.QUEUED

    def __post_init__(self):
        if not self.prompt_tokens:
            raise InputError(
                given=f"request {self.id!r} without tokens", expected="a prompt", fix="give it a prompt"
            )
        self._refuse_unless(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        self._refuse_unless(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            f"0 to max_new_tokens={self.max_new_tokens}",
        )
        self._refuse_unless(
            self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS,
            "logprobs",
            f"0 to {MAX_TOP_LOGPROBS} alternatives",
        )
        if self.min_new_tokens and len(self.stop_ids) > MAX_STOP_IDS:
            raise InputError(
                given=f"request {self.id!r} with min_new_tokens and {len(self.stop_ids)} stop ids",
                expected=f"at most {MAX_STOP_IDS} stop ids beside min_new_tokens",
                fix="leave out min_new_tokens, or some of the stop ids",
            )

    def _refuse_unless(self, legal: bool, name: str, expected: str) -> None:
        require(
            legal,
            given=f"request {self.id!r} with {name}={getattr(self, name)}",
            expected=expected,
            fix=f"correct {name}",
        )

    @property
    def draw(self) -> Draw:
        """The least that the next round's program must be able to do for this request."""
        if self.logprobs is not None:
            return Draw.LOGPROBS
        masked = len(self.emitted) < self.min_new_tokens and self.stop_ids
        return Draw.MASKED if masked else self.sampling.draw

    @property
    def stop_from(self) -> int:
        """The first position of the sequence at which a stop token may stand."""
        return len(self.prompt_tokens) + self.min_new_tokens

    @property
    def status(self) -> Status:
        """The current status; `move_to` changes it."""
        return self._status

    @property
    def ended(self) -> bool:
        """Whether nothing more can happen to it."""
        return not TRANSITIONS[self._status]

    def move_to(self, status: Status) -> None:
        """Changes the status along `TRANSITIONS`."""
        if status not in TRANSITIONS[self._status]:
            raise RuntimeError(
                f"request {self.id!r}: {self._status.value} -> {status.value} is not a legal transition"
            )
        self._status = status

    def emit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Appends committed tokens, stopping exactly where the answer ends.

        Args:
          tokens: in order; those behind the end are dropped.
          logprobs: one for each token, or none at all.
        """
        for number, token in enumerate(tokens):
            self.emitted.append(token)
            self.emitted_logprobs.extend(logprobs[number : number + 1])
            at_stop_string = self.stop_check is not None and self.stop_check(token)
            at_stop_id = token in self.stop_ids and len(self.emitted) > self.min_new_tokens
            if at_stop_id or (at_stop_string and len(self.emitted) >= self.min_new_tokens):
                self.finish_reason = FinishReason.STOP
            elif len(self.emitted) == self.max_new_tokens:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                self.move_to(Status.FINISHED)
                return
