"""The engine: keeps the slots full, runs rounds, hands out what they commit."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.core.buckets import bucket_for, powers_of_two
from dspark_jax.core.errors import InputError
from dspark_jax.core.keys import request_key
from dspark_jax.drafters.contract import Drafter
from dspark_jax.engine.programs import Models, plain_round, prefill, speculative_round
from dspark_jax.engine.requests import Request, Status, TokenLogprob
from dspark_jax.engine.state import EngineState, RoundResult, Weights
from dspark_jax.speculation.logprobs import TokenLogprobs
from dspark_jax.speculation.sampling import MAX_STOP_IDS, Draw, SamplingParams
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength, FullBlock, VerifyPolicy
from dspark_jax.targets.config import DecoderConfig

Program = jax.stages.Compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Shapes and policy of an engine; every compiled shape follows from it."""

    slots: int = 1
    """Requests decoded at the same time."""
    max_context: int = 1024
    """Longest prompt plus answer, in tokens."""
    policy: VerifyPolicy = dataclasses.field(default_factory=FullBlock)
    """How many drafted tokens of a block are verified."""
    smallest_prefill: int = 64
    """Prompts are padded to this length or a power-of-two multiple of it."""
    dtype: DTypeLike = jnp.float32
    """dtype of the caches and of what matrix products read."""

    def __post_init__(self):
        for name in ("slots", "max_context", "smallest_prefill"):
            if getattr(self, name) < 1:
                raise InputError(
                    given=f"{name}={getattr(self, name)}", expected="at least 1", fix=f"raise {name}"
                )

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Declared prompt shapes, in tokens."""
        return powers_of_two(self.smallest_prefill, self.max_context)

    def verify_buckets(self, block_len: int) -> tuple[int, ...]:
        """Declared verify lengths: one where the policy fixes it, else 0, 1, 2, 4, ... up to the block."""
        match self.policy:
            case FullBlock():
                return (block_len,)
            case FixedLength(length=length):
                return (length,)
            case _:
                return (0, *(n for n in powers_of_two(1, block_len) if n < block_len), block_len)


class Engine:
    """Continuous batching over fixed slots; speculative with a drafter, plain without.

    Args:
      target: the target's dimensions.
      drafter: pure functions of a drafter, or None for plain decoding.
      weights: what rounds read; `shared` and `drafter` are None without a drafter.
      config: shapes and policy.

    Attributes:
      models: the networks.
      compile_s: seconds spent on compiling so far.

    Raises:
      InputError: the models cannot do what the configuration asks for.
    """

    def __init__(
        self, *, target: DecoderConfig, drafter: Drafter | None, weights: Weights, config: EngineConfig
    ):
        self.config = config
        self.models = Models(target=target, drafter=drafter, dtype=config.dtype)
        _check_policy(config.policy, self.models.drafter)
        if config.max_context > target.max_positions:
            raise InputError(
                given=f"max_context={config.max_context}",
                expected=f"at most {target.max_positions}, the longest context that this target was made for",
                fix="lower max_context",
            )
        self.compile_s = 0.0
        self._programs: dict[tuple, Program] = {}
        self._weights = weights
        # A round writes up to G rows past the last token that a request may hold.
        length = max(config.max_context + self.models.block_len + 1, config.prefill_buckets[-1])
        self._state = EngineState.create(
            target, drafter, slots=config.slots, length=length, dtype=config.dtype
        )
        self._queue: collections.deque[Request] = collections.deque()
        self._slots: list[Request | None] = [None] * config.slots

    def warm_up(
        self, prompt_buckets: Iterable[int] | None = None, *, draws: Iterable[Draw] = tuple(Draw)
    ) -> None:
        """Compiles ahead of the first request; a program that is left out compiles when it is first needed.

        Args:
          prompt_buckets: prompt shapes to compile, in tokens; all declared ones by default.
          draws: what the requests of some round will ask for at most.
        """
        draws = tuple(draws)
        for draw in draws:
            self._round_program(draw)
        self._release_program()
        for bucket in self.config.prefill_buckets if prompt_buckets is None else prompt_buckets:
            request = Request(id="warm-up", prompt_tokens=[0] * bucket, max_new_tokens=1)
            for draw in draws:
                self._prefill_program(draw, self._prefill_args(0, request))

    def _round_program(self, draw: Draw) -> Program:
        function = functools.partial(plain_round, models=self.models, draw=draw)
        if self.models.drafter is not None:
            function = functools.partial(
                speculative_round,
                models=self.models,
                policy=self.config.policy,
                buckets=self.config.verify_buckets(self.models.block_len),
                draw=draw,
            )
        return self._program(("round", draw), function, self._weights, self._state)

    def _prefill_program(self, draw: Draw, args: tuple) -> Program:
        # One row's filters cost nothing beside a prompt, and fewer programs compile.
        draw = max(draw, Draw.MASKED)
        bucket = args[3].shape[1]
        return self._program(
            ("prefill", bucket, draw), functools.partial(prefill, models=self.models, draw=draw), *args
        )

    def _release_program(self) -> Program:
        return self._program(("release",), _deactivate, self._state, np.int32(0))

    def _program(self, name: tuple, function: Callable, *args) -> Program:
        """A compiled program: it takes these shapes and no others, so nothing ever compiles unseen."""
        if name not in self._programs:
            start_s = time.perf_counter()
            self._programs[name] = jax.jit(function, donate_argnames="state").lower(*args).compile()
            self.compile_s += time.perf_counter() - start_s
        return self._programs[name]

    def check(self, request: Request) -> None:
        """Refuses a request that this engine cannot hold.

        Raises:
          InputError: the prompt and its answer exceed `max_context`, or a token is out of range.
        """
        prompt_tokens = len(request.prompt_tokens)
        if prompt_tokens + request.max_new_tokens > self.config.max_context:
            raise InputError(
                given=f"{prompt_tokens} prompt tokens and max_new_tokens={request.max_new_tokens}",
                expected=f"at most {self.config.max_context} together",
                fix="shorten the prompt, lower max_new_tokens or raise max_context",
            )
        if not 0 <= min(request.prompt_tokens) <= max(request.prompt_tokens) < self.models.target.vocab_size:
            raise InputError(
                given="a prompt token outside the vocabulary",
                expected=f"ids in 0..{self.models.target.vocab_size - 1}",
                fix="use the target's own tokenizer",
            )
        if not all(0 <= token < self.models.target.vocab_size for token in request.stop_ids):
            raise InputError(
                given="a stop id outside the vocabulary",
                expected=f"ids in 0..{self.models.target.vocab_size - 1}",
                fix="use the target's own tokenizer",
            )

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self.check(request)
        self._queue.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request at once; nothing more is emitted for it."""
        request.move_to(Status.CANCELLED)
        if request in self._queue:
            self._queue.remove(request)
        for slot, other in enumerate(self._slots):
            if other is request:
                self._release(slot)

    @property
    def has_work(self) -> bool:
        """Whether anything is queued or decoding."""
        return bool(self._queue) or any(self._slots)

    def step(self) -> list[Request]:
        """Admits what fits, runs one round, and returns the requests that it finished."""
        finished = self._admit()
        running = [(slot, request) for slot, request in enumerate(self._slots) if request is not None]
        if not running:
            return finished
        draw = max(request.draw for _, request in running)
        self._state, on_device = self._round_program(draw)(self._weights, self._state)
        result: RoundResult = jax.device_get(on_device)
        for slot, request in running:
            request.accepted_per_round.append(int(result.accepted_B[slot]))
            request.verified_per_round.append(int(result.verified_B[slot]))
            request.confidence_per_round.append(np.asarray(result.confidence_logits_BG[slot]))
            tokens = result.tokens_BT[slot]
            request.emit(tokens[tokens >= 0].tolist(), _logprobs_of(request, result.logprobs, slot))
            if request.status is Status.FINISHED:
                self._release(slot)
                finished.append(request)
        return finished

    def run(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Decodes requests and yields each as it finishes; takes from `requests` only as slots free up."""
        source = iter(requests)
        while True:
            while len(self._queue) + sum(slot is not None for slot in self._slots) < self.config.slots:
                request = next(source, None)
                if request is None:
                    break
                self.submit(request)
            if not self.has_work:
                return
            yield from self.step()

    def _admit(self) -> list[Request]:
        """Prefills queued requests into free slots; returns those that their first token already finished."""
        finished = []
        for slot, occupant in enumerate(self._slots):
            while occupant is None and self._queue:
                request = self._queue.popleft()
                self._prefill(slot, request)
                if request.status is Status.FINISHED:
                    self._release(slot)
                    finished.append(request)
                else:
                    self._slots[slot] = occupant = request
        return finished

    def _prefill(self, slot: int, request: Request) -> None:
        request.move_to(Status.DECODING)
        args = self._prefill_args(slot, request)
        self._state, on_device = self._prefill_program(request.draw, args)(*args)
        anchor_1, logprobs = jax.device_get(on_device)
        request.emit(anchor_1.tolist(), _logprobs_of(request, logprobs, 0))

    def _prefill_args(self, slot: int, request: Request) -> tuple:
        num_tokens = len(request.prompt_tokens)
        tokens_np = np.zeros((1, bucket_for(num_tokens, self.config.prefill_buckets)), np.int32)
        tokens_np[0, :num_tokens] = request.prompt_tokens
        return (
            self._weights,
            self._state,
            np.int32(slot),
            tokens_np,
            np.int32(num_tokens),
            request_key(request.sampling.seed, request.sampling.sample)[None],
            _sampling_row(request),
        )

    def _release(self, slot: int) -> None:
        self._slots[slot] = None
        self._state = self._release_program()(self._state, np.int32(slot))


def _check_policy(policy: VerifyPolicy, drafter: Drafter | None) -> None:
    """Refuses a policy under which nothing would ever be verified, and nobody would notice."""
    block_len = 0 if drafter is None else drafter.config.block_len
    if isinstance(policy, FixedLength) and policy.length > block_len:
        raise InputError(
            given=f"a fixed verify length of {policy.length}",
            expected=f"at most the {block_len} tokens that are drafted in a round",
            fix="lower the length, or verify the full block",
        )
    if isinstance(policy, ConfidenceThreshold) and (drafter is None or drafter.config.confidence is None):
        raise InputError(
            given=f"a confidence threshold of {policy.threshold}",
            expected="a drafter with a confidence head",
            fix="verify the full block or a fixed length, or use another drafter",
        )


def _sampling_row(request: Request) -> SamplingParams:
    """One row, on the host: the program takes it along without a dispatch of its own."""
    options = request.sampling
    stop_ids_np = np.full((1, MAX_STOP_IDS), -1, np.int32)
    if request.min_new_tokens:
        stop_ids_np[0, : len(request.stop_ids)] = sorted(request.stop_ids)
    row: dict[str, Any] = {
        "temperature_B": np.array([options.temperature], np.float32),
        "top_k_B": np.array([options.top_k], np.int32),
        "top_p_B": np.array([options.top_p], np.float32),
        "min_p_B": np.array([options.min_p], np.float32),
        "stop_ids_BJ": stop_ids_np,
        "stop_from_B": np.array([request.stop_from], np.int32),
    }
    return SamplingParams(**row)


def _logprobs_of(request: Request, logprobs: TokenLogprobs | None, row: int) -> list[TokenLogprob]:
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


def _deactivate(state: EngineState, slot: Array) -> EngineState:
    # Position 0 keeps an idle slot's writes inside its own rows, however long it idles.
    return dataclasses.replace(
        state,
        active_B=state.active_B.at[slot].set(False),
        positions_B=state.positions_B.at[slot].set(0),
    )
