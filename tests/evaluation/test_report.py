"""The report: self-contained, accessible, true to the result files, and seen by a real browser."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from dspark_jax.commands import report
from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.accepted_length import PromptRounds, summarise
from dspark_jax.evaluation.chart_svg import MAX_SERIES, svg
from dspark_jax.evaluation.charts import Chart, Point, Series, round_ticks
from dspark_jax.evaluation.diagnostics import diagnose
from dspark_jax.evaluation.report_sections import read_results, sections
from dspark_jax.evaluation.report_style import DARK_COLOURS, STYLE

G = 4
ABOUT = {
    "date": "2026-01-01T00:00:00+00:00",
    "machine": {"cpu": "a <CPU> & co", "cores": 2},
    "versions": {"jax": "0"},
}


def records(rate: float, seed: int) -> list[PromptRounds]:
    rng = np.random.default_rng(seed)
    made = []
    for domain in ("gsm8k", "humaneval", "mt-bench"):
        for prompt in range(12):
            accepted_np = np.minimum(rng.geometric(1 - rate, 30) - 1, G)
            made.append(
                PromptRounds(
                    id=f"{domain}-{prompt}",
                    domain=domain,
                    new_tokens=int(accepted_np.sum()) + 31,
                    committed_np=accepted_np + 1,
                    accepted_np=accepted_np,
                    verified_np=np.full(30, G),
                    confidence_np=rng.normal(0, 1, (30, G)).astype(np.float32),
                    prompt_tokens=20 + prompt,
                )
            )
    return made


def of_temperature(rate: float, seed: int) -> dict:
    groups = {"math": ["gsm8k"], "code": ["humaneval"], "chat": ["mt-bench"]}
    found = summarise(records(rate, seed), G, groups=groups)
    return {
        "temperature": 1.0,
        "tokens_per_s": 50.0,
        "sampler": {"temperature": 1.0, "top_k": 0},
        "macro": {"accepted_length": found.macro.as_json()},
        "groups": {name: estimate.as_json() for name, estimate in found.groups.items()},
        "all": found.whole.as_json(),
        "domains": {name: domain.as_json() for name, domain in found.domains.items()},
    }


@pytest.fixture(scope="module")
def result_files(tmp_path_factory) -> list[Path]:
    """One result of every kind, two evaluations to set side by side."""
    directory = tmp_path_factory.mktemp("results")
    evaluation = {"kind": "evaluation", **ABOUT, "block_len": G, "config": {"max_new_tokens": 128, "seed": 0}}
    first, second = of_temperature(0.6, 1), of_temperature(0.4, 2)
    row = {"block_len": G, "training": {"steps": 200, "predictions": 1e6, "seconds": 900.0}}
    difference = {"value": -0.2, "low": -0.3, "high": -0.1}
    compared = [
        {
            "name": name,
            **row,
            "results": [{**of, "macro": of["macro"]["accepted_length"], "difference": difference}],
        }
        for name, of in (("dspark-markov", first), ("dflash", second))
    ]
    found = diagnose(records(0.6, 1))
    stages = {
        "draft backbone": 3.0,
        "head and sampling": 1.0,
        "target verification": 40.0,
        "engine step": 46.0,
    }
    contents = {
        "shipped <v2>": {**evaluation, "name": "shipped <v2>", "results": [first]},
        "other": {**evaluation, "name": "other", "results": [second]},
        "comparison": {"kind": "comparison", **ABOUT, "rows": compared},
        "diagnostics": {"kind": "diagnostics", **ABOUT, "results": [{"temperature": 1.0, **vars(found)}]},
        "calibration": {
            "identity": {"sampling": "temperature=1", "numerics": "float32"},
            "temperatures": found.fitted[0],
            "shifts": found.fitted[1],
            "evidence": {
                **ABOUT,
                "rounds": {"fitted": 10, "checked": 11},
                "before": found.figures["raw"],
                "after": found.figures["scaled"],
            },
        },
        "speed": {**ABOUT, "round_ms": stages},
        "load": {
            **ABOUT,
            "rows": [
                {
                    "scheduler": name,
                    "concurrency": n,
                    "tokens_per_s": 30.0 * n**power,
                    "tokens_per_s_per_request": 30.0 * n ** (power - 1),
                    "accepted_length": None if name == "plain" else 1.8,
                    "budget": 3.0 / n,
                }
                for name, power in (("plain", 0.8), ("lagged", 0.6))
                for n in (1, 4, 16)
            ],
        },
    }
    paths = []
    for name, content in contents.items():
        paths.append(directory / f"{re.sub('[^a-z]', '', name)}.json")
        paths[-1].write_text(json.dumps(content))
    return paths


@pytest.fixture(scope="module")
def written(result_files, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("report") / "report.html"
    report.run(report.Report(results=tuple(result_files), output=output))
    return output


class Structure(html.parser.HTMLParser):
    """Checks that tags close in order, and collects what the tests ask about."""

    EMPTY = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def structure(written) -> Structure:
    found = Structure()
    found.feed(written.read_text())
    found.close()
    assert found.open == []
    return found


def test_nothing_is_fetched_and_nothing_runs(written, structure):
    text = written.read_text()
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in structure.tags}
    assert not [name for _, attributes in structure.tags for name in attributes if name.startswith("on")]


def test_names_with_markup_stay_text(written):
    text = written.read_text()
    assert "shipped &lt;v2&gt;" in text and "<v2>" not in text
    assert "a &lt;CPU&gt; &amp; co" in text


def test_every_picture_has_words_and_its_data(structure):
    ids = [attributes["id"] for _, attributes in structure.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    pictures = [a for tag, a in structure.tags if tag == "svg" and a.get("role") == "img"]
    assert len(pictures) >= 12
    for picture in pictures:
        assert set(picture["aria-labelledby"].split()) <= set(ids)
    counts = {
        name: sum(tag == name for tag, _ in structure.tags) for name in ("figure", "figcaption", "details")
    }
    assert set(counts.values()) == {len(pictures)}


def test_a_keyboard_and_a_screen_reader_find_their_way(structure):
    tags = structure.tags
    assert ("html", {"lang": "en"}) in tags
    assert any(tag == "meta" and a.get("name") == "viewport" for tag, a in tags)
    assert [tag for tag, _ in tags if tag in ("main", "header", "footer", "nav", "h1")] == [
        *("header", "h1", "nav", "main", "footer")
    ]
    ids = {a["id"] for _, a in tags if "id" in a}
    links = [a["href"] for tag, a in tags if tag == "a"]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    scrolling = [a for _, a in tags if a.get("class") == "scroll"]
    assert scrolling and all(a["tabindex"] == "0" and a["aria-label"] for a in scrolling)
    assert {a["scope"] for tag, a in tags if tag == "th"} == {"col", "row"}


def test_tables_say_what_the_results_say(written, result_files):
    text = written.read_text()
    result = json.loads(result_files[0].read_text())["results"][0]
    for estimate in (result["macro"]["accepted_length"], *result["groups"].values()):
        assert f"{estimate['value']:.2f} [{estimate['low']:.2f}, {estimate['high']:.2f}]" in text
    rate = result["all"]["conditional"][0]
    assert f"{100 * rate:.1f} [" in text
    assert "-0.200 [-0.300, -0.100]" in text
    for title in ("Drafters on one budget", "Diagnostics", "Calibration", "Round latency", "Load"):
        assert f">{title}" in text


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_stand_out_in_light_and_dark():
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in STYLE.split("@media")[:2])
    for palette in (light, dark):
        for background in ("paper", "panel"):
            for foreground in ("ink", "quiet", "link"):
                assert contrast(palette[foreground], palette[background]) >= 4.5, (foreground, background)
    assert all(contrast(colour, dark["panel"]) >= 4.5 for colour in DARK_COLOURS)


def test_series_differ_by_more_than_colour():
    series = tuple(
        Series(name=f"s{i}", points=(Point(x=0, y=i), Point(x=1, y=i + 1))) for i in range(MAX_SERIES)
    )
    drawing = svg(Chart(title="t", summary="s", x_label="x", y_label="y", series=series), "c")
    groups = [
        group
        for group in ElementTree.fromstring(drawing).iter("g")
        if re.match(r"s\d", group.get("class", ""))
    ]
    signs = set()
    for group in groups:
        line = group.find("polyline")
        marker = group.find("g")[1]
        corners = len(marker.get("points", "").split())
        signs.add((line.get("stroke-dasharray"), marker.tag, corners, marker.get("class")))
    assert len(signs) == len(groups) == MAX_SERIES


def test_more_runs_than_colours_make_more_charts(result_files, tmp_path):
    content = json.loads(result_files[0].read_text())
    paths = []
    for i in range(MAX_SERIES + 1):
        paths.append(tmp_path / f"r{i}.json")
        paths[-1].write_text(json.dumps({**content, "name": f"run {i}"}))
    [section] = sections(read_results(paths))
    assert [len(chart.series) for chart in section.charts[:2]] == [MAX_SERIES, 1]
    assert section.charts[0].title.endswith("(1 of 2)")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1.2, 1.9, [1.2, 1.4, 1.6, 1.8, 2.0]), (0, 100, [0, 20, 40, 60, 80, 100]), (-0.3, 0.1, None)],
)
def test_ticks_are_round_and_enclose(low, high, ticks):
    found = round_ticks(low, high)
    assert found[0] <= low + 1e-9 and found[-1] >= high - 1e-9 and 3 <= len(found) <= 8
    if ticks:
        assert found == pytest.approx(ticks)


def test_what_is_no_result_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"some": "thing"}')
    with pytest.raises(InputError, match="no result"):
        read_results([tmp_path / "a.json"])
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(InputError, match="a result file"):
        read_results([tmp_path / "b.json"])


def test_the_same_figures_as_png(result_files, tmp_path):
    pytest.importorskip("matplotlib")
    config = report.Report(
        results=(result_files[0], result_files[-1]), output=tmp_path / "r.html", figures=tmp_path / "png"
    )
    report.run(config)
    drawn = sorted(config.figures.iterdir())
    assert len(drawn) == config.output.read_text().count("<figure>")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_real_browser_shows_it(written, tmp_path, width, scheme):
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for path in map(shutil.which, names) if path), None)
    if browser is None:
        pytest.skip("no headless browser: install chromium to see the report as a reader does")
    picture = tmp_path / "report.png"
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--screenshot={picture}",
    ]
    flags += [f"--window-size={width},1600", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    subprocess.run([browser, *flags, written.as_uri()], check=True, capture_output=True, timeout=120)

    pixels = pytest.importorskip("matplotlib.image").imread(picture)[..., :3]
    background = pixels[2, 2].mean()
    assert background > 0.9 if scheme == "light" else background < 0.2
    # Something is drawn all the way down, in colour, and nothing runs off to the right.
    bands = pixels.reshape(8, -1, *pixels.shape[1:])
    assert all(np.abs(band - pixels[2, 2]).max() > 0.3 for band in bands)
    assert (pixels.max(-1) - pixels.min(-1) > 0.4).sum() > 500
    assert np.abs(pixels[:, -6:] - pixels[2, 2]).max() < 0.05
