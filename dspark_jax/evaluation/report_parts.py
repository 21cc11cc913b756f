"""What a report is made of: sections with tables and charts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspark_jax.evaluation.chart_svg import MAX_SERIES
from dspark_jax.evaluation.charts import Chart

Result = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text; the first cell of a row names it."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report under one heading."""

    title: str
    text: str
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()


def chunked(make: Callable[[Sequence[Any]], Chart], items: Sequence[Any]) -> list[Chart]:
    """One chart, or several when there are more series than can be told apart."""
    parts = [items[start : start + MAX_SERIES] for start in range(0, len(items), MAX_SERIES)]
    charts = [make(part) for part in parts]
    if len(charts) < 2:
        return charts
    return [
        dataclasses.replace(chart, title=f"{chart.title} ({place} of {len(charts)})")
        for place, chart in enumerate(charts, start=1)
    ]


def by_temperature(runs: Sequence[tuple[Any, Result]]) -> list[tuple[float, list[tuple[Any, Result]]]]:
    """Runs by temperature, in the order in which these first occur."""
    temperatures = dict.fromkeys(of["temperature"] for _, of in runs)
    return [(t, [(name, of) for name, of in runs if of["temperature"] == t]) for t in temperatures]


def interval_text(estimate: Mapping[str, float | None]) -> str:
    """A value with its interval, as tables show it."""
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    if value is None:
        return "–"
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"
