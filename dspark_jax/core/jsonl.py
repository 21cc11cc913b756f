"""JSON lines that survive a kill: whole lines only, continued where they stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO


def open_whole_lines(path: Path) -> tuple[BinaryIO, list[bytes]]:
    """Opens a file to append to, without the torn last line that a kill may have left; and its lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab+")  # noqa: SIM115 closed by the caller
    file.seek(0)
    lines = [line for line in file if line.endswith(b"\n")]  # only the last line may lack its end
    file.truncate(sum(map(len, lines)))
    file.seek(0, os.SEEK_END)
    return file, lines


class JsonLinesLog:
    """Appends records to a file; a record exists once its newline is written.

    Opening an existing file cuts off a torn last line, the only damage that a kill can do.

    Args:
      path: created when absent.
    """

    def __init__(self, path: Path):
        self._file, lines = open_whole_lines(path)
        self._ids = {str(json.loads(line)["id"]) for line in lines}

    @property
    def done_ids(self) -> frozenset[str]:
        """Ids of the records that were already there."""
        return frozenset(self._ids)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record and hands it to the operating system."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Makes everything durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
