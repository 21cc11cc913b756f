"""`dspark regenerate`: whose prompts are answered, and that a kill loses nothing and repeats nothing."""

from __future__ import annotations

import json

import pytest

from dspark_jax.checkpoints.targets import LoadedTarget
from dspark_jax.commands import regenerate
from dspark_jax.commands.regenerate import Regenerate
from dspark_jax.core.jsonl import JsonLinesLog
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.data.sources import common_template, is_held_out, read_responses
from dspark_jax.engine.load import LoadedEngine, make_engine
from dspark_jax.testing.loaded import as_loaded_target
from dspark_jax.testing.tiny import tiny_target

IDS = [f"p{i}" for i in range(60)]
ANSWERED = {i for i in IDS if not is_held_out(i)}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    tiny = tiny_target(vocab_size=259, num_hidden_layers=1, max_position_embeddings=256)
    return as_loaded_target(tiny)


@pytest.fixture
def job(tmp_path, monkeypatch, target) -> Regenerate:
    def load_engine(
        *, target: str, drafter: str, config, check: bool = True, thinking: bool = False
    ) -> LoadedEngine:
        return LoadedEngine(engine=make_engine(loaded, None, config), target=loaded, chat=chat)

    loaded, chat = target, ChatTemplate(tokenizer=target.tokenizer)
    monkeypatch.setattr(regenerate, "load_engine", load_engine)
    rows = [{"id": i, "domain": "chat", "source": "made up", "prompt": f"say {i}"} for i in IDS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Regenerate(
        prompts=(tmp_path / "prompts.jsonl",),
        output=tmp_path / "responses.jsonl",
        max_new_tokens=16,
        max_prompt_tokens=100,
        slots=8,
    )


def records(job: Regenerate) -> dict[str, dict]:
    rows = [json.loads(line) for line in job.output.read_text().splitlines()]
    by_id = {row["id"]: row for row in rows}
    assert len(by_id) == len(rows), "a prompt was answered twice"
    return by_id


def test_answers_training_prompts_only(job):
    regenerate.run(job)
    rows = records(job)
    assert set(rows) == ANSWERED
    assert all(
        row["finish"] in ("stop", "length") and len(row["response_ids"]) <= 16 for row in rows.values()
    )
    examples = read_responses(job.output, min_supervised_tokens=1)
    assert len(examples) == len(ANSWERED) and common_template(examples) == "chat()"


def test_a_killed_job_goes_on_with_the_same_answers(job):
    regenerate.run(job)
    whole = records(job)
    lines = job.output.read_bytes().splitlines(keepends=True)
    job.output.write_bytes(b"".join(lines[:20]) + lines[20][:9])  # torn in the middle of a line
    regenerate.run(job)
    assert records(job) == whole


def test_limit_counts_what_is_there(job):
    for limit in (5, 12):
        regenerate.run(Regenerate(**{**vars(job), "limit": limit}))
        assert len(records(job)) == limit


def test_log_keeps_whole_lines_only(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"id": "a"}\n{"id": "b", "te')
    log = JsonLinesLog(path)
    assert log.done_ids == {"a"}
    log.append({"id": "c", "text": "é"})
    log.close()
    assert path.read_bytes().decode() == '{"id": "a"}\n{"id": "c", "text": "é"}\n'
