"""Metrics of a run: a JSON line, TensorBoard scalars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from dspark_jax.core.jsonl import open_whole_lines


def plain(value: Any) -> Any:
    """Arrays -> floats and lists, ready for JSON."""
    array_np = np.asarray(value)
    return array_np.item() if array_np.ndim == 0 else array_np.tolist()


class MetricsWriter:
    """Appends to `metrics.jsonl`, whole lines only, and to TensorBoard files under one directory."""

    def __init__(self, directory: Path):
        self._lines, _ = open_whole_lines(directory / "metrics.jsonl")
        self._board = SummaryWriter(str(directory / "tensorboard"))

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Writes one step's values; a vector `x_G` becomes the scalars x_1, x_2, ... in TensorBoard."""
        row = {"step": step, **{name: plain(value) for name, value in values.items()}}
        self._lines.write(json.dumps(row).encode() + b"\n")
        self._lines.flush()
        for name, value in row.items():
            if isinstance(value, list):
                for k, element in enumerate(value):
                    self._board.add_scalar(f"{name.removesuffix('_G')}/{k + 1}", element, step)
            elif isinstance(value, int | float) and name != "step":
                self._board.add_scalar(name, value, step)
        return row

    def close(self) -> None:
        """Flushes both."""
        self._lines.close()
        self._board.close()
