"""Were these files replaced meanwhile? Size and time of change say so without reading them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

Stamps = Mapping[Path, tuple[int, int] | None]


def stamp(paths: Iterable[Path]) -> Stamps:
    """(size in bytes, time of change in ns) of each file; None for one that is not there."""
    return {path: _stamp(path) for path in paths}


def replaced(stamps: Stamps) -> list[str]:
    """Names of the files that are no longer as they were stamped."""
    return [str(path) for path, before in stamps.items() if _stamp(path) != before]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns
