"""A job may end anywhere: what is there stays, what is missing is added, and two jobs never mix."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.core import storage
from dspark_jax.core.errors import InputError
from dspark_jax.core.file_stamps import stamp
from dspark_jax.engine.requests import Status
from dspark_jax.serving import jsonl
from dspark_jax.serving.jsonl import ExitCode, serve_file
from dspark_jax.serving.output import Output

LINES = [
    {"id": f"p{number}", "prompt": f"say {number}", "max_new_tokens": 1 + number % 7} for number in range(20)
]


class Crash(BaseException):
    """A kill, as far as a test can raise one: nothing catches it."""


def answers(config) -> list[dict]:
    return [json.loads(line) for line in Path(config.output).read_text().splitlines()]


@pytest.fixture
def whole(fake_engine, make_config):
    """(configuration, the answers of a job that nothing disturbs, sorted by their line)."""
    config = make_config(LINES)
    assert serve_file(config) == ExitCode.DONE
    found = answers(config)
    fake_engine.steps = 0
    for name in os.listdir(Path(config.output).parent):
        if name != "in.jsonl":
            os.unlink(Path(config.output).parent / name)
    return dataclasses.replace(config, resume=True), found


def test_what_a_finished_job_leaves(fake_engine, make_config):
    config = make_config(LINES)
    serve_file(config)

    assert sorted(os.listdir(Path(config.output).parent)) == ["in.jsonl", "out.jsonl", "out.jsonl.job.json"]
    job = json.loads(Path(f"{config.output}.job.json").read_text())
    assert (job["exit_code"], job["job"]["target"], job["job"]["drafter"]) == (0, "smollm2-135m", "shipped")


@pytest.mark.parametrize("order", ["input", "completion"])
def test_killed_at_every_step(whole, fake_engine, order):
    config, expected = whole
    config = dataclasses.replace(config, order=order)

    def crash(last_step, step):
        if step == last_step:
            raise Crash

    # After 6 steps at least one request has ended, so that 20 runs are enough.
    for last_step in [*range(1, 7), *[6] * 20]:
        fake_engine.steps = 0
        fake_engine._requests.clear()
        fake_engine.before_step = functools.partial(crash, last_step)
        with contextlib.suppress(Crash):
            code = serve_file(config)
    assert code == ExitCode.DONE
    found = answers(config)
    assert sorted(found, key=lambda answer: answer["line"]) == expected
    if order == "input":
        assert found == expected


@pytest.mark.parametrize("step", ["job file", "answers", "journal"])
def test_killed_while_it_finishes(whole, monkeypatch, step):
    config, expected = whole

    def crash(*_):
        raise Crash

    write = storage.write
    with monkeypatch.context() as patch:
        if step == "journal":
            patch.setattr(storage, "remove", crash)
        else:
            name = config.output if step == "answers" else f"{config.output}.job.json"
            patch.setattr(storage, "write", lambda to, chunks: crash() if to == name else write(to, chunks))
        with pytest.raises(Crash):
            serve_file(dataclasses.replace(config))
    assert Path(f"{config.output}.partial").exists()

    assert serve_file(config) == ExitCode.DONE
    assert answers(config) == expected
    assert not Path(f"{config.output}.partial").exists()


def test_a_finished_job_has_nothing_left_to_do(whole, fake_engine):
    config, expected = whole
    serve_file(config)
    steps = fake_engine.steps

    assert serve_file(config) == ExitCode.DONE
    assert fake_engine.steps == steps and answers(config) == expected


@settings(max_examples=30)
@given(data=st.data())
def test_a_journal_cut_anywhere(tmp_path_factory, data):
    """Every whole record counts, the torn one does not, and what is added stands on a line of its own."""
    folder = tmp_path_factory.mktemp("cut")
    name, job = str(folder / "out.jsonl"), {"seed": 1}
    first = Output(name, job, resume=True)
    for line in range(1, 6):
        first.append({"line": line, "sample": line % 2, "text": "é\n" * line})
    first.close()
    partial = Path(f"{name}.partial")
    content = partial.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    partial.write_bytes(content[:cut])

    second = Output(name, job, resume=True)
    done = [line for line in range(1, 6) if second.is_done(line, line % 2)]
    assert done == list(range(1, max(content[:cut].count(b"\n"), 1)))
    assert not any(second.is_done(line, 1 - line % 2) for line in range(1, 6))
    for line in {1, 2, 3, 4, 5} - set(done):
        second.append({"line": line, "sample": line % 2, "text": "again"})
    second.finish("input", {})
    records = [json.loads(line) for line in Path(name).read_text().splitlines()]
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5]


def test_a_damaged_journal(whole, fake_engine):
    config, _ = whole
    Path(f"{config.output}.partial").write_text('{"job": {}}\n\0\0\0\n')
    with pytest.raises(InputError, match="belongs to another job"):
        serve_file(config)
    journal = Output(f"{config.output}2", {"a": 1}, resume=True)
    journal._journal.append(b"no record\n")
    journal.close()

    with pytest.raises(InputError, match="no record at byte"):
        Output(f"{config.output}2", {"a": 1}, resume=True)


class TestRefusals:
    def stop_after(self, fake_engine, steps):
        def crash(number):
            if number > steps:
                raise Crash

        fake_engine.before_step = crash

    @pytest.mark.parametrize(
        ("changes", "what"),
        [
            ({"temperature": 0.5}, "temperature"),
            ({"max_new_tokens": 9}, "max_new_tokens"),
            ({"seed": 5}, "seed"),
            ({"target": "another"}, "target"),
            ({"drafter": "none"}, "drafter"),
            ({"verify_tokens": 1}, "verify_tokens"),
            ({"shard": "0/2"}, "shard"),
            ({"stop": ("x",)}, "stop"),
        ],
        ids=str,
    )
    def test_another_job(self, whole, fake_engine, changes, what):
        config, _ = whole
        self.stop_after(fake_engine, 3)
        with pytest.raises(Crash):
            serve_file(config)
        fake_engine._requests.clear()

        with pytest.raises(InputError, match=rf"belongs to another job: .*{what}: .* then, .* now"):
            serve_file(dataclasses.replace(config, **changes))

    def test_another_input(self, whole, fake_engine):
        config, _ = whole
        self.stop_after(fake_engine, 3)
        with pytest.raises(Crash):
            serve_file(config)
        with open(config.input, "a") as file:
            file.write('{"prompt": "one more"}\n')

        with pytest.raises(InputError, match=r"input_bytes: .*input_sha256: "):
            serve_file(config)

    def test_a_finished_job_of_other_options(self, whole):
        config, _ = whole
        serve_file(config)

        with pytest.raises(InputError, match=r"job\.json belongs to another job: temperature"):
            serve_file(dataclasses.replace(config, temperature=1.0))

    def test_an_unfinished_job_is_not_overwritten(self, whole, fake_engine):
        config, _ = whole
        self.stop_after(fake_engine, 3)
        with pytest.raises(Crash):
            serve_file(config)
        before = Path(f"{config.output}.partial").read_bytes()

        with pytest.raises(InputError, match="add --resume to go on"):
            serve_file(dataclasses.replace(config, resume=False))
        assert Path(f"{config.output}.partial").read_bytes() == before

    def test_an_output_of_nobody(self, whole):
        config, _ = whole
        Path(config.output).write_text("an older file\n")

        with pytest.raises(InputError, match=r"out\.jsonl exists, but neither"):
            serve_file(config)
        assert serve_file(dataclasses.replace(config, resume=False)) == ExitCode.DONE

    def test_two_processes_at_once(self, whole, fake_engine):
        config, _ = whole
        caught = []

        def another(number):
            if number == 2:
                with pytest.raises(InputError) as error:
                    serve_file(config)
                caught.append(error.value.given)

        fake_engine.before_step = another
        assert serve_file(config) == ExitCode.DONE
        assert "another process" in caught[0]


class TestDisk:
    def fill_after(self, monkeypatch, num_bytes):
        """os.write: so many bytes fit, then the disk is full."""
        left, real_write = num_bytes, os.write

        def write(descriptor, chunk):
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = real_write(descriptor, chunk[:left])
            left -= written
            return written

        monkeypatch.setattr(os, "write", write)

    @pytest.mark.parametrize("num_bytes", [0, 100, 1000, 2000])
    def test_full(self, whole, fake_engine, monkeypatch, capfd, num_bytes):
        config, expected = whole
        with monkeypatch.context() as patch:
            self.fill_after(patch, num_bytes)
            assert serve_file(config) == ExitCode.STORAGE_FAILED
        message = capfd.readouterr().err
        assert "No space left on device" in message and "--resume" in message
        assert Path(f"{config.output}.partial").read_bytes()[-1:] in (b"", b"\n")  # nothing torn
        fake_engine._requests.clear()

        assert serve_file(config) == ExitCode.DONE
        assert answers(config) == expected

    def test_full_at_the_very_end(self, whole, monkeypatch):
        config, expected = whole

        def full(name, chunks):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(storage, "write", full)
            assert serve_file(config) == ExitCode.STORAGE_FAILED

        assert serve_file(config) == ExitCode.DONE
        assert answers(config) == expected


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_requests_in_flight_finish(self, whole, fake_engine, number):
        config, expected = whole
        before = signal.getsignal(number)
        fake_engine.before_step = lambda step: signal.raise_signal(number) if step == 4 else None

        assert serve_file(config) == ExitCode.STOPPED
        assert fake_engine.cancelled == []
        assert signal.getsignal(number) == before
        there = Path(f"{config.output}.partial").read_bytes().splitlines()[1:]
        assert 2 <= len(there) < 20

        fake_engine.before_step = lambda step: None
        assert serve_file(config) == ExitCode.DONE
        assert answers(config) == expected

    def test_no_grace(self, whole, fake_engine):
        config, expected = whole
        fake_engine.before_step = lambda step: signal.raise_signal(signal.SIGTERM) if step == 8 else None

        assert serve_file(dataclasses.replace(config, grace_s=0)) == ExitCode.STOPPED
        assert fake_engine.cancelled

        fake_engine.before_step = lambda step: None
        assert serve_file(config) == ExitCode.DONE
        assert answers(config) == expected

    def test_a_second_signal(self, whole, fake_engine, capfd):
        config, expected = whole
        fake_engine.before_step = lambda step: signal.raise_signal(signal.SIGINT) if step > 3 else None

        assert serve_file(config) == ExitCode.STOPPED
        assert "stopped at once" in capfd.readouterr().err
        assert fake_engine.steps == 5

        fake_engine._requests.clear()
        fake_engine.before_step = lambda step: None
        assert serve_file(config) == ExitCode.DONE
        assert answers(config) == expected

    def test_while_loading(self, whole, fake_engine, monkeypatch):
        config, _ = whole
        monkeypatch.setattr(jsonl, "load_engine", lambda **_: signal.raise_signal(signal.SIGTERM))

        assert serve_file(config) == ExitCode.STOPPED


class TestEngineFaults:
    def test_an_exception(self, whole, fake_engine, capfd):
        config, expected = whole

        def fail(number):
            if number == 4:
                raise RuntimeError("the device caught fire")

        fake_engine.before_step = fail
        assert serve_file(config) == ExitCode.ENGINE_FAILED
        message = capfd.readouterr().err
        assert "RuntimeError: the device caught fire" in message and "--resume" in message

        fake_engine._requests.clear()
        assert serve_file(config) == ExitCode.DONE
        assert answers(config) == expected

    def test_a_request_that_fails_is_a_record(self, whole, fake_engine, monkeypatch):
        config, expected = whole

        def fail(number):
            if number == 2:
                request = fake_engine._requests.pop(0)
                request._status, request.error = Status.CANCELLED, "drafter: NaN"

        fake_engine.before_step = fail
        report = Path(config.output).parent / "report.json"
        assert serve_file(dataclasses.replace(config, report=str(report))) == ExitCode.SOME_REFUSED
        found = answers(config)
        failed = [answer for answer in found if "error" in answer]
        assert len(found) == 20 and [answer["error"] for answer in failed] == ["drafter: NaN"]
        assert [a for a in found if a not in failed] == [a for a in expected if a["id"] != failed[0]["id"]]
        assert json.loads(report.read_text())["requests"]["failed"] == 1

    def test_a_failure_of_an_earlier_run_counts(self, whole, fake_engine):
        config, _ = whole

        def fail(number):
            if number == 2:
                fake_engine._requests.pop(0)._status = Status.CANCELLED
            if number == 9:
                raise Crash

        fake_engine.before_step = fail
        with pytest.raises(Crash):
            serve_file(config)
        fake_engine._requests.clear()

        assert serve_file(config) == ExitCode.SOME_REFUSED


def test_model_files_that_are_replaced(whole, fake_engine, monkeypatch, tmp_path, capfd):
    config, expected = whole
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    load = jsonl.load_engine

    def load_engine(**names):
        return dataclasses.replace(load(**names), stamps=stamp([weights]))

    monkeypatch.setattr(jsonl, "load_engine", load_engine)
    fake_engine.before_step = lambda step: weights.write_bytes(b"younger") if step == 5 else None
    report = tmp_path / "report.json"

    assert serve_file(dataclasses.replace(config, report=str(report))) == ExitCode.DONE
    assert answers(config) == expected
    assert json.loads(report.read_text())["replaced_files"] == [str(weights)]
    assert "was replaced; these answers are of the file that was loaded" in capfd.readouterr().err
