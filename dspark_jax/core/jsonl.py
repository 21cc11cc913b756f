"""JSON lines that survive a kill: whole lines only, continued where they stopped."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dspark_jax.core.errors import InputError


class LineLog:
    """Appends lines to a file; a line exists once its newline is written.

    Opening an existing file cuts off a torn last line, the only damage that a kill can do. One process at a
    time may hold the file.

    Args:
      path: created when absent.

    Raises:
      InputError: another process holds the file.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise InputError(
                given=f"{path} is being written by another process",
                expected="one process for each file",
                fix="wait for the other one to end, or stop it",
            ) from error
        self._size_bytes = sum(map(len, self.lines()))
        os.ftruncate(self._descriptor, self._size_bytes)

    def lines(self) -> Iterator[bytes]:
        """The whole lines that the file holds, newlines included."""
        with open(self.path, "rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))

    def append(self, line: bytes) -> None:
        """Hands one line, newline included, to the operating system: from then on a kill cannot lose it.

        Raises:
          OSError: the disk is full, for one; the file is then as it was before.
        """
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size_bytes)
            raise
        self._size_bytes += len(line)

    def clear(self) -> None:
        """Forgets all lines, without letting go of the file."""
        os.ftruncate(self._descriptor, 0)
        self._size_bytes = 0

    def sync(self) -> None:
        """Makes everything durable: from then on a power cut cannot lose it."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Makes everything durable and lets others have the file."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)


class JsonLinesLog:
    """A `LineLog` of records with an "id".

    Args:
      path: created when absent.
    """

    def __init__(self, path: Path):
        self._log = LineLog(path)
        self._ids = {str(json.loads(line)["id"]) for line in self._log.lines()}

    @property
    def done_ids(self) -> frozenset[str]:
        """Ids of the records that were already there."""
        return frozenset(self._ids)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record and hands it to the operating system."""
        self._log.append(json_line(record))

    def close(self) -> None:
        """Makes everything durable."""
        self._log.close()


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of UTF-8."""
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
