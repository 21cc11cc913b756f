"""What a program costs before it runs: FLOPs from its trace, collectives and memory from its compilation.

XLA's own cost analysis counts the body of a loop once; the trace knows how often it runs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_DTYPE_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f64": 8,
    "s64": 8,
    "u64": 8,
}
_OPERATION = re.compile(rf"= (.+?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
_MADE = re.compile(r"= (\(?[a-z]+\d*\[.*?) (?!parameter|get-tuple-element|tuple|while|conditional)[a-z-]+\(")
# Computations of a compiled program, what a line of one calls, and how often a loop turns.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*?\{$(.*?)^\}", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCost:
    """Matrix products of a program, over all devices."""

    flops: float = 0.0
    """Floating-point operations, two for every multiply-add."""
    traffic_bytes: float = 0.0
    """Operands and results, each moved once per product: an upper bound that fusion lowers."""

    def __add__(self, other: MatmulCost) -> MatmulCost:
        return MatmulCost(
            flops=self.flops + other.flops, traffic_bytes=self.traffic_bytes + other.traffic_bytes
        )

    def __mul__(self, times: float) -> MatmulCost:
        return MatmulCost(flops=self.flops * times, traffic_bytes=self.traffic_bytes * times)


def matmul_cost(closed_jaxpr: Any) -> MatmulCost:
    """Matrix products of a trace (`jax.make_jaxpr`), loops counted as often as they run.

    A `while` whose number of turns the trace does not know counts once; of the branches of a `cond` the
    dearest counts.
    """
    return _of_jaxpr(closed_jaxpr.jaxpr)


def _of_jaxpr(jaxpr: Any) -> MatmulCost:
    total = MatmulCost()
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _of_dot(equation)
        elif name == "ragged_dot_general":
            total += _of_ragged_dot(equation)
        elif name == "cond":
            total += max((_of_jaxpr(branch.jaxpr) for branch in params["branches"]), key=lambda c: c.flops)
        else:
            times = 1
            if name == "scan":
                times = params["length"]
            elif name == "pallas_call":
                times = math.prod(params["grid_mapping"].grid)  # what it skips is counted, too
            elif name == "shard_map":  # seen from one device
                times = params["mesh"].size
            for inner in _inner_jaxprs(params):
                total += _of_jaxpr(inner) * times
    return total


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def _of_dot(equation: Any) -> MatmulCost:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return _product(equation, depth=math.prod(shape[axis] for axis in contracted))


def _of_ragged_dot(equation: Any) -> MatmulCost:
    """Rows [N, D] by the kernel [D, F] of their group."""
    return _product(equation, depth=equation.invars[0].aval.shape[-1])


def _product(equation: Any, depth: int) -> MatmulCost:
    arrays = [variable.aval for variable in (*equation.invars[:2], *equation.outvars)]
    return MatmulCost(
        flops=2.0 * math.prod(arrays[-1].shape) * depth,
        traffic_bytes=float(sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one kind in a compiled program."""

    count: int
    """Times that one is run; what is in a loop of unknown length counts once."""
    largest_bytes: int
    """Bytes of the largest result on one device."""
    total_bytes: int
    """Bytes of all results on one device."""


def collectives(compiled: jax.stages.Compiled) -> dict[str, Collective]:
    """Collectives of a compiled program by kind, as often as they run."""
    bodies = {name: body for _, name, body in _COMPUTATION.findall(compiled.as_text() or "")}
    runs: collections.Counter[str] = collections.Counter()

    def run(name: str, times: int) -> None:
        runs[name] += times
        for line in bodies.get(name, "").splitlines():
            turns = _TURNS.search(line)
            for called in _CALLED.findall(line):
                run(called, times * (int(turns.group(1)) if turns else 1))

    run(next(name for entry, name, _ in _COMPUTATION.findall(compiled.as_text() or "") if entry), 1)
    found: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for name, times in runs.items():
        for shapes, kind in _OPERATION.findall(bodies.get(name, "")):
            found[kind].append((times, sum(map(_shape_bytes, _SHAPE.findall(shapes)))))
    return {
        kind: Collective(
            count=sum(times for times, _ in sizes),
            largest_bytes=max(size for _, size in sizes),
            total_bytes=sum(times * size for times, size in sizes),
        )
        for kind, sizes in sorted(found.items())
    }


def largest_array_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of the largest array that any instruction of a compiled program makes, on one device."""
    made = _MADE.findall(compiled.as_text() or "")
    return max(_shape_bytes(shape) for result in made for shape in _SHAPE.findall(result))


def _shape_bytes(shape: tuple[str, str]) -> int:
    dtype, sizes = shape
    elements = math.prod(int(size) for size in sizes.split(",")) if sizes else 1
    return elements * _DTYPE_BYTES.get(dtype, 4)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of sharded shapes on one device."""

    def of_leaf(x: Any) -> int:
        shape = x.sharding.shard_shape(x.shape) if getattr(x, "sharding", None) is not None else x.shape
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(of_leaf, jax.tree.leaves(tree)))
