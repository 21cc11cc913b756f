"""How well the confidence head's predictions come true: a table per position and reliability diagrams."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.accepted_length import PromptRounds
from dspark_jax.evaluation.plotting import COLOURS, FAINT, INK, png
from dspark_jax.speculation import calibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_COUNT_SHOWN = 10
"""Bins with fewer rounds are left out of the diagrams: their shares are noise."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FullBlockRounds:
    """Rounds in which the whole block was verified."""

    logits_np: np.ndarray
    """float64 [N, G], confidence logits."""
    survived_np: np.ndarray
    """bool [N, G]: the first k drafts were all accepted."""


def full_block_rounds(records: Sequence[PromptRounds]) -> FullBlockRounds:
    """The full-block rounds of all prompts; a round cut by a stop token says nothing about its end.

    Raises:
      InputError: there are none.
    """
    logits, accepted = [], []
    for record in records:
        if not len(record.confidence_np):
            continue
        full = record.verified_np == record.confidence_np.shape[1]
        logits.append(record.confidence_np[full])
        accepted.append(record.accepted_np[full])
    if not sum(map(len, logits)) or not logits[0].shape[1]:
        raise InputError(
            given="no round that verified a whole block",
            expected="full-block decoding with a drafter that has a confidence head",
            fix="pass prompts, and a drafter trained with the confidence head",
        )
    logits_np = np.concatenate(logits).astype(np.float64)
    return FullBlockRounds(
        logits_np=logits_np,
        survived_np=calibration.survived(np.concatenate(accepted), logits_np.shape[1]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationFigures:
    """Errors of the predicted survival at each position k = 1..G."""

    ece_np: np.ndarray
    """float64 [G]: expected calibration error, 20 bins."""
    auroc_np: np.ndarray
    """float64 [G]."""
    brier_np: np.ndarray
    """float64 [G]."""

    @property
    def mean_ece(self) -> float:
        """Mean over positions."""
        return float(self.ece_np.mean())

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, null where there is no AUROC."""
        return {
            name.removesuffix("_np"): [None if np.isnan(x) else round(x, 5) for x in values.tolist()]
            for name, values in vars(self).items()
        }


def calibration_figures(rounds: FullBlockRounds, scaling_np: np.ndarray) -> CalibrationFigures:
    """Compares predictions under this scaling with what happened."""
    predicted_NG = calibration.predicted(rounds.logits_np, scaling_np)
    pairs = list(zip(predicted_NG.T, rounds.survived_np.T, strict=True))
    return CalibrationFigures(
        ece_np=np.array([calibration.expected_calibration_error(*pair) for pair in pairs]),
        auroc_np=np.array([calibration.auroc(*pair) for pair in pairs]),
        brier_np=np.array([calibration.brier_score(*pair) for pair in pairs]),
    )


def calibration_table(before: CalibrationFigures, after: CalibrationFigures, scaling_np: np.ndarray) -> str:
    """Aligned for a terminal: one line for each position, errors before -> after."""
    lines = [f"{'position':>8s}  {'T':>5s}  {'shift':>5s}  {'ECE %':>14s}  {'AUROC':>14s}  {'Brier':>14s}"]
    for k, (T, shift) in enumerate(scaling_np.T):
        lines.append(
            f"{k + 1:8d}  {T:5.2f}  {shift:5.2f}"
            f"  {100 * before.ece_np[k]:5.2f} -> {100 * after.ece_np[k]:5.2f}"
            f"  {before.auroc_np[k]:5.3f} -> {after.auroc_np[k]:5.3f}"
            f"  {before.brier_np[k]:5.3f} -> {after.brier_np[k]:5.3f}"
        )
    lines.append(f"{'mean':>8s}  {'':12s}  {100 * before.mean_ece:5.2f} -> {100 * after.mean_ece:5.2f}")
    return "\n".join(lines)


def plot_reliability(rounds: FullBlockRounds, scaling_np: np.ndarray, path: Path) -> None:
    """Draws a PNG: predicted against observed survival at each position, before and after scaling.

    Raises:
      InputError: matplotlib is not installed.
    """
    G = rounds.logits_np.shape[1]
    with png(path, width=2.7 * G + 0.6, height=3.3) as figure:
        axes_of = figure.subplots(1, G, squeeze=False, sharey=True)[0]
        for k, axes in enumerate(axes_of):
            axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1.5, zorder=0)
            for name, scaling_2G, colour, marker in (
                ("raw", calibration.unscaled(G), COLOURS[1], "s"),
                ("scaled", scaling_np, COLOURS[0], "o"),
            ):
                _draw_reliability(axes, rounds, scaling_2G, k, name, colour, marker)
            axes.set_title(f"first {k + 1} accepted" if k else "first draft accepted")
            axes.set_xlabel("predicted")
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1)
            axes.set_aspect("equal")
        axes_of[0].set_ylabel("observed share")
        axes_of[0].legend(frameon=False, loc="upper left", labelcolor=INK)


def _draw_reliability(
    axes: Axes,
    rounds: FullBlockRounds,
    scaling_np: np.ndarray,
    k: int,
    name: str,
    colour: str,
    marker: str,
) -> None:
    predicted_N = calibration.predicted(rounds.logits_np, scaling_np)[:, k]
    diagram = calibration.reliability(predicted_N, rounds.survived_np[:, k])
    shown = diagram.count_np >= MIN_COUNT_SHOWN
    axes.plot(
        diagram.predicted_np[shown],
        diagram.observed_np[shown],
        color=colour,
        marker=marker,
        markersize=4,
        linewidth=1.5,
        label=name,
    )
