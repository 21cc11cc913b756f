"""Charts as SVG that takes its colours from the page: light, dark, and readable without colour."""

from __future__ import annotations

import math
from html import escape

from dspark_jax.evaluation.charts import Chart, Point, Series
from dspark_jax.evaluation.plotting import COLOURS

WIDTH, HEIGHT = 440, 310
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 12, 52
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2", "1 2", "12 4")
MAX_SERIES = len(COLOURS)
_SIZE = 4.2


def svg(chart: Chart, name: str) -> str:
    """One chart.

    Args:
      chart: what to draw.
      name: id within the page.
    """
    scale = _Scale(chart)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-summary">',
        f'<title id="{name}-title">{escape(chart.title)}</title>',
        f'<desc id="{name}-summary">{escape(chart.summary)}</desc>',
        *_axes(chart, scale),
    ]
    if chart.diagonal:
        parts.append(_line("diagonal", scale.x(0), scale.y(0), scale.x(1), scale.y(1)))
    for place, series in enumerate(chart.series):
        parts.append(_series(chart, scale, series, place))
    return "\n".join([*parts, "</svg>"])


def swatch(place: int) -> str:
    """The sign of a series in a legend."""
    line = f'<line class="mark" x1="1" y1="8" x2="33" y2="8" {_dash(place)}/>'
    return (
        f'<svg class="s{place} swatch" viewBox="0 0 34 16" aria-hidden="true">'
        f"{line}{_marker(place, 17, 8)}</svg>"
    )


class _Scale:
    """From values to places in the picture."""

    def __init__(self, chart: Chart):
        self._log = chart.log_x
        self._x_low, self._x_high = map(self._place, chart.x_range)
        self._y_low, self._y_high = chart.y_range

    def _place(self, x: float) -> float:
        return math.log10(x) if self._log else x

    def x(self, value: float) -> float:
        share = (self._place(value) - self._x_low) / (self._x_high - self._x_low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self._y_low) / (self._y_high - self._y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _axes(chart: Chart, scale: _Scale) -> list[str]:
    bottom, parts = HEIGHT - BOTTOM, []
    for tick in chart.y_ticks:
        y = scale.y(tick)
        parts.append(_line("grid", LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 7, y + 5, chart.y_text(tick), "end"))
    parts.append(_line("axis", LEFT, bottom, WIDTH - RIGHT, bottom))
    ticks = chart.x_ticks
    # Names that would run into one another take turns on two lines.
    wide = max(len(chart.x_text(tick)) for tick in ticks) * 8 > (WIDTH - LEFT - RIGHT) / len(ticks)
    for place, tick in enumerate(ticks):
        x, down = scale.x(tick), 16 * (wide and place % 2)
        parts.append(_line("axis", x, bottom, x, bottom + 4))
        parts.append(_text(x, bottom + 19 + down, chart.x_text(tick), "middle"))
    if chart.x_label and not (wide and chart.categories):
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, chart.x_label, "middle", "label"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="label" transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )
    return parts


def _series(chart: Chart, scale: _Scale, series: Series, place: int) -> str:
    parts = [f'<g class="s{place}">']
    # Runs stand side by side within a category.
    shift = 0.0
    if chart.categories:
        room = (WIDTH - LEFT - RIGHT) / len(chart.categories)
        shift = (place - (len(chart.series) - 1) / 2) * min(0.7 * room / len(chart.series), 16)
    places = [(scale.x(point.x) + shift, scale.y(point.y), point) for point in series.points]
    if not chart.categories and len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline class="mark" points="{path}" {_dash(place)}/>')
    for x, y, point in places:
        if point.low is not None and point.high is not None:
            parts.append(_line("whisker", x, scale.y(point.low), x, scale.y(point.high)))
        parts.append(f"<g><title>{escape(_hover(chart, series, point))}</title>{_marker(place, x, y)}</g>")
    return "".join([*parts, "</g>"])


def _hover(chart: Chart, series: Series, point: Point) -> str:
    interval = ""
    if point.low is not None and point.high is not None:
        interval = f" [{chart.y_text(point.low)}, {chart.y_text(point.high)}]"
    return f"{series.name}, {chart.x_text(point.x)}: {chart.y_text(point.y)}{interval}"


def _marker(place: int, x: float, y: float) -> str:
    """A shape of its own for every series: colour is never the only difference."""
    s = _SIZE
    match place % MAX_SERIES:
        case 0:
            return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{s:.1f}"/>'
        case 1:
            side = f'width="{2 * s:.1f}" height="{2 * s:.1f}"'
            return f'<rect class="dot" x="{x - s:.1f}" y="{y - s:.1f}" {side}/>'
        case 2:
            corners = [(0, -s - 1), (s + 1, s), (-s - 1, s)]
        case 3:
            corners = [(0, -s - 1), (s + 1, 0), (0, s + 1), (-s - 1, 0)]
        case 4:
            corners = [(0, s + 1), (s + 1, -s), (-s - 1, -s)]
        case 5:
            return f'<circle class="dot hollow" cx="{x:.1f}" cy="{y:.1f}" r="{s:.1f}"/>'
        case _:
            arm = s / 2.5
            corners = [(-s, -arm), (-arm, -arm), (-arm, -s), (arm, -s), (arm, -arm), (s, -arm)]
            corners += [(-a, -b) for a, b in corners]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="dot" points="{points}"/>'


def _dash(place: int) -> str:
    dash = DASHES[place % len(DASHES)]
    return f'stroke-dasharray="{dash}"' if dash else ""


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
