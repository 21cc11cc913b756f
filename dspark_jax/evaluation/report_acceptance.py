"""The sections of evaluations and comparisons: accepted length, and acceptance by position."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.evaluation.charts import Chart, Point, Series, joined
from dspark_jax.evaluation.report_parts import Result, Section, Table, by_temperature, chunked, interval_text

ABOUT = (
    "Accepted length counts the target's own token, so 1.0 is plain decoding. Every domain counts the same"
    " in the macro average; math, code and chat are averages over the paper's suites. Intervals come from"
    " drawing prompts again with replacement. Conditional acceptance of a position looks only at rounds in"
    " which everything before it was accepted; survival is the share in which everything up to it was."
)


def evaluations(results: Sequence[Result]) -> list[Section]:
    """What `dspark evaluate` writes."""
    runs = [(result["name"], of) for result in results for of in result["results"]]
    about = Table(
        caption="How each run was decoded",
        header=["run", "template", "sampler", "answers up to", "missing suites"],
        rows=[
            [
                result["name"],
                result.get("template", "–"),
                "; ".join(_sampler(of) for of in result["results"]),
                f"{result['config']['max_new_tokens']} tokens",
                ", ".join(result.get("missing_suites", ())) or "none",
            ]
            for result in results
        ],
    )
    section = _accepted_lengths(runs, "Accepted length")
    return [dataclasses.replace(section, tables=[*section.tables, about])]


def comparisons(results: Sequence[Result]) -> list[Section]:
    """What `dspark compare` writes."""
    made = []
    for result in results:
        rows = result["rows"]
        runs = [
            (row["name"], {**of, "macro": {"accepted_length": of["macro"]}})
            for row in rows
            for of in row["results"]
        ]
        others = [(row["name"], of) for row in rows[1:] for of in row["results"]]
        gains = [
            _dots(
                f"Gain over {rows[0]['name']}, temperature {temperature:g}",
                [("difference on the same prompts", {name: of["difference"] for name, of in pairs})],
                from_zero=True,
            )
            for temperature, pairs in by_temperature(others)
        ]
        section = _accepted_lengths(runs, f"Drafters on one budget: {result['name']}")
        made.append(
            dataclasses.replace(
                section, tables=[*section.tables, _training(rows)], charts=[*section.charts, *gains]
            )
        )
    return made


def _training(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        caption="What each drafter was trained on",
        header=["drafter", "block", "steps", "predictions", "minutes"],
        rows=[
            [
                row["name"],
                str(row["block_len"]),
                f"{row['training']['steps']:.0f}",
                f"{row['training']['predictions']:,.0f}",
                f"{row['training']['seconds'] / 60:.1f}",
            ]
            for row in rows
        ],
    )


def _accepted_lengths(runs: Sequence[tuple[str, Result]], title: str) -> Section:
    """Accepted length and acceptance per position of (name, result of one temperature)."""
    rows = []
    charts = []
    for temperature, of_temperature in by_temperature(runs):
        for name, of in of_temperature:
            groups = of.get("groups", {})
            averages = [
                interval_text(groups[group]) if group in groups else "–" for group in ("math", "code", "chat")
            ]
            macro = interval_text(of["macro"]["accepted_length"])
            rows.append([name, f"{temperature:g}", macro, *averages, f"{of['tokens_per_s']:.1f}"])
        estimates = [(name, _by_domain(of)) for name, of in of_temperature]
        title_of_dots = f"Accepted length by domain, temperature {temperature:g}"
        charts += chunked(lambda part, title=title_of_dots: _dots(title, part), estimates)
        with_whole = [(name, of) for name, of in of_temperature if "all" in of and of["all"]["conditional"]]
        for title_of, field in (("Conditional acceptance", "conditional"), ("Survival", "survival")):
            charts += chunked(
                lambda part, field=field, title_of=title_of, temperature=temperature: _positions(
                    f"{title_of} by position, temperature {temperature:g}", part, field
                ),
                with_whole,
            )
    table = Table(
        caption="Mean accepted length (tokens per round, the target's own included) with 95 % intervals",
        header=["run", "temperature", "macro", "math", "code", "chat", "tokens/s"],
        rows=rows,
    )
    return Section(title=title, text=ABOUT, tables=[table], charts=charts)


def _by_domain(of: Result) -> dict[str, Mapping[str, Any]]:
    lengths = {name: domain["accepted_length"] for name, domain in of["domains"].items()}
    return {**lengths, "macro": of["macro"]["accepted_length"]}


def _positions(title: str, runs: Sequence[tuple[str, Result]], field: str) -> Chart:
    series = []
    for name, of in runs:
        whole = of["all"]
        low, high = whole.get(f"{field}_low"), whole.get(f"{field}_high")
        points = tuple(
            Point(x=k + 1, y=rate, low=low[k] if low else None, high=high[k] if high else None)
            for k, rate in enumerate(whole[field])
            if rate is not None
        )
        if points:
            series.append(Series(name=name, points=points))
    return Chart(
        title=title,
        summary=f"Share of draft tokens accepted at each position, for {joined([name for name, _ in runs])}.",
        x_label="position in the block",
        y_label="accepted",
        series=tuple(series),
        percent=True,
        from_zero=True,
    )


def _dots(
    title: str, runs: Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]], *, from_zero: bool = False
) -> Chart:
    """Estimates of several runs over the same categories."""
    categories = list(dict.fromkeys(name for _, estimates in runs for name in estimates))
    series = []
    for name, estimates in runs:
        points = tuple(
            Point(x=categories.index(category), y=of["value"], low=of["low"], high=of["high"])
            for category, of in estimates.items()
            if of["value"] is not None
        )
        series.append(Series(name=name, points=points))
    return Chart(
        title=title,
        summary=f"Tokens per round for {joined(categories)}, with 95 % intervals.",
        x_label="",
        y_label="tokens per round",
        series=tuple(series),
        categories=tuple(categories),
        from_zero=from_zero,
    )


def _sampler(of: Result) -> str:
    sampler = of.get("sampler", f"temperature {of['temperature']:g}")
    if isinstance(sampler, str):
        return sampler
    return ", ".join(f"{name} {value:g}" for name, value in sampler.items())
