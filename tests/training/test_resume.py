"""A run that is killed and started again is the run that was never killed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.core.distributed import EXIT_LOST_PEER, DistributedConfig
from dspark_jax.core.errors import InputError
from dspark_jax.data.pipeline import BatchIterator
from dspark_jax.drafters.config import Gated
from dspark_jax.training import loop
from dspark_jax.training.config import MeshConfig, OptimizerConfig, TrainConfig
from dspark_jax.training.inputs import claim_run

ROOT = Path(__file__).resolve().parents[2]
LAST_SAVE, STEPS = 6, 8
HALF = {
    "7.orbax-checkpoint-tmp-1234": ["data"],
    "9": ["_CHECKPOINT_METADATA"],
    "10": ["data"],
    "11": ["state/manifest.ocdbt"],
}


@dataclasses.dataclass
class Record:
    """What one call of `train` did.

    Attributes:
      config: its configuration.
      rows: step -> line of metrics.
      batches: hashes of the batches it took, in order.
      params: the drafter's parameters at the last export, float32.
    """

    config: TrainConfig
    rows: dict[int, dict] = dataclasses.field(default_factory=dict)
    batches: list[str] = dataclasses.field(default_factory=list)
    params: dict = dataclasses.field(default_factory=dict)

    @property
    def losses(self) -> dict[int, float]:
        return {step: row["loss"] for step, row in self.rows.items()}


class Stopped(Exception):
    """Stands for whatever ends a process between two steps."""


def stop_at_once() -> None:
    raise Stopped


def run(
    config: TrainConfig, *, stop_at: int | None = None, stop: Callable[[], None] = stop_at_once
) -> Record:
    record = Record(config)
    take, save = BatchIterator.__next__, loop.save_drafter

    def spy_take(iterator: BatchIterator) -> dict:
        batch = take(iterator)
        content = b"".join(batch[name].tobytes() for name in ("tokens_BT", "anchors_BA"))
        record.batches.append(hashlib.sha256(content).hexdigest())
        return batch

    def spy_save(directory: Path, **fields) -> None:
        record.params = jax.tree.map(np.array, fields["params"])
        save(directory, **fields)

    def on_log(step: int, row: dict) -> None:
        record.rows[step] = row
        if step == stop_at:
            stop()

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Stopped):
        patch.setattr(BatchIterator, "__next__", spy_take)
        patch.setattr(loop, "save_drafter", spy_save)
        loop.train(config, on_log=on_log)
    return record


def muon(make_config, folder: Path) -> TrainConfig:
    """With the optimiser that keeps the most complicated state."""
    return make_config(folder / "run", optimizer=OptimizerConfig(orthogonalise=True))


@pytest.fixture(scope="module")
def finished(make_config, tmp_path_factory) -> Record:
    """The run that nothing interrupts."""
    return run(muon(make_config, tmp_path_factory.mktemp("finished")))


@pytest.fixture(scope="module")
def interrupted(make_config, tmp_path_factory) -> Record:
    """The same run, stopped in step 8 when step 6 was the last one saved."""
    return run(muon(make_config, tmp_path_factory.mktemp("interrupted")), stop_at=STEPS - 1)


@pytest.fixture
def copy_of(tmp_path) -> Callable[[Record], TrainConfig]:
    """A copy of a run that a test may continue: a run may move."""

    def copy(record: Record) -> TrainConfig:
        shutil.copytree(record.config.run_dir, tmp_path / "run")
        return dataclasses.replace(record.config, runs=tmp_path)

    return copy


def assert_continues(resumed: Record, finished: Record, after: int) -> None:
    """Bit for bit: losses, data and final parameters."""
    assert sorted(resumed.rows) == list(range(after + 1, STEPS + 1))
    assert resumed.losses == {step: finished.losses[step] for step in resumed.rows}
    assert resumed.batches == finished.batches[1 + after :]  # its first batch only measured the features
    jax.tree.map(np.testing.assert_array_equal, resumed.params, finished.params)


def test_a_stopped_run_continues_exactly_and_never_from_half_a_checkpoint(finished, interrupted, copy_of):
    assert sorted(interrupted.rows) == list(range(1, STEPS))
    assert len(set(finished.batches[1:])) == STEPS
    config = copy_of(interrupted)
    checkpoints = config.run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["3", "6"]
    # What a crash while saving leaves, and what a copy or a deletion leaves that was broken off.
    for name, lost in HALF.items():
        shutil.copytree(checkpoints / "6", checkpoints / name)
        for part in lost:
            path = checkpoints / name / part
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (checkpoints / "12").mkdir()

    assert_continues(run(config), finished, LAST_SAVE)
    # Step 8 could be saved beside them, and the best one of the old is still there.
    aside = {f"{name}.incomplete" for name in HALF if name.isdecimal()} | {"12.incomplete"}
    assert {path.name for path in checkpoints.iterdir() if not path.name.startswith("7.")} - {"3"} == (
        {"6", "8"} | aside
    )


def test_other_devices_continue_with_the_same_losses(finished, interrupted, copy_of, on_devices):
    on_devices(1)
    resumed = run(dataclasses.replace(copy_of(interrupted), mesh=MeshConfig()))
    assert resumed.batches == finished.batches[1 + LAST_SAVE :]
    expected = [finished.losses[step] for step in (7, 8)]
    np.testing.assert_allclose([resumed.losses[step] for step in (7, 8)], expected, rtol=1e-6)


def test_a_new_run_goes_on_from_a_checkpoint_of_another(finished, interrupted, tmp_path):
    """The whole state with its place in the data."""
    checkpoints = interrupted.config.checkpoint_dir
    config = dataclasses.replace(interrupted.config, runs=tmp_path, resume_from=str(checkpoints / "3"))
    assert_continues(run(config), finished, 3)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["3", "6"]
    # The run itself has checkpoints now; they come first.
    assert run(config).rows == {}

    refusals: list[tuple[dict, str]] = [
        ({"optimizer": OptimizerConfig()}, "the same optimiser"),
        ({"resume_from": str(tmp_path / "absent")}, "no complete checkpoint"),
    ]
    for number, (changes, match) in enumerate(refusals):
        with pytest.raises(InputError, match=match):
            run(dataclasses.replace(config, run_name=f"refused-{number}", **changes))
    # The configuration is known to the checkpoints too, if the run directory is lost.
    (config.run_dir / "config.json").unlink()
    with pytest.raises(InputError, match="checkpoints of another configuration"):
        run(dataclasses.replace(config, steps=9))


CHILD = """
import pickle, sys, time
from dspark_jax.training.loop import train

