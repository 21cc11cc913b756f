"""An evaluation that was killed continues, comes to the same figures, and never mixes configurations."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest

from dspark_jax.commands import evaluate
from dspark_jax.core.errors import InputError
from dspark_jax.engine.engine import Engine
from dspark_jax.evaluation.rounds_log import read_rounds, rounds_path


@pytest.fixture
def config(prompt_files, tmp_path) -> evaluate.Evaluate:
    return evaluate.Evaluate(
        prompts=prompt_files,
        output=tmp_path / "result.json",
        temperatures=(1.0,),
        repeats=2,
        num_prompts_per_domain=2,
        max_new_tokens=12,
        max_prompt_tokens=64,
        slots=2,
    )


def untimed(report: dict) -> dict:
    (result,) = report["results"]
    return {name: value for name, value in result.items() if name not in ("seconds", "tokens_per_s")}


@pytest.mark.usefixtures("tiny_engine")
def test_a_killed_run_continues_to_the_same_figures(config, monkeypatch, capsys):
    whole = evaluate.run(config)
    path = rounds_path(config.output)
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 2 * 2  # the configuration, then repeats x domains x prompts

    decoded = []
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda self, requests: run(self, _count(requests, decoded)))
    path.write_text("".join(lines[:4]) + lines[4][:20])
    config.output.unlink()
    continued = evaluate.run(config)

    assert len(decoded) == 5
    assert untimed(continued) == untimed(whole)
    assert json.loads(config.output.read_text()) == continued
    _, answers = read_rounds(path)
    assert continued["results"][0]["seconds"] == pytest.approx(sum(a.seconds for a in answers), rel=1e-3)
    assert {answer.rounds.repeat for answer in answers} == {0, 1}
    assert "macro" in capsys.readouterr().out


def _count(requests, decoded):
    for request in requests:
        decoded.append(request.id)
        yield request


@pytest.mark.usefixtures("tiny_engine")
def test_another_configuration_is_refused_by_name(config):
    evaluate.run(config)
    with pytest.raises(InputError, match="max_new_tokens"):
        evaluate.run(dataclasses.replace(config, max_new_tokens=11))


@pytest.mark.usefixtures("tiny_engine")
def test_the_result_says_how_it_was_drawn(config):
    report = evaluate.run(dataclasses.replace(config, temperatures=(0.0, 1.0), name="tiny"))
    greedy, sampled = report["results"]

    assert (greedy["sampler"], greedy["seeds"]) == ("greedy", [0])
    assert sampled["sampler"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert sampled["seeds"] == [0, 1]
    assert report["template"].startswith("chat(")
    assert sampled["groups"].keys() == {"math"}  # gsm8k is one of the paper's, chat is ours
    domain = sampled["domains"]["gsm8k"]
    assert domain["verify_rate"] <= 1
    assert sum(rounds for rounds, _ in domain["per_prompt"].values()) == domain["rounds"]
    for low, rate, high in zip(
        domain["conditional_low"], domain["conditional"], domain["conditional_high"], strict=True
    ):
        assert low is None or low <= rate <= high

    with open(config.output.with_suffix(".csv")) as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["domain"]) for row in rows[:3]] == [
        ("tiny", "chat"),
        ("tiny", "gsm8k"),
        ("tiny", "macro"),
    ]
    assert float(rows[1]["conditional_1"]) == greedy["domains"]["gsm8k"]["conditional"][0]


def test_the_papers_protocol_is_temperature_1_and_2048_tokens(config, monkeypatch):
    class Loaded(Exception):
        pass

    def load(self):
        raise Loaded(self.temperatures, self.max_new_tokens)

    monkeypatch.setattr(evaluate.Evaluate, "load", load)
    with pytest.raises(Loaded) as caught:
        evaluate.run(dataclasses.replace(config, paper_protocol=True))
    assert caught.value.args == ((1.0,), 2048)


def test_an_evaluation_of_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="--suites"):
        evaluate.Evaluate(output=tmp_path / "result.json")


def test_rounds_of_something_else_are_refused(tmp_path, write_lines):
    with pytest.raises(InputError, match="no such file"):
        read_rounds(tmp_path / "none.rounds.jsonl")
    with pytest.raises(InputError, match="without a configuration"):
        read_rounds(write_lines(tmp_path / "other.jsonl", [{"id": "a"}]))
