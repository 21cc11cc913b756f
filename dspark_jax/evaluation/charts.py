"""A chart as data: the same one becomes SVG in a report, a PNG for a paper, and the table behind both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from dspark_jax.core.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One value, with its interval where there is one."""

    x: float
    """Place on the horizontal axis; in a chart with categories the number of the category."""
    y: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """The values of one run."""

    name: str
    points: tuple[Point, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over a number, or dots over categories.

    Attributes:
      title: what is shown.
      summary: one sentence for who cannot see it.
      x_label: horizontal axis, with its unit.
      y_label: vertical axis, with its unit.
      series: at most as many as there are colours, markers and dashes.
      categories: names of x = 0, 1, ...; empty for a numeric axis. Dots are not joined then.
      diagonal: draw y = x.
      percent: y is a share, shown in per cent.
      log_x: logarithmic horizontal axis.
      from_zero: the vertical axis includes 0.
    """

    title: str
    summary: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    diagonal: bool = False
    percent: bool = False
    log_x: bool = False
    from_zero: bool = False

    def __post_init__(self):
        require(
            any(series.points for series in self.series),
            given=f"chart {self.title!r} without a point",
            expected="at least one value",
            fix="leave the chart out",
        )

    @property
    def x_range(self) -> tuple[float, float]:
        """Ends of the horizontal axis."""
        if self.categories:
            return -0.5, len(self.categories) - 0.5
        places = [point.x for series in self.series for point in series.points]
        low, high = min(places), max(places)
        if self.diagonal:
            return 0.0, 1.0
        return (low - 0.5, high + 0.5) if low == high else (low, high)

    @property
    def y_range(self) -> tuple[float, float]:
        """Ends of the vertical axis, on ticks."""
        ticks = self.y_ticks
        return ticks[0], ticks[-1]

    @property
    def y_ticks(self) -> list[float]:
        """Round values that enclose all points and intervals."""
        if self.diagonal:
            return [0.0, 0.25, 0.5, 0.75, 1.0]
        values = [value for series in self.series for point in series.points for value in _extent(point)]
        if self.from_zero:
            values.append(0.0)
        return round_ticks(min(values), max(values))

    @property
    def x_ticks(self) -> list[float]:
        """Round values within the horizontal axis, or the points' own places when they are few."""
        if self.categories:
            return [float(place) for place in range(len(self.categories))]
        places = sorted({point.x for series in self.series for point in series.points})
        if len(places) <= 7:
            return places
        low, high = self.x_range
        return [tick for tick in round_ticks(low, high) if low <= tick <= high]

    def x_text(self, x: float) -> str:
        """How a place on the horizontal axis is written."""
        return self.categories[round(x)] if self.categories else number(x)

    def y_text(self, y: float) -> str:
        """How a value on the vertical axis is written."""
        return f"{100 * y:.4g} %" if self.percent else number(y)

    @property
    def header(self) -> list[str]:
        """Columns of the table behind the chart."""
        return [self.x_label or "", *(series.name for series in self.series)]

    @property
    def rows(self) -> list[list[str]]:
        """Rows of the table behind the chart, with intervals."""
        places = sorted({point.x for series in self.series for point in series.points})
        by_place = [{point.x: point for point in series.points} for series in self.series]
        return [
            [self.x_text(x), *(self._cell(points[x]) if x in points else "–" for points in by_place)]
            for x in places
        ]

    def _cell(self, point: Point) -> str:
        decimals = 1 if self.percent else 3
        values = [value for value in (point.y, point.low, point.high) if value is not None]
        texts = [f"{(100 if self.percent else 1) * value:.{decimals}f}" for value in values]
        text = texts[0] if len(texts) < 3 else f"{texts[0]} [{texts[1]}, {texts[2]}]"
        return f"{text} %" if self.percent else text


def round_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` multiples of 1, 2 or 5 times a power of ten that enclose [low, high]."""
    span = (high - low) or max(abs(high), 1.0) * 0.1
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * wanted >= span)
    first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def number(value: float) -> str:
    """A number as short as can be read."""
    return f"{value:.4g}"


def joined(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _extent(point: Point) -> list[float]:
    return [value for value in (point.y, point.low, point.high) if value is not None]