def on_log(step, row):
    print("step", step, flush=True)
    time.sleep(0.3)  # lets the parent kill in time

train(pickle.load(open(sys.argv[1], "rb")), on_log=on_log)
"""


def test_sigkill_at_a_random_step(finished, make_config, tmp_path):
    config = muon(make_config, tmp_path)
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(config))
    kill_at = random.randint(3, STEPS - 2)  # after the first checkpoint was begun
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "config.pickle")],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        reached = next((line for line in process.stdout if line == f"step {kill_at}\n"), "the child died")
        process.kill()
    assert reached == f"step {kill_at}\n"
    assert process.returncode == -signal.SIGKILL

    resumed = run(config)
    first = min(resumed.rows)
    if first == 1:  # not even the first checkpoint was complete
        resumed.batches = resumed.batches[1:]
    assert first in (1, 4, 7), f"killed at {kill_at}"
    assert_continues(resumed, finished, first - 1)


PROCESS = """
import pickle, sys
import numpy as np
from dspark_jax.commands import train as command
from dspark_jax.data.pipeline import BatchIterator

config_path, rows_path = sys.argv[1:]
train, take, taken = command.train, BatchIterator.__next__, open(rows_path, "ab")

def spy(iterator):
    batch = take(iterator)
    pickle.dump([batch["tokens_BT"], batch["anchors_BA"]], taken)
    taken.flush()
    return batch

def on_log(step, row):
    print("step", step, flush=True)
    sys.stdin.readline()  # until the parent has acted

