"""The compiled programs of an engine: each takes its shapes and no others, so nothing compiles unseen."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.core.keys import request_key
from dspark_jax.core.sharding import on_mesh, replicated
from dspark_jax.engine import programs
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.placement import (
    check_divides,
    draft_shardings,
    on_their_shardings,
    state_shardings,
    weight_shardings,
)
from dspark_jax.engine.requests import Request
from dspark_jax.engine.state import Admission, Drafts, EngineState, Weights
from dspark_jax.speculation.sampling import MAX_STOP_IDS, Draw, SamplingParams

Program = Callable[..., Any]


class Programs:
    """Compiles a program when it is first asked for, from the shapes that the configuration declares.

    Args:
      models: the networks.
      config: shapes and scheduler.
      weights: parameters; placed on the mesh, if they do not lie there yet.
      mesh: devices that share every layer; None for one alone.

    Attributes:
      compiled: by name and static parameters.
      compile_s: seconds spent on compiling so far.
    """

    def __init__(
        self,
        models: programs.Models,
        config: EngineConfig,
        weights: Weights,
        *,
        mesh: Mesh | None = None,
    ):
        self.models, self.config, self._mesh = models, config, mesh
        self.compiled: dict[tuple, Program] = {}
        self.compile_s = 0.0
        self._state = jax.eval_shape(self._empty_state)
        self._drafts = None if models.drafter is None else jax.eval_shape(self._empty_drafts)
        self._state_shardings = self._draft_shardings = self._everywhere = None
        if mesh is not None:
            check_divides(models.target, mesh.size)
            self._everywhere = replicated(mesh)
            self._state_shardings = state_shardings(self._state, mesh, config.total_pages(models.block_len))
            weights = on_their_shardings(weights, weight_shardings(models, weights, mesh))
            self._state = on_their_shardings(self._state, self._state_shardings)
            if self._drafts is not None:
                self._draft_shardings = draft_shardings(self._drafts, mesh)
                self._drafts = on_their_shardings(self._drafts, self._draft_shardings)
        self._weights = weights

    @property
    def weights(self) -> Weights:
        """Parameters, where they lie."""
        return self._weights

    @property
    def state(self) -> EngineState:
        """Shapes of pages and slots."""
        return self._state

    def new_state(self) -> EngineState:
        """Empty pages and slots."""
        return jax.jit(self._empty_state, out_shardings=self._state_shardings)()

    def new_drafts(self) -> Drafts:
        """Nothing drafted yet."""
        return jax.jit(self._empty_drafts, out_shardings=self._draft_shardings)()

    def _empty_state(self) -> EngineState:
        return EngineState.create(
            self.models.target,
            self.models.drafter,
            slots=self.config.slots,
            num_pages=self.config.total_pages(self.models.block_len),
            page_len=self.config.page_len,
            num_stops=self.config.num_stops,
            dtype=self.config.dtype,
        )

    def _empty_drafts(self) -> Drafts:
        assert self.models.drafter is not None
        return Drafts.create(
            slots=self.config.slots,
            block_len=self.models.block_len,
            vocab_size=self.models.drafter.config.vocab_size,
        )

    def prefill(self, bucket: int, draw: Draw = Draw.MASKED) -> Program:
        """Takes in a chunk of so many tokens."""
        # One row's filters cost nothing beside a prompt, and fewer programs compile.
        draw = max(draw, Draw.MASKED)
        function = functools.partial(programs.prefill, models=self.models, draw=draw)
        anyone = Request(id="shapes", prompt_tokens=[0], max_new_tokens=1)
        admission = self.admission(anyone, slot=0, start=0, num_tokens=1, is_last=True, pages=())
        tokens_np = np.zeros(bucket + 1, np.int32)
        arguments = (self._weights, self._state, tokens_np, admission)
        return functools.partial(
            self._program(("prefill", bucket, draw), function, "state", *arguments), self._weights
        )

    def draft(self, requests: int, draw: Draw) -> Program:
        """Drafts for so many requests."""
        assert self.models.drafter is not None
        function = functools.partial(programs.draft, drafter=self.models.drafter, draw=draw)
        arguments = (self._drafts, *self._places(requests))
        # Hundreds of arrays that a program does not read would be handed to it all the same.
        weights, state = (
            dataclasses.replace(self._weights, target={}),
            dataclasses.replace(self._state, cache=None),
        )
        program = self._program(("draft", requests, draw), function, "drafts", weights, state, *arguments)
        return lambda state, *rest: program(weights, dataclasses.replace(state, cache=None), *rest)

    def select(self, requests: int) -> Program:
        """Chooses lengths for so many requests."""
        function = functools.partial(programs.select, scheduler=self.config.policy)
        G = self.models.block_len
        arguments = (
            self._state.active_B,
            self._drafts,
            self._places(requests)[0],
            np.zeros(requests, bool),
            np.int32(0),
            np.zeros(requests * G + 1, np.float32),
            np.ones((requests, 2, G), np.float32),
        )
        program = self._program(("select", requests), function, None, *arguments)
        return lambda state, *rest: program(state.active_B, *rest)

    def verify(self, requests: int, rows: int, draw: Draw) -> Program:
        """Verifies so many rows of so many requests; as many rows as requests is plain decoding."""
        plain = rows == requests
        function = functools.partial(
            programs.verify_round,
            models=self.models,
            num_rows=rows,
            longest=0 if plain else min(self.config.longest(self.models.block_len), rows - 1),
            draw=draw,
        )
        G = self.models.block_len
        arguments = (
            self._weights,
            self._state,
            self._drafts,
            *self._places(requests),
            np.zeros(requests, np.int32),
            np.zeros((requests, G), np.float32),
        )
        program = self._program(("verify", requests, rows, draw), function, "state", *arguments)
        return functools.partial(program, self._weights)

    def copy_page(self) -> Program:
        """Copies one page of target and drafter onto another."""

        def copy(state: EngineState, source, onto) -> EngineState:
            num_pages = state.cache.keys_PKSH[0].shape[0]

            def copied(x):
                return x.at[onto].set(x[source]) if x.ndim == 4 and x.shape[0] == num_pages else x

            cache, context = jax.tree.map(copied, (state.cache, state.context))
            return dataclasses.replace(state, cache=cache, context=context)

        return self._program(("copy",), copy, "state", self._state, np.int32(0), np.int32(0))

    def admission(
        self, request: Request, *, slot: int, start: int, num_tokens: int, is_last: bool, pages
    ) -> Admission:
        """What the program of a chunk must know of its request, as arrays."""
        stops_np = np.full(self.config.num_stops, -1, np.int32)
        known = sorted(request.stop_ids)[: self.config.num_stops]
        stops_np[: len(known)] = known
        arrays: dict[str, Any] = {
            "slot": np.int32(slot),
            "start": np.int32(start),
            "num_tokens": np.int32(num_tokens),
            "is_last": np.bool_(is_last),
            "anchor": np.int32(request.emitted[-1] if request.emitted else -1),
            "remaining": np.int32(request.max_new_tokens - len(request.emitted)),
            "stops_W": stops_np,
            "table_1N": self.tables([pages], 1),
        }
        key_1 = request_key(request.sampling.seed, request.sampling.sample)[None]
        return Admission(**arrays, key_1=key_1, sampling_1=sampling_row(request))

    def tables(self, pages, requests: int) -> np.ndarray:
        """Page tables [R, N] of requests that hold these pages."""
        table_np = np.zeros((requests, self.config.pages_per_slot(self.models.block_len)), np.int32)
        for row, held in enumerate(pages):
            table_np[row, : len(held)] = held
        return table_np

    def _places(self, requests: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(requests, np.int32), self.tables([], requests)

    def _program(self, name: tuple, function: Callable, donated: str | None, *args) -> Program:
        if name not in self.compiled:
            start_s = time.perf_counter()
            jitted = jax.jit(function, donate_argnames=donated, out_shardings=self._out_shardings(name))
            with on_mesh(self._mesh):
                self.compiled[name] = jitted.lower(*args).compile()
            self.compile_s += time.perf_counter() - start_s
        return self.compiled[name]

    def _out_shardings(self, name: tuple) -> Any:
        """The next state lies as the last one did, results lie everywhere."""
        match name[0]:
            case "prefill" | "verify":
                return (self._state_shardings, self._everywhere) if self._mesh else None
            case "copy":
                return self._state_shardings
            case "draft":
                return self._draft_shardings
            case _:
                return self._everywhere


def sampling_row(request: Request) -> SamplingParams:
    """The parameters of one request, [1] each."""
    options = request.sampling
    early_np = np.full((1, MAX_STOP_IDS), -1, np.int32)
    if request.min_new_tokens:
        early_np[0, : len(request.stop_ids)] = sorted(request.stop_ids)
    arrays: dict[str, Any] = {
        "temperature_B": np.array([options.temperature], np.float32),
        "top_k_B": np.array([options.top_k], np.int32),
        "top_p_B": np.array([options.top_p], np.float32),
        "min_p_B": np.array([options.min_p], np.float32),
        "stop_ids_BJ": early_np,
        "stop_from_B": np.array([request.stop_from], np.int32),
    }
    return SamplingParams(**arrays)
