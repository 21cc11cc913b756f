"""A request in its slot, and what is on its way for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dspark_jax.engine.requests import Request, TokenLogprob
from dspark_jax.speculation.logprobs import TokenLogprobs


@dataclasses.dataclass(kw_only=True, eq=False)
class Seat:
    """One stay of a request in a slot. A request that was preempted takes another seat when it comes back.

    Whoever leaves a seat leaves it for good, so results name seats, never slots: nothing that arrives late
    can reach the next request in the slot.

    Attributes:
      slot: which.
      request: whose.
      number: order of arrival.
      tokens: what is taken in before decoding: the prompt, and the answer so far but for its last token.
      pages: held pages, in order of position.
      prefilled: tokens taken in so far.
      position: the farthest that the anchor can be, with all that is in flight.
      unread: dispatches in flight, each of which emits a token at least.
      left: the request is not here any more.
    """

    slot: int
    request: Request
    number: int
    tokens: list[int] = dataclasses.field(init=False)
    pages: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0
    position: int = 0
    unread: int = 0
    left: bool = False

    def __post_init__(self):
        self.tokens = self.request.prompt_tokens + self.request.emitted[:-1]

    @property
    def surely_ends(self) -> bool:
        """Whether what is in flight brings the request to its token limit, whatever it is."""
        return len(self.request.emitted) + self.unread >= self.request.max_new_tokens

    def advance(self, most: int) -> None:
        """A round that commits at most so many tokens was dispatched."""
        self.position += most
        self.unread += 1

    def retreat(self, most: int, committed: int) -> None:
        """It was read, and committed so many."""
        self.position -= most - committed
        self.unread -= 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class InFlight:
    """A dispatch whose result was not read yet.

    Attributes:
      seats: of its requests.
      arrays: on the device: a `RoundResult`, or the first token of an answer [1] and its `TokenLogprobs`.
      drafted_np: bool [n], who drafted in the round.
      most: tokens that a request commits at most.
      is_round: otherwise the last chunk of a prompt.
    """

    seats: list[Seat]
    arrays: Any
    drafted_np: np.ndarray
    most: int
    is_round: bool = True

    @classmethod
    def first_token(cls, seat: Seat, arrays: Any) -> InFlight:
        """The last chunk of a prompt."""
        return cls(seats=[seat], arrays=arrays, drafted_np=np.zeros(1, bool), most=0, is_round=False)


def logprobs_of(request: Request, logprobs: TokenLogprobs | None, row: int) -> list[TokenLogprob]:
    """What a request asked for out of a program's report on all rows."""
    if request.logprobs is None or logprobs is None:
        return []
    count = request.logprobs
    return [
        TokenLogprob(float(chosen), tuple(zip(ids[:count].tolist(), top[:count].tolist(), strict=True)))
        for chosen, ids, top in zip(
            logprobs.chosen_BT[row], logprobs.top_ids_BTJ[row], logprobs.top_BTJ[row], strict=True
        )
    ]
