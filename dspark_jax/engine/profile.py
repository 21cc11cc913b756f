"""Measured times of an engine's own compiled programs: what its scheduler knows of the machine.

Every declared program is timed on scratch pages, several times in an order that changes, so that a slow
minute of the machine does not fall on one of them. Times that a curve which never falls does not fit are
measured again. By default only the shortest and the longest context are measured, with straight lines in
between: attention grows linearly with the context, everything else does not grow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from dspark_jax.core.buckets import powers_of_two
from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write
from dspark_jax.core.user_cache import cache_directory
from dspark_jax.engine.compiled import Programs
from dspark_jax.engine.state import Drafts, EngineState
from dspark_jax.speculation.cost import CostTable, implausible, monotone
from dspark_jax.speculation.sampling import Draw

SMALLEST_CONTEXT = 128
REPEATS, MORE_REPEATS = 5, 10
VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One program at one context: `rows` is None for a draft."""

    requests: int
    rows: int | None
    context: int


class Bench:
    """The programs of an engine, ready to be timed on pages and slots of their own.

    Args:
      programs: of the engine.
      draw: what the measured programs can draw.
    """

    def __init__(self, programs: Programs, draw: Draw):
        self._programs, self._draw = programs, draw
        self._state: EngineState = programs.new_state()
        self._drafts: Drafts | None = None if programs.models.drafter is None else programs.new_drafts()

    def once_ms(self, shape: Shape) -> float:
        """ms from dispatch to results of a step in which every request is at the shape's context."""
        config, R = self._programs.config, shape.requests
        slots = np.arange(config.slots)
        self._state = jax.block_until_ready(
            dataclasses.replace(
                self._state,
                positions_B=jax.numpy.full(config.slots, shape.context - 1, np.int32),
                active_B=jax.numpy.asarray(slots < R),
                remaining_B=jax.numpy.full(config.slots, 2**30, np.int32),
            )
        )
        # Requests may share pages here: what is in them does not matter.
        pages_per_slot = config.pages_per_slot(self._programs.models.block_len)
        num_pages = config.total_pages(self._programs.models.block_len)
        table_np = (np.arange(R * pages_per_slot) % num_pages).reshape(R, -1).astype(np.int32)
        places = (np.arange(R, dtype=np.int32), table_np)
        if shape.rows is None:
            program = self._programs.draft(R, self._draw)
            start_s = time.perf_counter()
            self._drafts = jax.block_until_ready(program(self._state, self._drafts, *places))
            return 1000 * (time.perf_counter() - start_s)
        G = self._programs.models.block_len
        extra, over = divmod(shape.rows - R, R)
        lengths_np = np.minimum(extra + (np.arange(R) < over), G).astype(np.int32)
        survival_np = np.zeros((R, G), np.float32)
        program = self._programs.verify(R, shape.rows, self._draw)
        start_s = time.perf_counter()
        self._state, result = program(self._state, self._drafts, *places, lengths_np, survival_np)
        jax.block_until_ready((self._state, result))
        return 1000 * (time.perf_counter() - start_s)


def measure_costs(programs: Programs, *, draw: Draw = Draw.GREEDY, every_context: bool = False) -> CostTable:
    """Times every program that the engine's scheduler can choose.

    Args:
      programs: of the engine; those that are missing compile.
      draw: what the measured programs can draw; the differences between draws are small beside the rest.
      every_context: measure every context bucket, not only the smallest and the largest.
    """
    config, G = programs.config, programs.models.block_len
    contexts = context_buckets(config.max_context)
    measured = contexts if every_context else tuple(sorted({contexts[0], contexts[-1]}))
    rows_of = {R: config.row_buckets(R, G) for R in config.request_buckets}
    curves = [
        [Shape(requests=R, rows=rows, context=context) for rows in rows_of[R]]
        for R in rows_of
        for context in measured
    ]
    drafts = [Shape(requests=R, rows=None, context=context) for R in rows_of for context in measured]
    times = _median_times(Bench(programs, draw), curves, drafts if G else [])

    all_rows = tuple(sorted({rows for of_bucket in rows_of.values() for rows in of_bucket}))

    def at_contexts(R: int, rows: int | None) -> np.ndarray:
        known = [times[Shape(requests=R, rows=rows, context=context)] for context in measured]
        return np.interp(contexts, measured, known)

    verify_ms_np = np.full((len(rows_of), len(all_rows), len(contexts)), np.inf)
    for r, R in enumerate(rows_of):
        for rows in rows_of[R]:
            verify_ms_np[r, all_rows.index(rows)] = at_contexts(R, rows)
    draft_ms_np = np.stack([at_contexts(R, None) if G else np.ones(len(contexts)) for R in rows_of])
    return CostTable(
        request_buckets=tuple(rows_of),
        row_buckets=all_rows,
        context_buckets=contexts,
        verify_ms_np=verify_ms_np,
        draft_ms_np=draft_ms_np,
        fingerprint=fingerprint(programs),
    )


