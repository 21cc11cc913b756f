"""The report as one HTML file: no network, no script; for a phone, a keyboard and a screen reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dspark_jax.evaluation.chart_svg import svg, swatch
from dspark_jax.evaluation.charts import Chart
from dspark_jax.evaluation.plotting import COLOURS
from dspark_jax.evaluation.report_parts import Section, Table
from dspark_jax.evaluation.report_style import DARK_COLOURS, STYLE


def page(title: str, sections: Sequence[Section], results: Sequence[Mapping[str, Any]]) -> str:
    """The whole file.

    Args:
      title: its heading.
      sections: in order.
      results: the result files behind them, for the list of sources.
    """
    links = "".join(f'<li><a href="#s{i}">{escape(s.title)}</a></li>' for i, s in enumerate(sections))
    body = "\n".join(_section(section, place) for place, section in enumerate(sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}{_colours()}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<h1>{escape(title)}</h1>
<p class="quiet">{escape(_measured(results))}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main">
{body}
<section aria-labelledby="sources"><h2 id="sources">Where the figures come from</h2>
{_table(_sources(results))}
</section>
</main>
<footer class="quiet">Made by dspark report.</footer>
</body>
</html>
"""


def _colours() -> str:
    def rules(colours: Sequence[str]) -> str:
        return "".join(f".s{place} {{ --colour: {colour}; }}" for place, colour in enumerate(colours))

    return f"{rules(COLOURS)}\n@media (prefers-color-scheme: dark) {{ {rules(DARK_COLOURS)} }}\n"


def _section(section: Section, place: int) -> str:
    charts = "\n".join(_figure(chart, f"c{place}-{number}") for number, chart in enumerate(section.charts))
    return f"""<section aria-labelledby="s{place}">
<h2 id="s{place}">{escape(section.title)}</h2>
<p>{escape(section.text)}</p>
{"".join(map(_table, section.tables))}
<div class="charts">
{charts}
</div>
</section>"""


def _figure(chart: Chart, name: str) -> str:
    legend = ""
    if len(chart.series) > 1:
        items = (f"<li>{swatch(i)}{escape(series.name)}</li>" for i, series in enumerate(chart.series))
        legend = f'<ul class="legend" aria-label="Legend">{"".join(items)}</ul>'
    data = _table(Table(caption=chart.summary, header=chart.header, rows=chart.rows))
    return f"""<figure>
<figcaption>{escape(chart.title)}</figcaption>
{svg(chart, name)}
{legend}
<details><summary>Data of this figure</summary>{data}</details>
</figure>"""


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in table.rows
    )
    # A table wider than a phone scrolls by itself, also from the keyboard.
    return (
        f'<div class="scroll" role="region" aria-label="{escape(table.caption)}" tabindex="0"><table>'
        f"<caption>{escape(table.caption)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _measured(results: Sequence[Mapping[str, Any]]) -> str:
    machines = dict.fromkeys(
        f"{about['machine']['cpu']}, {about['machine']['cores']} cores"
        for about in map(_about, results)
        if about.get("machine")
    )
    return f"{len(results)} result files. Measured on {'; '.join(machines) or 'an unknown machine'}."


def _sources(results: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for result in results:
        about = _about(result)
        settings = {**result.get("config", {}), **about.get("config", {})}
        shown = ("target", "drafter", "max_new_tokens", "num_prompts_per_domain", "slots", "seed", "dtype")
        told = ", ".join(f"{name} {settings[name]}" for name in shown if settings.get(name) is not None)
        versions = about.get("versions", {})
        rows.append(
            [
                result["path"],
                result["kind"],
                str(about.get("date", "–")),
                f"jax {versions.get('jax', '–')}",
                told or "–",
            ]
        )
    return Table(caption="Result files", header=["file", "kind", "date", "version", "settings"], rows=rows)


def _about(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The provenance of a result; a calibration keeps it in its evidence."""
    return result.get("evidence", result)
