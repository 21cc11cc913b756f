"""`dspark plot-training`: the course of training runs as a picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

from dspark_jax.evaluation.training_curve import plot_training, read_training_curve


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotTraining:
    """Draw expected accepted length and acceptance per position against the predictions seen."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories of train.py; unfinished ones are welcome."""
    output: Path
    """PNG file."""


def run(config: PlotTraining) -> None:
    """Reads the metrics of the runs and writes the picture."""
    plot_training([read_training_curve(run_dir) for run_dir in config.runs], config.output)
    print(f"wrote {config.output}")
