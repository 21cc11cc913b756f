"""`dspark verify-golden`: one wrong number is found, named, and makes the exit code 1."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.commands.verify_golden import VerifyGolden, run
from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.golden import verify
from dspark_jax.evaluation.golden_case import EXACT, Comparison, compare, compare_exactly

FIXTURE = Path(__file__).parents[1] / "golden" / "eagle3"


@pytest.fixture
def directory(tmp_path) -> Path:
    return shutil.copytree(FIXTURE, tmp_path / "case")


def rewrite(directory: Path, **changes: np.ndarray) -> None:
    arrays = dict(np.load(directory / "train.npz"))
    np.savez(directory / "train.npz", **{**arrays, **changes})


def test_a_gradient_that_is_off_by_a_thousandth(directory, capsys):
    name = "grad/norm.weight"
    gradient_np = np.load(directory / "train.npz")[name]
    rewrite(directory, **{name: gradient_np * np.float32(1.001)})

    with pytest.raises(SystemExit) as exit_:
        run(VerifyGolden(directory=directory))

    assert exit_.value.code == 1
    lines = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()[:-1]}
    assert lines.pop(name) == "FAILED"
    assert lines["loss"] == "ok" and set(lines.values()) == {"ok"}


def test_gradients_of_unknown_parameters_are_refused(directory):
    rewrite(directory, **{"grad/layers.9.bias": np.zeros(3, np.float32)})

    with pytest.raises(InputError, match=r"layers\.9\.bias"):
        verify(directory)


def test_a_directory_without_records_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"without train\.npz"):
        verify(tmp_path)


def test_errors_are_absolute_for_small_fields_and_relative_for_large_ones():
    assert compare("x", np.array([0.5, 0.2]), np.array([0.5, 0.1]), 2e-5).error == pytest.approx(0.1)
    assert compare("x", np.array([200.0, 2.0]), np.array([200.0, 1.0]), 2e-5).error == pytest.approx(1 / 200)
    assert compare("x", np.array([3, 4, 5]), np.array([3, 0, 0]), EXACT).error == 2
    assert compare_exactly("x", [1, 2, 3], [1, 5]).error == 1


def test_nan_is_past_every_tolerance():
    assert not Comparison(field="x", error=float("nan"), tolerance=1.0).passed
