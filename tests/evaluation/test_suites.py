"""Suites from files and from the hub: the paper's limits, the first turn, and what is missing is said."""

from __future__ import annotations

import json

import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.data.rows import Row
from dspark_jax.evaluation import suites
from dspark_jax.evaluation.suites import GROUPS, SUITES, read_suites, suite_limits


def test_the_papers_nine_benchmarks_and_limits():
    assert suite_limits() == {
        **{"gsm8k": 500, "math500": 500, "aime25": 30},
        **{"humaneval": 164, "mbpp": 256, "livecodebench": 500},
        **{"mt-bench": 80, "alpaca": 500, "arena-hard": 500},
    }
    members = {group: [name for name in SUITES if SUITES[name].group == group] for group in GROUPS}
    assert [len(names) for names in members.values()] == [3, 3, 3]


def test_files_under_either_name_give_first_turns(tmp_path, write_lines):
    write_lines(tmp_path / "arena-hard-v2.jsonl", [{"turns": ["Fly.", "Land."]}])
    write_lines(tmp_path / "gsm8k.jsonl.gz", [{"turns": ["Add."]}, {"turns": ["Subtract."]}])

    found = read_suites(["arena-hard", "gsm8k"], tmp_path)

    assert [(prompt.domain, prompt.text) for prompt in found.prompts] == [
        ("gsm8k", "Add."),
        ("gsm8k", "Subtract."),
        ("arena-hard", "Fly."),
    ]
    assert found.missing == ()


def test_all_names_what_is_missing_and_a_name_insists(tmp_path, write_lines, caplog):
    write_lines(tmp_path / "mbpp.jsonl", [{"turns": ["Sort."]}])

    found = read_suites(["all"], tmp_path)

    assert found.missing == tuple(name for name in SUITES if name != "mbpp")
    assert "alpaca" in caplog.text
    with pytest.raises(InputError, match="no file for alpaca"):
        read_suites(["mbpp", "alpaca"], tmp_path)
    with pytest.raises(InputError, match="gsm9k"):
        read_suites(["gsm9k"], tmp_path)


def test_rows_of_the_hub_become_the_same_prompts(monkeypatch):
    rows = {
        "openai/gsm8k": {"question": "1 + 1?"},
        "tatsu-lab/alpaca": {"instruction": "Sum up.", "input": "A tale."},
        "HuggingFaceH4/mt_bench_prompts": {"prompt": ["Write.", "Again."]},
    }
    monkeypatch.setattr(suites, "load_with_datasets", lambda name, /, **_: iter([Row(name, rows[name])]))

    prompts = read_suites(["gsm8k", "alpaca", "mt-bench"], None).prompts

    assert {prompt.id: prompt.text for prompt in prompts} == {
        "gsm8k-1": "1 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "mt-bench-1": "Write.",
        "alpaca-1": "Sum up.\n\nA tale.",
    }


def test_a_hub_set_with_other_columns_is_refused(monkeypatch):
    row = Row("mbpp[test]:0", {"task": "Sort."})
    monkeypatch.setattr(suites, "load_with_datasets", lambda name, /, **_: iter([row]))
    with pytest.raises(InputError, match=r"mbpp\[test\]:0.*no prompt"):
        read_suites(["mbpp"], None)


def test_hub_arguments_are_plain():
    assert json.loads(json.dumps([dict(suite.hub) for suite in SUITES.values()]))
