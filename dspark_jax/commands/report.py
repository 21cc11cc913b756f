"""`dspark report`: tables and figures of any results in one HTML file, and the figures as PNG."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import tyro

from dspark_jax.core.files import atomic_write
from dspark_jax.evaluation.chart_png import draw_png
from dspark_jax.evaluation.report_page import page
from dspark_jax.evaluation.report_sections import read_results, sections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Set results side by side in one self-contained HTML file."""

    results: tyro.conf.Positional[tuple[Path, ...]]
    """Result files (JSON) of evaluate, compare, diagnose, calibrate and of the benchmarks, in any mixture."""
    output: Path = Path("report.html")
    """HTML file."""
    figures: Path | None = None
    """Also draw every figure as a PNG into this directory."""
    title: str = "Speculative decoding: results"
    """Heading of the report."""


def run(config: Report) -> None:
    """Reads the results and writes the report."""
    results = read_results(config.results)
    made = sections(results)
    with atomic_write(config.output, "w") as file:
        file.write(page(config.title, made, results))
    print(f"wrote {config.output}")
    if config.figures:
        charts = [chart for section in made for chart in section.charts]
        for number, chart in enumerate(charts, start=1):
            name = re.sub(r"[^a-z0-9]+", "-", chart.title.lower()).strip("-")
            draw_png(chart, config.figures / f"{number:02d}-{name}.png")
        print(f"wrote {len(charts)} figures into {config.figures}")
