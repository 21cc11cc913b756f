"""The engine: keeps the device busy, hands out what its rounds commit.

The host runs one round ahead: it dispatches the next round before it reads the last one. It knows then how
far every request can be at most, which is what pages and shapes are chosen by; how far each really is, and
whether it has come to its end, the device knows by itself.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from dspark_jax.core.buckets import bucket_for
from dspark_jax.core.errors import InputError
from dspark_jax.drafters.contract import Drafter
from dspark_jax.engine.compiled import Programs
from dspark_jax.engine.config import EngineConfig, check_policy
from dspark_jax.engine.pages import PagePool, find_prefix, remember_prompt
from dspark_jax.engine.planning import Planner
from dspark_jax.engine.profile import costs_of, measure_costs
from dspark_jax.engine.programs import Models
from dspark_jax.engine.requests import Mode, Request, Status
from dspark_jax.engine.seats import InFlight, Seat, logprobs_of
from dspark_jax.engine.state import RoundResult, Weights
from dspark_jax.speculation.cost import CostTable
from dspark_jax.speculation.sampling import Draw
from dspark_jax.speculation.schedule import Algorithm1, Lagged
from dspark_jax.speculation.verify_length import FixedLength, FullBlock
from dspark_jax.speculation.watch import Change, Rounds
from dspark_jax.targets.config import DecoderConfig

__all__ = ["Engine", "EngineConfig"]

LOOKAHEAD = 1
"""Rounds that are dispatched before the one before them is read."""

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over paged keys and values; speculative with a drafter, plain without.

    Args:
      target: the target's dimensions.
      drafter: pure functions of a drafter, or None for plain decoding.
      weights: what rounds read; `shared` and `drafter` are None without a drafter.
      config: shapes and scheduler.
      table: measured times for a scheduler that asks for prices; None: measured when it first does.

    Attributes:
      models: the networks.
      counters: what happened that should not happen often: "preemptions", "unusable_drafts",
        "drafter_raised", "shared_tokens", and what became of the calibration (`watch.Change`).
      budgets: how often each number of drafted tokens was verified in a round.

    Raises:
      InputError: the models cannot do what the configuration asks for.
    """

    def __init__(
        self,
        *,
        target: DecoderConfig,
        drafter: Drafter | None,
        weights: Weights,
        config: EngineConfig,
        table: CostTable | None = None,
    ):
        self.config = config
        self.models = Models(target=target, drafter=drafter, dtype=config.dtype)
        check_policy(config.policy, drafter)
        if config.max_context > target.max_positions:
            raise InputError(
                given=f"max_context={config.max_context}",
                expected=f"at most {target.max_positions}, the longest context that this target was made for",
                fix="lower max_context",
            )
        self.counters: collections.Counter[str] = collections.Counter()
        self.budgets: collections.Counter[int] = collections.Counter()
        G = self.models.block_len
        self._programs = Programs(self.models, config, weights, mesh=config.mesh())
        self._state = self._drafts = None
        self._pool = PagePool(config.total_pages(G))
        self._table = table
        self._planner = Planner(config, G, self.cost_table)
        if self._planner.watches:
            self.counters.update({change.value: 0 for change in Change})
        self._queue: collections.deque[Request] = collections.deque()
        self._seats: list[Seat | None] = [None] * config.slots
        self._arrivals = 0
        self._in_flight: collections.deque[InFlight] = collections.deque()

    @property
    def compile_s(self) -> float:
        """Seconds spent on compiling so far."""
        return self._programs.compile_s

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._programs.compiled)

    @property
    def pages(self) -> PagePool:
        """Who holds which pages."""
        return self._pool

    @property
    def programs(self) -> Programs:
        """What is compiled."""
        return self._programs

    def cost_table(self, *, afresh: bool = False) -> CostTable:
        """Measured times of this engine's programs; measured now if they never were, or `afresh`."""
        if afresh:
            self._table = measure_costs(self._programs)
        elif self._table is None:
            log.warning("no cost table was given: a stored one is taken, or the programs are measured now")
            self._table = costs_of(self._programs, None, lambda: measure_costs(self._programs))
        return self._table

    def warm_up(
        self, prompt_buckets: Iterable[int] | None = None, *, draws: Iterable[Draw] = tuple(Draw)
    ) -> None:
        """Compiles ahead of the first request; a program that is left out compiles when it is first needed.

        Args:
          prompt_buckets: chunks of prompts to compile, in tokens; all declared ones by default.
          draws: what the requests of some round will ask for at most.
        """
        self._allocate()
        draws, G = tuple(draws), self.models.block_len
        for requests in self.config.request_buckets:
            for draw in draws:
                for rows in self._rows_in_use(requests):
                    self._programs.verify(requests, rows, draw)
                if G:
                    self._programs.draft(requests, draw)
            if G and self.config.decides_on_device:
                self._programs.select(requests)
        for bucket in self.config.prefill_buckets if prompt_buckets is None else prompt_buckets:
            for draw in draws:
                self._programs.prefill(bucket, draw)
        if self.config.share_prefixes and prompt_buckets is None:
            self._programs.copy_page()
        if isinstance(self.config.policy, Lagged | Algorithm1):
            self.cost_table()

    def _rows_in_use(self, requests: int) -> tuple[int, ...]:
        """Declared rows that the scheduler chooses when nothing goes wrong."""
        rows = self.config.row_buckets(requests, self.models.block_len)
        always_drafts = isinstance(self.config.policy, FullBlock | FixedLength) and len(rows) > 1
        return rows[1:] if always_drafts else rows

    def calibrate(self, scaling_np: np.ndarray) -> None:
        """Takes the scaling [2, G] of a calibration for the predictions to come.

        Raises:
          InputError: not a temperature and a shift for each drafted token.
        """
        scaling_np = np.asarray(scaling_np, np.float32)
        shape = (2, self.models.block_len)
        if scaling_np.shape != shape or not (np.isfinite(scaling_np).all() and (scaling_np[0] > 0).all()):
            raise InputError(
                given=f"a scaling {scaling_np.tolist()}",
                expected=f"{shape[1]} positive temperatures and {shape[1]} shifts",
                fix="calibrate this drafter with `dspark calibrate`",
            )
        self._planner.calibrate(scaling_np)

    def free_memory(self) -> None:
        """Lets go of pages and slots while there is no work; what is compiled stays.

        Raises:
          RuntimeError: there is work.
        """
        if self.has_work:
            raise RuntimeError("the engine has work")
        self._state = self._drafts = None
        self._pool = PagePool(self.config.total_pages(self.models.block_len))

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
        for seat in self._seats:
            if seat is not None and seat.request is request:
                self._leave(seat)

    @property
    def has_work(self) -> bool:
        """Whether anything is queued, decoding, or not read yet."""
        return bool(self._queue) or any(self._seats) or bool(self._in_flight)

    def step(self) -> list[Request]:
        """Admits what fits, dispatches prompts and a round; returns the requests that came to their end."""
        self._allocate()
        self._admit()
        dispatched, finished = self._round()
        return finished + self._read(LOOKAHEAD if dispatched else 0)

    def run(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Decodes requests and yields each as it finishes; takes from `requests` only as slots free up."""
        source = iter(requests)
        while True:
            while len(self._queue) + sum(seat is not None for seat in self._seats) < self.config.slots:
                request = next(source, None)
                if request is None:
                    break
                self.submit(request)
            if not self.has_work:
                return
            yield from self.step()

    def _allocate(self) -> None:
        if self._state is None:
            self._state = self._programs.new_state()
            self._drafts = None if self.models.drafter is None else self._programs.new_drafts()

    # Admission: a slot, and pages for the whole prompt.

    def _admit(self) -> None:
        """Seats who fits; each prompt is dispatched before the next one looks for a prefix to share."""
        left = self._prefill(self.config.prefill_tokens)
        for slot, occupant in enumerate(self._seats):
            if occupant is None and self._queue:
                seat = self._seat(slot, self._queue[0])
                if seat is None:
                    return
                self._queue.popleft()
                seat.request.move_to(Status.PREFILLING)
                self._seats[slot] = seat
                self._planner.forget(slot)
                left = self._prefill(left)

    def _seat(self, slot: int, request: Request) -> Seat | None:
        """A seat with pages for the prompt, or None while there are not enough."""
        drafter = self.models.drafter
        seat = Seat(slot=slot, request=request, number=self._arrivals)
        share = self.config.share_prefixes and (drafter is None or drafter.context_in_pages)
        tokens, page_len = seat.tokens, self.config.page_len
        prefix = find_prefix(self._pool, tokens, page_len) if share else None
        held = [] if prefix is None else [*prefix.pages, *([] if prefix.copied is None else [prefix.copied])]
        for page in held:
            self._pool.share(page)
        needed = len(tokens) // page_len + 1 - (0 if prefix is None else len(prefix.pages))
        # Those who decode already will want a page each soon; who took it from them would be the first to go.
        spare = sum(other is not None for other in self._seats)
        own = self._pool.take(needed) if self._pool.num_free >= needed + spare else None
        if own is None:
            self._pool.give_back(held)
            return None
        self._arrivals += 1
        if prefix is not None:
            seat.pages, seat.prefilled = [*prefix.pages, *own], prefix.num_tokens
            self.counters["shared_tokens"] += prefix.num_tokens
            if prefix.copied is not None:
                copy = self._programs.copy_page()
                self._state = copy(self._state, np.int32(prefix.copied), np.int32(own[0]))
                self._pool.give_back([prefix.copied])
        else:
            seat.pages = own
        return seat

    def _leave(self, seat: Seat) -> None:
        """Frees a seat. What is still in flight for it is dropped when it is read."""
        seat.left = True
        self._seats[seat.slot] = None
        self._pool.give_back(seat.pages)
        seat.pages = []

    def _preempt(self, seat: Seat) -> None:
        """Takes a request's pages away; it comes back with what it has emitted as part of its prompt."""
        log.info("request %r is preempted: no free pages", seat.request.id)
        self.counters["preemptions"] += 1
        seat.request.preemptions += 1
        seat.request.move_to(Status.PREEMPTED)
        self._leave(seat)
        self._queue.appendleft(seat.request)

    # Prompts, in chunks between the rounds.

    def _prefill(self, left: int) -> int:
        """Dispatches chunks of at most `left` tokens in all; returns how many are left after them."""
        waiting = [s for s in self._seats if s is not None and s.request.status is Status.PREFILLING]
        for seat in sorted(waiting, key=lambda seat: seat.number):
            for start, count, bucket in self.config.chunks(seat.prefilled, len(seat.tokens)):
                if left < min(count, self.config.prefill_tokens):
                    return left
                left -= bucket
                self._dispatch_chunk(seat, start, count, bucket)
        return left

    def _dispatch_chunk(self, seat: Seat, start: int, count: int, bucket: int) -> None:
        request, end = seat.request, start + count
        tokens_np = np.zeros(bucket + 1, np.int32)
        tokens_np[: min(count + 1, len(seat.tokens) - start)] = seat.tokens[start : end + 1]
        is_last = end == len(seat.tokens)
        admission = self._programs.admission(
            request, slot=seat.slot, start=start, num_tokens=count, is_last=is_last, pages=seat.pages
        )
        prefill = self._programs.prefill(bucket, request.draw)
        self._state, first = prefill(self._state, tokens_np, admission)
        seat.prefilled = end
        if is_last:
            request.move_to(Status.DECODING)
            if self.config.share_prefixes:
                remember_prompt(self._pool, seat.tokens, seat.pages, self.config.page_len)
            seat.position = len(seat.tokens)
            if not request.emitted:
                seat.unread += 1
                self._in_flight.append(InFlight.first_token(seat, first))

    # Rounds.

    def _round(self) -> tuple[bool, list[Request]]:
        """Dispatches a round for everybody who may need one; (whether there was one, who finished before)."""
        finished = self._make_room()
        seats = [seat for seat in self._decoding() if not seat.surely_ends]
        if not seats:
            return False, finished
        slots = [seat.slot for seat in seats]
        draw = max(seat.request.draw for seat in seats)
        context = max(seat.position for seat in seats) + 1
        speculative_np = np.array([seat.request.mode is Mode.SPECULATIVE for seat in seats])
        domains = [seat.request.domain for seat in seats]
        plan = self._planner.plan(slots, speculative_np, min(context, self.config.max_context), domains)
        drafted_np = plan.drafted_np
        drafting = [seat for seat, drafts in zip(seats, drafted_np, strict=True) if drafts]
        if drafting and not self._draft(drafting, draw):
            drafted_np = np.zeros(len(seats), bool)

        R = bucket_for(len(seats), self.config.request_buckets)
        slots_np = np.full(R, self.config.slots, np.int32)
        slots_np[: len(seats)] = slots
        G = self.models.block_len
        lengths_R, survival_RG = np.zeros(R, np.int32), np.zeros((R, G), np.float32)
        budget = plan.budget if drafted_np.any() else 0
        if drafted_np.any():
            in_step_np = np.zeros(R, bool)
            in_step_np[: len(seats)] = drafted_np
            if self.config.decides_on_device:
                lengths_R, survival_RG = self._programs.select(R)(
                    self._state,
                    self._drafts,
                    slots_np,
                    in_step_np,
                    np.int32(budget or 0),
                    self._planner.round_ms(R, len(seats), min(context, self.config.max_context)),
                    self._planner.scaling(domains, R),
                )
                if budget is None:
                    budget = int(np.asarray(lengths_R).sum())
            else:
                lengths_R = in_step_np * np.int32(self.config.longest(G))
        assert budget is not None
        rows = self._planner.rows(R, len(seats), budget)
        plain = rows == R
        arguments = (slots_np, self._tables(seats, R), lengths_R, survival_RG)
        verify = self._programs.verify(R, rows, draw)
        self._state, result = verify(self._state, self._drafts, *arguments)
        self.budgets[budget] += 1
        longest = 0 if plain else self.config.longest(G)
        for seat in seats:
            seat.advance(longest + 1)
        self._in_flight.append(InFlight(seats=seats, arrays=result, drafted_np=drafted_np, most=longest + 1))
        return True, finished

    def _decoding(self) -> list[Seat]:
        return [s for s in self._seats if s is not None and s.request.status is Status.DECODING]

    def _tables(self, seats: list[Seat], requests: int) -> np.ndarray:
        return self._programs.tables([seat.pages for seat in seats], requests)

    def _draft(self, seats: list[Seat], draw: Draw) -> bool:
        """Dispatches drafting; False when the drafter raised, and the round goes on without it."""
        D = bucket_for(len(seats), self.config.request_buckets)
        slots_np = np.full(D, self.config.slots, np.int32)
        slots_np[: len(seats)] = [seat.slot for seat in seats]
        try:
            program = self._programs.draft(D, draw)
            self._drafts = program(self._state, self._drafts, slots_np, self._tables(seats, D))
        except Exception:  # whatever it is: the target can do without
            log.exception("the drafter raised: plain decoding in this round")
            self.counters["drafter_raised"] += 1
            if any(x.is_deleted() for x in jax.tree.leaves(self._drafts)):
                self._drafts = self._programs.new_drafts()
            return False
        return True

    def _make_room(self) -> list[Request]:
        """Gives every decoding request the pages of its next round; preempts the youngest if it must."""
        finished: list[Request] = []
        reach = self.config.longest(self.models.block_len) + 1
        for seat in sorted(self._decoding(), key=lambda seat: seat.number):
            while not seat.left and not seat.surely_ends:
                needed = (seat.position + reach - 1) // self.config.page_len + 1 - len(seat.pages)
                pages = self._pool.take(max(needed, 0))
                if pages is not None:
                    seat.pages += pages
                    break
                if self._in_flight:  # what ends in there gives pages back, and positions become exact
                    finished += self._read(0)
                    continue
                occupied = [s for s in self._seats if s is not None]
                self._preempt(max(occupied, key=lambda other: other.number))
        return finished

    # Results.

    def _read(self, keep: int) -> list[Request]:
        """Hands out the results of all but the last `keep` dispatches; returns who came to an end."""
        finished = []
        while sum(item.is_round for item in self._in_flight) > keep or (
            self._in_flight and (keep == 0 or not self._in_flight[0].is_round)
        ):
            item = self._in_flight.popleft()
            arrays = jax.device_get(item.arrays)
            if item.is_round:
                self._take_in(item, arrays)
            else:
                (seat,) = item.seats
                seat.unread -= 1
                if not seat.left:
                    anchor_1, logprobs = arrays
                    seat.request.emit(anchor_1.tolist(), logprobs_of(seat.request, logprobs, 0))
            for seat in item.seats:
                if not seat.left and seat.request.status is Status.FINISHED:
                    self._leave(seat)
                    finished.append(seat.request)
        return finished

    def _take_in(self, item: InFlight, result: RoundResult) -> None:
        kept_np = np.array([not seat.left for seat in item.seats])
        unusable_np = item.drafted_np & ~result.usable_R[: len(item.seats)]
        for row, seat in enumerate(item.seats):
            tokens = result.tokens_RT[row]
            committed = tokens[tokens >= 0].tolist()
            seat.retreat(item.most, len(committed))
            if seat.left or not committed:
                continue
            request = seat.request
            drafted = bool(item.drafted_np[row])
            request.accepted_per_round.append(int(result.accepted_R[row]))
            request.verified_per_round.append(int(result.verified_R[row]))
            confidence_np = np.asarray(result.confidence_logits_RG[row])
            if not drafted:
                confidence_np = np.full_like(confidence_np, np.nan)
            request.confidence_per_round.append(confidence_np)
            if unusable_np[row]:
                self.counters["unusable_drafts"] += 1
                request.mode = Mode.FALLBACK_AR
            request.emit(committed, logprobs_of(request, result.logprobs, row))
        usable_np = item.drafted_np & ~unusable_np & kept_np
        survival_np = np.asarray(result.survival_RG[: len(item.seats)])
        self._planner.note([seat.slot for seat in item.seats], usable_np, survival_np)
        self._judge(item.seats, usable_np, result)

    def _judge(self, seats: list[Seat], usable_np: np.ndarray, result: RoundResult) -> None:
        n = len(seats)
        rounds = Rounds(
            logits_np=np.asarray(result.confidence_logits_RG[:n]),
            verified_np=np.asarray(result.verified_R[:n]) * usable_np,
            accepted_np=np.asarray(result.accepted_R[:n]),
        )
        for finding in self._planner.judge([seat.request.domain for seat in seats], rounds):
            self.counters[finding.change.value] += 1
            log.warning("%s", finding)
