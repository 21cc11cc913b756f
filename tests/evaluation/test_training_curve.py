"""Training curves: what is read from a run's metrics, and a PNG without a display."""

from __future__ import annotations

import builtins
import json
import sys

import numpy as np
import pytest

from dspark_jax.commands import plot_training
from dspark_jax.commands.cli import main
from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.training_curve import read_training_curve, smooth


def line(step: int, tau: float = 1.5) -> str:
    accept = [0.5, 0.25]
    return (
        json.dumps({"step": step, "rows": 100.0, "expected_tau": tau, "accept_G": accept, "loss": 1.0}) + "\n"
    )


def write_run(folder, *lines: str):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_predictions_add_up_over_steps_between_lines(tmp_path):
    curve = read_training_curve(write_run(tmp_path / "run", line(1), line(20), line(40)))

    assert curve.name == "run"
    np.testing.assert_array_equal(curve.predictions_np, [100, 2000, 4000])
    assert curve.accept_np.shape == (3, 2)


def test_a_resumed_run_overrides_the_steps_that_it_repeats(tmp_path):
    run = write_run(tmp_path / "run", line(10), line(20, 1.6), line(30, 1.7), line(20, 1.8), line(30, 1.9))
    curve = read_training_curve(run)

    np.testing.assert_array_equal(curve.predictions_np, [1000, 2000, 3000])
    np.testing.assert_array_equal(curve.expected_tau_np, [1.5, 1.8, 1.9])


def test_a_line_that_is_being_written_is_left_for_later(tmp_path):
    curve = read_training_curve(write_run(tmp_path / "run", line(10), line(20)[:30]))

    assert len(curve.predictions_np) == 1


@pytest.mark.parametrize("lines", [None, []])
def test_runs_without_metrics_are_refused(tmp_path, lines):
    if lines is not None:
        write_run(tmp_path / "run", *lines)
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        read_training_curve(tmp_path / "run")


def test_smoothing_does_not_lag():
    values = np.arange(101.0)

    smoothed = smooth(values, share=0.2)

    np.testing.assert_allclose(smoothed[:91], values[:91])  # a straight line stays one, from its start on
    assert smoothed[-1] == np.mean(values[-11:])
    np.testing.assert_allclose(smooth(np.stack([values, 2 * values], axis=1), share=0.2)[:, 1], 2 * smoothed)


def test_smoothing_takes_the_noise_out_of_the_last_value():
    noise = np.random.default_rng(0).normal(size=(200, 1000))

    assert smooth(noise, share=0.2)[-1].std() == pytest.approx(1 / np.sqrt(21), rel=0.1)


def test_the_command_draws_a_png_without_a_display(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="extra [eval]")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("MPLBACKEND", raising=False)
    runs = [
        write_run(tmp_path / name, *(line(step, 1 + step / 100) for step in range(10, 100, 10)))
        for name in "ab"
    ]
    output = tmp_path / "pictures" / "curve.png"

    main(["plot-training", *map(str, runs), "--output", str(output)])

    assert output.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert output.stat().st_size > 10_000
    assert str(output) in capsys.readouterr().out


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    config = plot_training.PlotTraining(
        runs=(write_run(tmp_path / "run", line(10)),), output=tmp_path / "curve.png"
    )
    with pytest.raises(InputError, match=r"\[eval\]"):
        plot_training.run(config)
    assert not config.output.exists()
