"""Charts as PNG, for papers."""

from __future__ import annotations

from pathlib import Path

from dspark_jax.evaluation.chart_svg import DASHES
from dspark_jax.evaluation.charts import Chart
from dspark_jax.evaluation.plotting import COLOURS, FAINT, light_grid, png

MARKERS = ("o", "s", "^", "D", "v", "o", "P")


def draw_png(chart: Chart, path: Path) -> None:
    """Draws one chart with its legend.

    Raises:
      InputError: matplotlib is not installed.
    """
    with png(path, width=5.4, height=3.8) as figure:
        axes = figure.subplots()
        count = len(chart.series)
        for place, series in enumerate(chart.series):
            shift = (place - (count - 1) / 2) * min(0.7 / count, 0.15) if chart.categories else 0.0
            x = [point.x + shift for point in series.points]
            y = [point.y for point in series.points]
            whiskers = [
                [point.y - point.low if point.low is not None else 0.0 for point in series.points],
                [point.high - point.y if point.high is not None else 0.0 for point in series.points],
            ]
            dash = DASHES[place]
            style = (0, tuple(map(float, dash.split()))) if dash else "-"
            axes.errorbar(
                x,
                y,
                yerr=whiskers if any(map(any, whiskers)) else None,
                color=COLOURS[place],
                marker=MARKERS[place],
                markersize=5,
                markerfacecolor="white" if place == 5 else COLOURS[place],
                linestyle="none" if chart.categories else style,
                linewidth=1.6,
                label=series.name,
            )
        if chart.diagonal:
            axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1.5, zorder=0)
        if chart.log_x:
            axes.set_xscale("log")
        axes.set_xticks(chart.x_ticks, [chart.x_text(tick) for tick in chart.x_ticks])
        axes.set_yticks(chart.y_ticks, [chart.y_text(tick) for tick in chart.y_ticks])
        if chart.categories and len(chart.categories) > 4:
            axes.tick_params(axis="x", rotation=30)
        axes.set_title(chart.title)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        light_grid(axes)
        if count > 1:
            axes.legend(frameon=False, fontsize=9)
