"""A job whose files lie in a bucket: a stand-in for it in memory, under the scheme gs://."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dspark_jax.core import storage
from dspark_jax.serving import journal
from dspark_jax.serving.jsonl import ExitCode, serve_file

LINES = [{"id": f"p{n}", "prompt": f"say {n}", "max_new_tokens": 1 + n % 5} for n in range(12)]


class Bucket(MemoryFileSystem):
    """gs:// without a network."""

    protocol = "gs"
    store: dict = {}  # noqa: RUF012 as in the parent
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("gs://"))


class Crash(BaseException):
    """A kill."""


@pytest.fixture
def config(make_config, fake_engine, monkeypatch):
    # The module: the name `fsspec.registry` is its read-only view.
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gs", Bucket)
    monkeypatch.setattr(journal, "PART_LINES", 3)
    Bucket.store.clear()
    storage.write("gs://bucket/in.jsonl", [json.dumps(line).encode() + b"\n" for line in LINES] + [b"{\n"])
    names = {"input": "gs://bucket/in.jsonl", "output": "gs://bucket/out.jsonl", "resume": True}
    return dataclasses.replace(make_config([]), **names)


def records(name: str) -> list[dict]:
    with storage.open_read(name) as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("order", ["input", "completion"])
@pytest.mark.parametrize("longest_first", [False, True])
def test_a_job_in_a_bucket(config, order, longest_first):
    config = dataclasses.replace(
        config, order=order, longest_first=longest_first, report="gs://bucket/report.json"
    )

    assert serve_file(config) == ExitCode.SOME_REFUSED
    found = records(config.output)
    if order == "input":
        assert [record["line"] for record in found] == list(range(1, 13))
    elif longest_first:
        assert [record["tokens"] for record in found[:2]] == [5, 5]
    assert sorted(record["id"] for record in found) == sorted(line["id"] for line in LINES)
    (refused,) = records(f"{config.output}.rejected.jsonl")
    assert (refused["line"], refused["text"]) == (13, "{")
    assert storage.exists("gs://bucket/report.json")
    assert storage.children(f"{config.output}.partial") == []


def test_killed_and_resumed(config, fake_engine):
    serve_file(config)
    expected = records(config.output)
    Bucket.store.clear()
    storage.write(config.input, [json.dumps(line).encode() + b"\n" for line in LINES] + [b"{\n"])

    def crash(number):
        if number == 9:
            raise Crash

    fake_engine.before_step, fake_engine.steps = crash, 0
    with pytest.raises(Crash):
        serve_file(config)
    fake_engine._requests.clear()
    parts = storage.children(f"{config.output}.partial")
    assert len(parts) >= 2 and not storage.exists(config.output)

    assert serve_file(config) == ExitCode.SOME_REFUSED
    assert records(config.output) == expected


def test_what_was_not_written_as_a_part_is_answered_again(config, fake_engine, monkeypatch):
    """A real kill does not close the journal."""
    serve_file(config)
    expected = records(config.output)
    storage.remove(config.output)
    storage.remove(f"{config.output}.job.json")

    def crash(number):
        if number == 9:
            raise Crash

    fake_engine.before_step, fake_engine.steps = crash, 0
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(journal.Parts, "close", lambda self: None)
        serve_file(config)
    fake_engine._requests.clear()

    assert serve_file(config) == ExitCode.SOME_REFUSED
    assert records(config.output) == expected
