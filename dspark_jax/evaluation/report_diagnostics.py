"""The sections of diagnostics and calibrations: thresholds, reliability, shift, context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.evaluation.chart_svg import MAX_SERIES
from dspark_jax.evaluation.charts import Chart, Point, Series
from dspark_jax.evaluation.report_parts import Result, Section, Table

Figures = Mapping[str, Mapping[str, Sequence[Any]]]
"""raw or scaled -> ece, auroc or brier -> positions."""
ABOUT = (
    "Computed from the rounds of an evaluation in which every block was verified whole. A threshold stops"
    " verification at the first token whose confidence is below it. Calibration is fitted on half of the"
    " prompts and measured on the other half."
)


def diagnostics(results: Sequence[Result]) -> list[Section]:
    """What `dspark diagnose` writes."""
    made = []
    for name, of in ((result["name"], of) for result in results for of in result["results"]):
        title = f"Diagnostics: {name}, temperature {of['temperature']:g}"
        charts: list[Chart] = []
        tables: list[Table] = []
        if of["fitted"] is not None:
            charts += _threshold_charts(of["thresholds"])
            charts += _reliability_charts(of)
            charts.append(_errors_chart(of["figures"]))
            tables.append(_figures_table(of["figures"], of["fitted"]))
        if of["shift"]:
            tables.append(_shift_table(of["shift"]))
        if of["context"]:
            charts.append(_context_chart(of["context"]))
        made.append(
            Section(
                title=title,
                text=ABOUT,
                tables=tables,
                charts=charts,
            )
        )
    return made


def _threshold_charts(sweeps: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Chart]:
    def chart(
        title: str, y_label: str, fields: Mapping[str, tuple[str, str]], percent: bool = False
    ) -> Chart:
        series = tuple(
            Series(
                name=name,
                points=tuple(
                    Point(x=row["threshold"], y=row[field]) for row in sweeps[sweep] if row[field] is not None
                ),
            )
            for name, (sweep, field) in fields.items()
        )
        return Chart(
            title=title,
            summary=f"{y_label.capitalize()} against the confidence threshold.",
            x_label="confidence threshold",
            y_label=y_label,
            series=tuple(one for one in series if one.points),
            percent=percent,
            from_zero=True,
        )

    counts = {name: ("all", name) for name in ("accepted", "rejected")}
    domains = {domain: (domain, "acceptance") for domain in list(sweeps)[:MAX_SERIES]}
    return [
        chart("Draft tokens by threshold", "tokens per round", counts),
        chart("Acceptance of verified tokens by threshold", "accepted", domains, percent=True),
    ]


def _reliability_charts(of: Result) -> list[Chart]:
    charts = []
    for k, positions in enumerate(zip(of["reliability"]["raw"], of["reliability"]["scaled"], strict=True)):
        series = tuple(
            Series(name=name, points=tuple(Point(x=x, y=y) for x, y, _ in points))
            for name, points in zip(("raw", "scaled"), positions, strict=True)
            if points
        )
        if series:
            charts.append(
                Chart(
                    title=f"Reliability, first {k + 1} accepted"
                    if k
                    else "Reliability, first draft accepted",
                    summary="Observed share against predicted survival; the diagonal is perfect calibration.",
                    x_label="predicted",
                    y_label="observed",
                    series=series,
                    diagonal=True,
                )
            )
    return charts


def _errors_chart(figures: Figures) -> Chart:
    return Chart(
        title="Calibration error by position",
        summary="Expected calibration error of predicted survival, raw and scaled.",
        x_label="position in the block",
        y_label="expected calibration error",
        series=tuple(
            Series(name=name, points=tuple(Point(x=k + 1, y=e) for k, e in enumerate(of["ece"])))
            for name, of in figures.items()
        ),
        percent=True,
        from_zero=True,
    )


def _figures_table(figures: Figures, fitted: Sequence[Sequence[float]]) -> Table:
    rows = []
    for k, (temperature, shift) in enumerate(zip(*fitted, strict=True)):
        cells = [str(k + 1), f"{temperature:.2f}", f"{shift:.2f}"]
        for measure, scale, digits in (("ece", 100, 2), ("auroc", 1, 3), ("brier", 1, 3)):
            values = [figures[name][measure][k] for name in figures]
            cells += ["–" if value is None else f"{scale * value:.{digits}f}" for value in values]
        rows.append(cells)
    names = [f"{measure} {name}" for measure in ("ECE %", "AUROC", "Brier") for name in figures]
    return Table(
        caption="Predicted survival, raw and scaled", header=["position", "T", "shift", *names], rows=rows
    )


def _shift_table(shift: Mapping[str, Mapping[str, float]]) -> Table:
    domains = list(next(iter(shift.values())))
    return Table(
        caption="Calibration under shift: mean ECE % when fitted on one domain, measured on another",
        header=["fitted on", *domains],
        rows=[[name, *(f"{100 * of[domain]:.2f}" for domain in domains)] for name, of in shift.items()],
    )


def _context_chart(rows: Sequence[Mapping[str, float]]) -> Chart:
    points = tuple(
        Point(
            x=place,
            y=row["accepted_length"],
            low=row["accepted_length"] - 1.96 * row["standard_error"],
            high=row["accepted_length"] + 1.96 * row["standard_error"],
        )
        for place, row in enumerate(rows)
    )
    return Chart(
        title="Accepted length by context length",
        summary="Tokens per round of rounds that start from contexts of different length.",
        x_label="tokens of context",
        y_label="tokens per round",
        series=(Series(name="all rounds", points=points),),
        categories=tuple(f"{row['from_tokens']}–{row['below_tokens'] - 1}" for row in rows),
    )


def calibrations(results: Sequence[Result]) -> list[Section]:
    """What `dspark calibrate` writes."""
    return [_calibration(result) for result in results]


def _calibration(result: Result) -> Section:
    evidence, identity = result["evidence"], result["identity"]
    figures = {"raw": evidence["before"], "scaled": evidence["after"]}
    rounds = evidence["rounds"]
    return Section(
        title=f"Calibration: {result['name']}",
        text=f"For {identity['sampling']}, {identity['numerics']}. Fitted on {rounds['fitted']} rounds,"
        f" checked on {rounds['checked']} of other prompts.",
        tables=[_figures_table(figures, (result["temperatures"], result["shifts"]))],
        charts=[_errors_chart(figures)],
    )
