"""Where the time goes, what stops a run, and what it says when it does."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator

import jax
import pytest

from dspark_jax.core.devices import device_kind
from dspark_jax.core.errors import InputError
from dspark_jax.core.metrics import MetricsWriter
from dspark_jax.training import loop
from dspark_jax.training.blueprint import StepProgram
from dspark_jax.training.config import KeepConfig, MeshConfig, TrainConfig, WatchConfig
from dspark_jax.training.goodput import GoodputClock
from dspark_jax.training.step import bind_step
from dspark_jax.training.watch import Diverged, LossGuard


def clock_at(times: list[float]) -> GoodputClock:
    """A clock that reads these times, one at each look."""
    return GoodputClock(now=iter(times).__next__)


def test_goodput_counts_restarts_and_repeated_steps_as_lost():
    first = clock_at([100.0, 110.0, 114.0, 120.0, 121.0])
    for kind in ("startup", "input", "step", "save"):
        first.lap(kind)
    saved = json.loads(json.dumps(first.get_state()))
    # Killed later, started again at 200: what it did after the save is done again.
    second = clock_at([200.0, 205.0, 235.0, 240.0, 240.0])
    second.resume(saved)
    second.lap("startup")
    second.lap("step")
    assert second.summary() == {
        "goodput": pytest.approx(36 / 140),
        "lost_startup_s": 15.0,
        "lost_input_s": 4.0,
        "lost_save_s": 1.0,
        "lost_evaluation_s": 0.0,
        "lost_restart_s": pytest.approx(79.0),
    }


def test_numbers_that_are_none_and_spikes_are_problems():
    guard = LossGuard(WatchConfig(spike_factor=3.0, spike_window_steps=4))
    assert guard.problem(loss=50.0, gradient_norm=1.0) is None  # nothing to compare with
    assert guard.problem(loss=1.0, gradient_norm=1e9) is None
    for bad in (math.nan, math.inf):
        assert "not a finite number" in str(guard.problem(loss=bad, gradient_norm=1.0))
        assert "not a finite number" in str(guard.problem(loss=1.0, gradient_norm=bad))
    for _ in range(3):
        assert guard.problem(loss=1.0, gradient_norm=1.0) is None
    assert "more than 3 times 1," in str(guard.problem(loss=3.1, gradient_norm=1.0))
    assert "more than 3 times 1," in str(guard.problem(loss=3.1, gradient_norm=1.0))  # not in the median
    off = LossGuard(WatchConfig(spike_factor=0.0, spike_window_steps=2))
    assert all(off.problem(loss=10.0**step, gradient_norm=1.0) is None for step in range(9))


def test_flop_utilisation_needs_a_stated_peak(monkeypatch):
    assert device_kind("TPU v5 lite").bf16_tflops == 197 and device_kind("cpu") is None
    mesh = loop.make_mesh(data=2, devices=jax.devices()[:2])
    a, b = jax.numpy.ones((4, 8)), jax.numpy.ones((8, 16))
    program = StepProgram(jax.jit(lambda a, b: (a @ b, {})), mesh)
    program(a, b)
    assert program.ideal_s is None
    monkeypatch.setattr("dspark_jax.training.blueprint.device_kind", lambda name: device_kind("TPU v4"))
    program = StepProgram(jax.jit(lambda a, b: (a @ b, {})), mesh)
    program(a, b)
    assert program.ideal_s == pytest.approx(2 * 4 * 8 * 16 / (2 * 275e12))


def test_a_torn_line_of_metrics_is_cut_off(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    writer = MetricsWriter(tmp_path)
    writer.write(2, {"loss": 1.0})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.fixture
def small(make_config, on_devices, tmp_path) -> TrainConfig:
    """Six steps on one device."""
    on_devices(1)
    return make_config(tmp_path / "run", mesh=MeshConfig(), steps=6, save_every_steps=2)


@pytest.fixture
def poison(monkeypatch) -> Iterator[dict[int, float]]:
    """Step -> factor on its loss and gradient norm."""
    factors: dict[int, float] = {}

    def bind(*args, **kwargs):
        step = bind_step(*args, **kwargs)

        def poisoned(state, batch, frozen):
            state, values = step(state, batch, frozen)
            factor = jax.numpy.ones(())
            for at, value in factors.items():
                factor = jax.numpy.where(state.step == at, value, factor)
            return state, {**values, "loss": values["loss"] * factor}

        return poisoned

    monkeypatch.setattr("dspark_jax.training.blueprint.bind_step", bind)
    yield factors


def test_a_bad_step_stops_the_run_with_its_records_before_it_is_saved(small, poison):
    config = dataclasses.replace(small, watch=WatchConfig(spike_window_steps=2))
    for poison[4] in (math.nan, 20.0):  # the second start goes on from step 2
        with pytest.raises(Diverged, match=r"step 4: .*the records r\d+, r\d+") as stopped:
            loop.train(config)
        assert sorted(int(path.name) for path in config.checkpoint_dir.iterdir()) == [2]
        report = json.loads((config.run_dir / "diverged-4.json").read_text())
        assert len(report["ids"]) == config.data.batch_size
        assert all(name in str(stopped.value) for name in report["ids"])
    poison.clear()
    assert loop.train(config) == config.run_dir / "drafter"


def test_the_best_the_latest_and_every_so_many_checkpoints_stay(small):
    accepted = {1: 1.5, 2: 3.0, 3: 1.2, 4: 1.4, 5: 1.1, 6: 1.3}
    keep = KeepConfig(latest=1, best=1, metric="accepted_length", every_steps=4)
    evaluation = dataclasses.replace(small.evaluation, every_steps=1)
    settings = {"save_every_steps": 1, "log_every_steps": 5, "watch": WatchConfig(profile_steps=(2, 3))}
    config = dataclasses.replace(small, keep=keep, evaluation=evaluation, **settings)
    snapshots, rows = [], []

    def evaluate(snapshot: loop.Snapshot) -> dict[str, float]:
        snapshots.append(snapshot)
        return {"accepted_length": accepted[len(snapshots)]}

    loop.train(config, evaluate=evaluate, on_log=lambda step, row: rows.append((step, row)))
    assert sorted(int(path.name) for path in config.checkpoint_dir.iterdir()) == [2, 4, 6]
    assert [(step, row["accepted_length"]) for step, row in rows] == list(accepted.items())
    assert list((config.run_dir / "profile").rglob("*.xplane.pb"))
    assert rows[-1][1]["lost_evaluation_s"] > 0 and 0 < rows[-1][1]["goodput"] < 1
    assert snapshots[0].drafter.config.block_len == 3 and snapshots[0].draft_to_target_np is not None


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(InputError, match="factor above 1"):
        WatchConfig(spike_factor=0.5)
    with pytest.raises(InputError, match="first and last step"):
        WatchConfig(profile_steps=(3, 2))
    with pytest.raises(InputError, match="at least one latest"):
        KeepConfig(latest=0)