BatchIterator.__next__ = spy
command.train = lambda config, **options: train(config, on_log=on_log, **options)
command.run(pickle.load(open(config_path, "rb")))
"""


class TwoProcesses:
    """Two processes of two devices each that train together, on the loopback interface alone."""

    def __init__(self, config: TrainConfig, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        self.processes = []
        for number in range(2):
            joined = DistributedConfig(
                coordinator=coordinator, num_processes=2, process_id=number, heartbeat_timeout_s=10
            )
            path = folder / f"config-{number}.pickle"
            path.write_bytes(pickle.dumps(dataclasses.replace(config, distributed=joined)))
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROCESS, str(path), str(folder / f"rows-{number}")],
                    env={
                        **os.environ,
                        "JAX_NUM_CPU_DEVICES": "2",
                        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                    },
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=(folder / f"stderr-{number}").open("ab"),
                    text=True,
                )
            )

    def signal_second(self, signum: int, after: int) -> list[int]:
        """Sends a signal to the second process when this step is logged; exit codes of both."""
        first, second = self.processes
        assert first.stdout is not None and first.stdin is not None
        try:
            for line in first.stdout:
                if line == f"step {after}\n":
                    second.send_signal(signum)
                    if signum == signal.SIGKILL:
                        second.wait()
                if line.startswith("step "):
                    first.stdin.write("\n")
                    first.stdin.flush()
            return [process.wait(timeout=300) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()


def taken_together(folder: Path) -> list[str]:
    """Hashes of the global batches that two processes took halves of."""

    def halves(number: int) -> list:
        with (folder / f"rows-{number}").open("rb") as file:
            found = []
            while file.peek(1):
                found.append(pickle.load(file))
            return found

    whole = (map(np.concatenate, zip(*both, strict=True)) for both in zip(halves(0), halves(1), strict=False))
    return [hashlib.sha256(b"".join(x.tobytes() for x in batch)).hexdigest() for batch in whole]


def test_processes_stop_together_die_together_and_one_goes_on(finished, make_config, tmp_path, on_devices):
    """SIGTERM to one of two processes, then SIGKILL to one of two, then one process with four devices."""
    config = dataclasses.replace(
        muon(make_config, tmp_path), mesh=MeshConfig(data=2, fsdp=2), save_every_steps=STEPS
    )
    codes = TwoProcesses(config, tmp_path).signal_second(signal.SIGTERM, after=1)
    assert codes == [0, 0], (tmp_path / "stderr-0").read_text()
    stopped_at = max(int(path.name) for path in config.checkpoint_dir.iterdir())
    assert 2 <= stopped_at <= 5
    first = taken_together(tmp_path)
    for number in range(2):
        (tmp_path / f"rows-{number}").unlink()

    codes = TwoProcesses(config, tmp_path).signal_second(signal.SIGKILL, after=stopped_at + 1)
    # A collective fails, or waits: then JAX ends the process once the other one has been silent for long.
    said = (tmp_path / "stderr-0").read_text()
    assert codes[1] == -signal.SIGKILL and codes[0] in (EXIT_LOST_PEER, -signal.SIGABRT), said
    assert "process 0 of 2 lost another process" in said or "another task died" in said
    second = taken_together(tmp_path)

    on_devices(4)
    resumed = run(config)
    assert min(resumed.rows) == stopped_at + 1
    # Whoever reads it, and in how many parts: the same data in the same order.
    assert first[1 : 1 + stopped_at] == finished.batches[1 : 1 + stopped_at]  # the first: for features' sizes
    assert len(second) >= 2 and second == finished.batches[1 + stopped_at :][: len(second)]
    assert resumed.batches == finished.batches[1 + stopped_at :]
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines}  # a step that was done again: its last line
    assert sorted(losses) == list(range(1, STEPS + 1))
    for step, loss in losses.items():
        assert loss == pytest.approx(finished.losses[step], rel=1e-6), step


def test_sigterm_saves_and_the_run_goes_on(finished, make_config, tmp_path):
    config = muon(make_config, tmp_path)
    stopped = run(config, stop_at=4, stop=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.rows.keys() == {1, 2, 3, 4, 5}  # the line of step 4 is written during step 5
    assert_continues(run(config), finished, 5)


def test_a_finished_run_trains_nothing_more_and_exports_again(finished, copy_of):
    config = copy_of(finished)
    exported = (config.run_dir / "drafter" / "model.safetensors").read_bytes()
    shutil.rmtree(config.run_dir / "drafter")
    again = run(config)
    assert again.rows == {} and again.batches == []
    assert (config.run_dir / "drafter" / "model.safetensors").read_bytes() == exported


def test_another_run_in_the_same_directory_is_refused(finished, monkeypatch):
    monkeypatch.setattr(loop, "load_target", lambda *args, **kwargs: pytest.fail("work before the check"))
    config = finished.config
    gated = dataclasses.replace(config.drafter, head=Gated(rank=4))  # the same fields as Markov(rank=4)
    for field, value in {"seed": 1, "steps": 9, "drafter": gated}.items():
        with pytest.raises(InputError, match=rf"other values of \['{field}'\]"):
            loop.train(dataclasses.replace(config, **{field: value}))
    claim_run(dataclasses.replace(config, log_every_steps=5, mesh=MeshConfig(), microbatches=4))


def test_metrics_of_a_run(finished):
    rows = [json.loads(line) for line in (finished.config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    scalars = "loss ce tv kl bce expected_tau rows anchors_per_sequence gradient_norm steps_per_s".split()
    lost = [f"lost_{kind}_s" for kind in ("startup", "input", "save", "evaluation", "restart")]
    scalars += ["tokens_per_s", "goodput", *lost]
    vectors = "accept_G agree_G confidence_bias_G".split()
    for row in rows:
        assert set(row) == {"step", *scalars, *vectors}  # a CPU states no peak, so no utilisation
        assert all(len(row[name]) == 3 for name in vectors)
        assert np.isfinite([row[name] for name in scalars]).all()
    board = b"".join(path.read_bytes() for path in (finished.config.run_dir / "tensorboard").iterdir())
    for tag in [*scalars, *(f"{name.removesuffix('_G')}/{slot}" for name in vectors for slot in (1, 2, 3))]:
        assert tag.encode() in board
    written = json.loads((finished.config.run_dir / "config.json").read_text())
    assert written["drafter"]["head"] == {"type": "Markov", "rank": 4} and len(written["fingerprint"]) == 16
