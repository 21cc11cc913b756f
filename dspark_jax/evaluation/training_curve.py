"""The course of training runs as a picture: expected accepted length and acceptance per position."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.plotting import COLOURS, INK, light_grid, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING_SHARE = 0.05
"""Width of the moving average, as a share of the lines of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainingCurve:
    """The metrics of one run."""

    name: str
    predictions_np: np.ndarray
    """float [lines]: block positions trained on until then."""
    expected_tau_np: np.ndarray
    """float [lines]: expected accepted length."""
    accept_np: np.ndarray
    """float [lines, G]: acceptance at each position under teacher forcing."""


def read_training_curve(run_dir: Path) -> TrainingCurve:
    """Reads `metrics.jsonl` of a run.

    A resumed run repeats the steps after its last checkpoint: the later lines count. Between two lines, every
    step is taken to have had as many predictions as the step of the second line.

    Raises:
      InputError: there is no such file, or nothing in it.
    """
    rows = read_metrics(run_dir)
    steps_np = np.array([row["step"] for row in rows])
    rows_np = np.array([row["rows"] for row in rows])
    return TrainingCurve(
        name=run_dir.resolve().name,
        predictions_np=np.cumsum(rows_np * np.diff(steps_np, prepend=0)),
        expected_tau_np=np.array([row["expected_tau"] for row in rows]),
        accept_np=np.array([row["accept_G"] for row in rows]),
    )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without those that a resumed run has repeated.

    Raises:
      InputError: there is no such file, or nothing in it.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise InputError(
            given=f"{path}: no such file", expected="metrics of a run", fix="pass run directories of train.py"
        )
    rows: list[dict[str, Any]] = []
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # the run is writing it, or was killed there
        row = json.loads(line)
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    if not rows:
        raise InputError(
            given=f"{path} without a line", expected="at least one", fix="wait for the run's first metrics"
        )
    return rows


def smooth(values: np.ndarray, share: float = SMOOTHING_SHARE) -> np.ndarray:
    """Centred moving average along the first axis, which does not lag.

    Towards the start, where curves are steep, it narrows on both sides; at the end, where they are flat and
    the last value is read as the result, on the right side only.
    """
    half = int(share * len(values) / 2)
    index = np.arange(len(values))
    left = np.minimum(half, index)
    right = np.minimum(left, index[::-1])
    low, high = index - left, index + right + 1
    sums = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
    return (sums[high] - sums[low]) / (high - low).reshape(-1, *[1] * (values.ndim - 1))


def plot_training(curves: Sequence[TrainingCurve], path: Path) -> None:
    """Draws a PNG: expected accepted length of all runs, and for each run its acceptance per position.

    Raises:
      InputError: matplotlib is not installed.
    """
    with png(path, width=4.8 * (1 + len(curves)), height=3.8) as figure:
        tau_axes, *accept_axes = figure.subplots(1, 1 + len(curves), squeeze=False)[0]
        _draw_tau(tau_axes, curves)
        top = max(float(smooth(curve.accept_np).max()) for curve in curves)
        for axes, curve in zip(accept_axes, curves, strict=True):
            which = f", {curve.name}" if len(curves) > 1 else ""
            axes.set_title(f"Acceptance by position in the block{which}")
            axes.set_ylim(0, 1.05 * top)  # labels are placed by it
            _draw_acceptance(axes, curve)
        for axes in (tau_axes, *accept_axes):
            axes.set_xlabel("predictions seen")
            axes.set_xlim(0, max(curve.predictions_np[-1] for curve in curves))
            axes.xaxis.set_major_formatter(_engineering)
            light_grid(axes)


def _draw_tau(axes: Axes, curves: Sequence[TrainingCurve]) -> None:
    axes.set_title("Expected accepted length (tokens per round)")
    labels = []
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        values = smooth(curve.expected_tau_np)
        axes.plot(curve.predictions_np, curve.expected_tau_np, color=colour, alpha=0.2, linewidth=0.8)
        axes.plot(curve.predictions_np, values, color=colour, linewidth=2, label=curve.name)
        labels.append((curve.predictions_np[-1], values[-1], f"{values[-1]:.2f}", colour))
    low, high = 1.0, max(float(smooth(curve.expected_tau_np).max()) for curve in curves)
    axes.set_ylim(low, low + 1.1 * (high - low))
    _label_ends(axes, labels)
    if len(curves) > 1:
        axes.legend(frameon=False, loc="lower right")


def _draw_acceptance(axes: Axes, curve: TrainingCurve) -> None:
    """Positions are ordered, so their colours run from dark to light; numbers at the ends name them."""
    import matplotlib

    colours, labels = matplotlib.colormaps["cividis"], []
    values = smooth(curve.accept_np)
    G = values.shape[1]
    for k in range(G):
        colour = colours(0.9 * k / max(G - 1, 1))
        axes.plot(curve.predictions_np, values[:, k], color=colour, linewidth=2)
        labels.append((curve.predictions_np[-1], values[-1, k], f"{k + 1}: {values[-1, k]:.2f}", INK))
    _label_ends(axes, labels)


def _label_ends(axes: Axes, labels: Sequence[tuple[float, float, str, Any]]) -> None:
    """Writes (x, y, text, colour) beside the ends of lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    gap, place = 0.055 * (high - low), -np.inf
    for x, y, text, colour in sorted(labels, key=lambda label: label[1]):
        place = max(y, place + gap)
        axes.annotate(
            text,
            (x, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def _engineering(value: float, _: int) -> str:
    for scale, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= scale:
            return f"{value / scale:g}{suffix}"
    return f"{value:g}"
