"""Metrics of a run: a JSON line, TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from dspark_jax.core.jsonl import LineLog, json_line


def plain(value: Any) -> Any:
    """Arrays -> floats and lists, ready for JSON."""
    array_np = np.asarray(value)
    return array_np.item() if array_np.ndim == 0 else array_np.tolist()


class MetricsWriter:
    """Appends to `metrics.jsonl`, whole lines only, and to TensorBoard files under one directory."""

    def __init__(self, directory: Path):
        self._log = LineLog(directory / "metrics.jsonl")
        self._board = SummaryWriter(str(directory / "tensorboard"))

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Writes one step's values; a vector `x_G` becomes the scalars x_1, x_2, ... in TensorBoard."""
        row = {"step": step, **{name: plain(value) for name, value in values.items()}}
        self._log.append(json_line(row))
        for name, value in row.items():
            if isinstance(value, list):
                for k, element in enumerate(value):
                    self._board.add_scalar(f"{name.removesuffix('_G')}/{k + 1}", element, step)
            elif isinstance(value, int | float) and name != "step":
                self._board.add_scalar(name, value, step)
        return row

    def close(self) -> None:
        """Flushes both."""
        self._log.close()
        self._board.close()
