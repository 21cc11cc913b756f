"""The shapes and the scheduler of an engine; every compiled shape follows from here."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dspark_jax.core.buckets import powers_of_two
from dspark_jax.core.errors import InputError, require
from dspark_jax.core.sharding import make_mesh
from dspark_jax.drafters.contract import Drafter
from dspark_jax.speculation.schedule import Algorithm1, Lagged, Scheduler
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength, FullBlock
from dspark_jax.speculation.watch import Watch

ROWS_PER_REQUEST = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""Declared target rows of a step, as multiples of its requests, where a scheduler may choose."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Shapes and scheduler of an engine; every compiled shape follows from it."""

    slots: int = 1
    """Requests decoded at the same time."""
    max_context: int = 1024
    """Longest prompt plus answer, in tokens."""
    policy: Scheduler = dataclasses.field(default_factory=FullBlock)
    """Who decides how many drafted tokens are verified."""
    smallest_prefill: int = 64
    """Chunks of prompts are padded to this length or a power-of-two multiple of it."""
    prefill_tokens: int = 512
    """Most prompt tokens that are taken in between two rounds: longer prompts come in chunks of this size."""
    page_len: int = 64
    """Positions per page of keys and values."""
    num_pages: int | None = None
    """Pages that exist; None: enough for every slot at max_context."""
    share_prefixes: bool = True
    """Let requests share the pages of equal beginnings of their prompts."""
    num_stops: int = 4
    """Stop tokens of a request that the device looks for; more are found on the host, a round later."""
    dtype: DTypeLike = jnp.float32
    """dtype of the caches and of what matrix products read."""
    watch: Watch | None = dataclasses.field(default_factory=Watch)
    """When predictions of a scheduler that lives by them count as wrong; None trusts them for ever."""
    tensor: int = 1
    """Devices that share every layer of target and drafter."""

    def __post_init__(self):
        counts = "slots max_context smallest_prefill prefill_tokens page_len num_stops tensor"
        for name in counts.split():
            if getattr(self, name) < 1:
                raise InputError(
                    given=f"{name}={getattr(self, name)}", expected="at least 1", fix=f"raise {name}"
                )

    def mesh(self) -> Mesh | None:
        """The first `tensor` devices; None for one alone.

        Raises:
          InputError: there are not so many.
        """
        if self.tensor == 1:
            return None
        devices = jax.devices()
        require(
            self.tensor <= len(devices),
            given=f"tensor={self.tensor} with {len(devices)} devices",
            expected="at most as many as there are",
            fix="lower --tensor",
        )
        return make_mesh(tensor=self.tensor, devices=devices[: self.tensor])

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Declared chunks of prompts, in tokens."""
        return powers_of_two(self.smallest_prefill, min(self.max_context, self.prefill_tokens))

    def prompt_buckets(self, num_tokens: int) -> set[int]:
        """The declared chunks that a prompt of this length comes in."""
        return {bucket for _, _, bucket in self.chunks(0, num_tokens)}

    def chunks(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """(start, number of tokens, bucket) of each chunk of positions start .. end - 1."""
        buckets, parts = self.prefill_buckets, []
        while start < end:
            bucket = next((b for b in buckets if b >= end - start), buckets[-1])
            count = min(bucket, end - start)
            parts.append((start, count, bucket))
            start += count
        return parts

    @property
    def request_buckets(self) -> tuple[int, ...]:
        """R: declared numbers of requests in a step: powers of four, and all slots."""
        powers = (4**k for k in range(math.ceil(math.log(self.slots, 4)) if self.slots > 1 else 0))
        return (*powers, self.slots)

    def row_buckets(self, requests: int, block_len: int) -> tuple[int, ...]:
        """M: declared target rows of a step of R requests; the first is plain decoding."""
        match self.policy:
            case FullBlock():
                multiples = (1, 1 + block_len)
            case FixedLength(length=length):
                multiples = (1, 1 + length)
            case _:
                multiples = (*(m for m in ROWS_PER_REQUEST if m <= block_len), 1 + block_len)
        return tuple(sorted({math.ceil(requests * m) for m in multiples}))

    @property
    def decides_on_device(self) -> bool:
        """Whether lengths depend on what the drafter says."""
        return not isinstance(self.policy, FullBlock | FixedLength)

    @property
    def predicts(self) -> bool:
        """Whether lengths depend on how likely it is that drafts are accepted."""
        return isinstance(self.policy, Lagged | Algorithm1)

    def longest(self, block_len: int) -> int:
        """Most drafted tokens of a request that are ever verified."""
        return self.policy.length if isinstance(self.policy, FixedLength) else block_len

    def pages_per_slot(self, block_len: int) -> int:
        """Pages that the longest request needs: a round writes up to G rows past its last token."""
        return -(-(self.max_context + block_len + 1) // self.page_len)

    def total_pages(self, block_len: int) -> int:
        """Pages that exist.

        Raises:
          InputError: too few for one request.
        """
        needed = self.pages_per_slot(block_len)
        pages = self.slots * needed if self.num_pages is None else self.num_pages
        require(
            pages >= needed,
            given=f"num_pages={pages} of {self.page_len} positions",
            expected=f"at least {needed}: those of one request at max_context={self.max_context}",
            fix="raise num_pages or lower max_context",
        )
        return pages


def check_policy(policy: Scheduler, drafter: Drafter | None) -> None:
    """Refuses a policy under which nothing would ever be verified, and nobody would notice.

    Raises:
      InputError: a length that is never drafted, or a rule that needs a confidence head which is not there.
    """
    block_len = 0 if drafter is None else drafter.config.block_len
    if isinstance(policy, FixedLength) and policy.length > block_len:
        raise InputError(
            given=f"a fixed verify length of {policy.length}",
            expected=f"at most the {block_len} tokens that are drafted in a round",
            fix="lower the length, or verify the full block",
        )
    needs_confidence = isinstance(policy, ConfidenceThreshold | Algorithm1 | Lagged)
    if needs_confidence and (drafter is None or drafter.config.confidence is None):
        given = (
            f"a confidence threshold of {policy.threshold}"
            if isinstance(policy, ConfidenceThreshold)
            else f"the scheduler {policy}"
        )
        raise InputError(
            given=given,
            expected="a drafter with a confidence head",
            fix="verify the full block or a fixed length, or use another drafter",
        )
