"""The sections of benchmarks: stages of a round, and load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_jax.evaluation.charts import Chart, Point, Series, joined
from dspark_jax.evaluation.report_parts import Result, Section, Table, chunked

LABELS = {
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_request": "tokens/s of one request",
    "arrivals_per_s": "arrivals per second",
    "budget": "draft tokens verified in a round",
}


def speeds(results: Sequence[Result]) -> list[Section]:
    """What `benchmarks/speed.py` and `benchmarks/sequential_head.py` write."""
    names = list(dict.fromkeys(name for result in results for name in result["round_ms"]))
    table = Table(
        caption="A round taken apart, median milliseconds",
        header=["stage", *(result["name"] for result in results)],
        rows=[
            [
                name,
                *(
                    f"{result['round_ms'][name]:.2f}" if name in result["round_ms"] else "–"
                    for result in results
                ),
            ]
            for name in names
        ],
    )
    totals = {"sum of stages", "fused round", "engine step", "plain round"}
    stages = [name for name in names if name not in totals]
    charts = chunked(
        lambda part: Chart(
            title="Stages of a round",
            summary=f"Milliseconds of {joined(stages)}.",
            x_label="",
            y_label="ms",
            series=tuple(
                Series(
                    name=result["name"],
                    points=tuple(
                        Point(x=place, y=result["round_ms"][name])
                        for place, name in enumerate(stages)
                        if name in result["round_ms"]
                    ),
                )
                for result in part
            ),
            categories=tuple(stages),
            from_zero=True,
        ),
        results,
    )
    text = "Every stage as a program of its own, the fused round, and the engine's step around it, in turns."
    return [Section(title="Round latency", text=text, tables=[table], charts=charts)]


def loads(results: Sequence[Result]) -> list[Section]:
    """Rows of `benchmarks/load.py` and `benchmarks/lag.py`."""
    return [_load(result) for result in results]


def _load(result: Result) -> Section:
    rows = result["rows"]
    load = "concurrency" if "concurrency" in rows[0] else "arrivals_per_s"
    columns = [name for name in rows[0] if name != "scheduler"]
    table = Table(
        caption="All measurements",
        header=["scheduler", *(name.replace("_", " ") for name in columns)],
        rows=[[row["scheduler"], *(_cell(row.get(name)) for name in columns)] for row in rows],
    )
    curves = [
        ("Throughput against load", load, "tokens_per_s"),
        ("Throughput against the speed of one request", "tokens_per_s_per_request", "tokens_per_s"),
        ("Draft budget against load", load, "budget"),
    ]
    charts = [
        chart
        for title, x, y in curves
        if x in rows[0] and y in rows[0]
        for chart in chunked(
            lambda schedulers, title=title, x=x, y=y: _curve(title, rows, schedulers, x, y),
            list(dict.fromkeys(row["scheduler"] for row in rows)),
        )
    ]
    text = result.get("text", "Requests decoded at the same time, and what each of them gets.")
    return Section(title=f"Load: {result['name']}", text=text, tables=[table], charts=charts)


def _curve(title: str, rows: Sequence[Result], schedulers: Sequence[str], x: str, y: str) -> Chart:
    labels = [LABELS.get(name, name.replace("_", " ")) for name in (x, y)]
    return Chart(
        title=title,
        summary=f"{labels[1].capitalize()} against {labels[0]} for {joined(schedulers)}.",
        x_label=labels[0],
        y_label=labels[1],
        series=tuple(
            Series(
                name=scheduler,
                points=tuple(
                    Point(x=row[x], y=row[y])
                    for row in rows
                    if row["scheduler"] == scheduler and row.get(y) is not None
                ),
            )
            for scheduler in schedulers
        ),
        from_zero=True,
    )


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}"
