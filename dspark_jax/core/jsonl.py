"""JSON lines that survive a kill: whole lines only, continued where they stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonLinesLog:
    """Appends records to a file; a record exists once its newline is written.

    Opening an existing file cuts off a torn last line, the only damage that a kill can do.

    Args:
      path: created when absent.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab+")  # noqa: SIM115 closed by close()
        self._file.seek(0)
        self._ids: set[str] = set()
        whole_bytes = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            whole_bytes += len(line)
            self._ids.add(str(json.loads(line)["id"]))
        self._file.truncate(whole_bytes)
        self._file.seek(0, os.SEEK_END)

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
