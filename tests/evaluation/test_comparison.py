"""Differences between runs by hand; a comparison trains, evaluates, and continues where it stopped."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.drafters.config import RNN, Gated, Markov
from dspark_jax.evaluation.comparison import comparison_table, paired_difference, training_budget
from dspark_jax.training.config import as_json

ROOT = Path(__file__).resolve().parents[2]


def result(**per_prompt) -> dict:
    return {"domains": {"math": {"per_prompt": per_prompt}}}


def test_a_constant_gain_has_no_spread_when_prompts_are_paired():
    hard_and_easy = result(a=(10, 10), b=(10, 40), c=(10, 20))
    better = result(a=(10, 12), b=(10, 42), c=(10, 22), only_here=(1, 5))

    gain = paired_difference(better, hard_and_easy)

    assert (gain.value, gain.low, gain.high) == pytest.approx((0.2, 0.2, 0.2))


def test_differences_by_hand():
    difference = paired_difference(result(a=(4, 10), b=(1, 2)), result(a=(5, 10), b=(1, 2)))
    assert difference.value == pytest.approx(12 / 5 - 12 / 6)
    with pytest.raises(InputError, match="in common"):
        paired_difference(result(), {"domains": {"chat": {}}})


def test_the_budget_of_a_run_by_hand(tmp_path):
    lines = [
        {"step": 2, "rows": 10, "steps_per_s": 0.5},
        {"step": 4, "rows": 20, "steps_per_s": 1.0},
        {"step": 3, "rows": 30, "steps_per_s": 0.25},  # resumed
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert training_budget(tmp_path) == {"steps": 3, "predictions": 50, "seconds": 8}


def test_the_table_names_every_row():
    estimate = {"value": 1.5, "low": 1.25, "high": 1.75}
    rows = [
        {
            "name": name,
            "training": {"steps": 200, "predictions": 1.0, "seconds": 90.0},
            "results": [{"temperature": 1.0, "macro": estimate, "difference": {**estimate, "low": None}}],
        }
        for name in ("dspark-markov", "dflash")
    ]
    shown = comparison_table(rows)
    assert "dflash" in shown and "1.50 [1.25, 1.75]" in shown and "+1.50" in shown


@pytest.fixture(scope="module")
def recipes():
    return runpy.run_path(str(ROOT / "configs/comparison.py"))


def test_all_rows_share_their_budget(recipes):
    configs = {name: as_json(recipes["get_config"]("smollm2_135m", name)) for name in recipes["ROWS"]}
    for field in ("target", "responses", "data", "steps", "optimizer", "seed", "dtype"):
        assert len({json.dumps(config[field]) for config in configs.values()}) == 1, field
    assert len({tuple(config["drafter"]["taps"]) for config in configs.values()}) == 1
    assert all(
        (config["runs"], config["run_name"]) == ("runs/compare", name) for name, config in configs.items()
    )


def test_rows_differ_in_what_they_are_named_for(recipes):
    drafters = {name: recipes["get_config"]("smollm2_135m", name).drafter for name in recipes["ROWS"]}
    heads = [drafters[f"dspark-{head}"].head for head in ("markov", "gated", "rnn")]
    assert [type(head) for head in heads] == [Markov, Gated, RNN]
    assert drafters["dflash"].head is None and drafters["dflash"].confidence is None
    assert [drafters[f"layers-{n}"].num_layers for n in (1, 2, 3)] == [1, 2, 3]
    assert [drafters[f"block-{n}"].block_len for n in (4, 7, 11, 15)] == [4, 7, 11, 15]
    assert [drafters[f"mtp-{n}"].block_len for n in (1, 3)] == [1, 3]
    parallel = [drafter for drafter in drafters.values() if drafter.warm_start_sequences]
    assert len(parallel) == len(drafters) - 3  # all but Eagle3 and MTP start from the regression


def test_unknown_rows_are_refused(recipes):
    with pytest.raises(InputError, match="medusa"):
        recipes["get_config"]("smollm2_135m", "medusa")
