"""`dspark evaluate` end to end on a tiny target and drafter: which prompts, and what is written."""

from __future__ import annotations

import json

import jax
import pytest

from dspark_jax.commands import evaluate
from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.data.sources import Prompt
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import LoadedEngine, make_engine
from dspark_jax.evaluation.prompts import choose_prompts, read_evaluation_prompts
from dspark_jax.evaluation.runner import measure

G = 2


def test_only_held_out_prompts_and_first_turns(prompt_files, prompt_ids):
    prompts = read_evaluation_prompts(prompt_files)

    assert {prompt.id for prompt in prompts if prompt.domain == "chat"} == set(prompt_ids[True][:4])
    assert [prompt.text for prompt in prompts if prompt.domain == "gsm8k"] == ["Add 0.", "Add 1.", "Add 2."]


def test_bad_lines_of_an_evaluation_set_are_named(tmp_path, write_lines):
    path = write_lines(tmp_path / "bad.jsonl", [{"turns": ["a"]}, {"turns": []}])
    with pytest.raises(InputError, match=r"bad\.jsonl:2"):
        read_evaluation_prompts([path])


def test_files_without_a_held_out_prompt_are_refused(tmp_path, write_lines, prompt_row, prompt_ids):
    path = write_lines(
        tmp_path / "train.jsonl", [prompt_row(name, "chat") for name in prompt_ids[False][:50]]
    )
    with pytest.raises(InputError, match="held-out"):
        read_evaluation_prompts([path])


def test_a_smaller_choice_is_part_of_a_larger_one():
    prompts = [Prompt(id=f"{d}{i}", domain=d, source="s", text="x" * i) for d in "ab" for i in range(40)]

    def choose(candidates, count):
        chosen = choose_prompts(candidates, count, lambda prompt: len(prompt.text) < 30)
        return [prompt.id for prompt in chosen]

    few, more = choose(prompts, 5), choose(prompts[::-1], 10)

    assert len(few) == 10
    assert set(few) < set(more)
    assert [name for name in more if name in few] == few
    assert len(choose(prompts, 1000)) == 60  # the long ones are left out


@pytest.mark.usefixtures("tiny_engine")
def test_table_and_result_file(prompt_files, tmp_path, capsys):
    config = evaluate.Evaluate(
        prompts=prompt_files,
        output=tmp_path / "results" / "result.json",
        temperatures=(0.0, 1.0),
        num_prompts_per_domain=2,
        max_new_tokens=12,
        max_prompt_tokens=64,
        slots=2,
    )
    evaluate.run(config)
    shown = capsys.readouterr().out
    report = json.loads(config.output.read_text())

    assert report["config"]["num_prompts_per_domain"] == 2
    assert report["machine"]["cpu"]
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["jax"] == jax.__version__
    assert report["block_len"] == G
    assert [result["temperature"] for result in report["results"]] == [0.0, 1.0]
    for result in report["results"]:
        assert set(result["domains"]) == {"chat", "gsm8k"}
        assert result["tokens_per_s"] > 0
        lengths = []
        for name, domain in result["domains"].items():
            tau = domain["accepted_length"]
            lengths.append(tau["value"])
            assert 1 <= tau["low"] <= tau["value"] <= tau["high"] <= G + 1
            assert domain["prompts"] == 2
            assert domain["survival_rounds"][0] == domain["rounds"]
            assert len(domain["conditional"]) == G
            assert f"{name:6s}" in shown
            assert f"{tau['value']:.2f} [{tau['low']:.2f}, {tau['high']:.2f}]" in shown
        assert result["macro"]["accepted_length"]["value"] == pytest.approx(sum(lengths) / 2)
    assert "macro" in shown


def test_measuring_a_drafter_in_memory_gives_the_same_rounds_in_any_batch(tiny_models):
    loaded, draft = tiny_models
    prompts = [Prompt(id=f"p{i}", domain="chat", source="s", text="hello"[: i + 1]) for i in range(3)]

    def rounds(slots: int) -> list[list[int]]:
        engine = make_engine(loaded, draft, EngineConfig(slots=slots, max_context=96))
        in_memory = LoadedEngine(engine=engine, target=loaded, chat=ChatTemplate(tokenizer=loaded.tokenizer))
        measured = measure(in_memory, prompts, temperature=1.0, max_new_tokens=10)
        assert [record.id for record in measured.records] == ["p0", "p1", "p2"]
        assert measured.new_tokens == sum(record.new_tokens for record in measured.records)
        return [record.accepted_np.tolist() for record in measured.records]

    assert rounds(slots=1) == rounds(slots=2)