def context_buckets(max_context: int) -> tuple[int, ...]:
    """Declared contexts of the table, in tokens; the last one is max_context."""
    powers = powers_of_two(min(SMALLEST_CONTEXT, max_context), max_context)
    return (*(context for context in powers if context < max_context), max_context)


def _median_times(bench: Bench, curves: list[list[Shape]], drafts: list[Shape]) -> dict[Shape, float]:
    """Median ms of every shape; curves over rows are made monotone."""
    shapes = [shape for curve in curves for shape in curve] + drafts
    samples: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    order = np.random.default_rng(0)
    for shape in tqdm(shapes, desc="compiling and warming up", unit="program", leave=False):
        bench.once_ms(shape)

    def measure(again: list[Shape], repeats: int, why: str) -> None:
        turns = [again[i] for _ in range(repeats) for i in order.permutation(len(again))]
        for shape in tqdm(turns, desc=why, unit="step", leave=False):
            samples[shape].append(bench.once_ms(shape))

    def median(shape: Shape) -> float:
        return float(np.median(samples[shape]))

    measure(shapes, REPEATS, "measuring")
    doubtful = [
        shape
        for curve in curves
        for shape, bad in zip(curve, implausible([median(s) for s in curve]), strict=True)
        if bad
    ]
    measure(doubtful, MORE_REPEATS, "measuring again")
    times = {shape: median(shape) for shape in drafts}
    for curve in curves:
        times |= zip(curve, monotone([median(shape) for shape in curve]).tolist(), strict=True)
    return times


def fingerprint(programs: Programs) -> str:
    """Of everything that a measured time depends on: models, dtypes, device, shapes, versions."""
    models, config = programs.models, programs.config
    device = jax.devices()[0]
    facts = {
        "target": models.target,
        "drafter": None if models.drafter is None else models.drafter.config,
        "dtypes": [np.dtype(config.dtype).name],
        "device": [device.platform, device.device_kind, os.cpu_count()],
        "block_len": models.block_len,
        "page_len": config.page_len,
        "shapes": [config.slots, config.max_context, type(config.policy).__name__],
        "mesh": {"tensor": config.tensor},
        "versions": [jax.__version__, VERSION],
    }
    return hashlib.sha256(json.dumps(facts, default=repr, sort_keys=True).encode()).hexdigest()[:16]


def default_directory() -> Path:
    """Where tables are kept that nobody asked for elsewhere."""
    return cache_directory() / "costs"


def save_costs(table: CostTable, path: Path) -> None:
    """Writes a table, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "version": VERSION,
        "fingerprint": table.fingerprint,
        "request_buckets": table.request_buckets,
        "row_buckets": table.row_buckets,
        "context_buckets": table.context_buckets,
        # JSON knows no infinity: no program, no time.
        "verify_ms": [
            [[t if np.isfinite(t) else None for t in row] for row in rows]
            for rows in table.verify_ms_np.tolist()
        ],
        "draft_ms": table.draft_ms_np.tolist(),
    }
    with atomic_write(path, "w") as file:
        json.dump(content, file, indent=1, allow_nan=False)


def load_costs(path: Path, expected: str) -> CostTable:
    """Reads a table that was measured on this very engine.

    Args:
      path: written by `save_costs`.
      expected: the engine's fingerprint.

    Raises:
      InputError: no such file, or a table of something else.
    """
    try:
        content = json.loads(path.read_text())
        table = CostTable(
            **{name: tuple(content[name]) for name in ("request_buckets", "row_buckets", "context_buckets")},
            verify_ms_np=np.array(
                [[[np.inf if t is None else t for t in row] for row in rows] for rows in content["verify_ms"]]
            ),
            draft_ms_np=np.array(content["draft_ms"]),
            fingerprint=content["fingerprint"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            given=f"{path}: {error!r}", expected="a cost table", fix="measure one with `dspark profile`"
        ) from error
    if table.fingerprint != expected or content.get("version") != VERSION:
        raise InputError(
            given=f"{path}, measured on {table.fingerprint}",
            expected=f"a table of this engine, {expected}",
            fix="measure again with `dspark profile`: models, device, shapes or versions differ",
        )
    return table


def costs_of(programs: Programs, path: Path | None, measure: Callable[[], CostTable]) -> CostTable:
    """The stored table of an engine, or a new one that is stored.

    Args:
      programs: of the engine.
      path: a table that must match; None: the one with its fingerprint in the cache directory, if any.
      measure: makes a new one.
    """
    own = fingerprint(programs)
    if path is not None:
        return load_costs(path, own)
    stored = default_directory() / f"{own}.json"
    if stored.is_file():
        return load_costs(stored, own)
    table = measure()
    save_costs(table, stored)
    return table
