"""Where a job keeps what it has answered until all of it is there.

The journal's first line says which job it belongs to, each further line is a record of the output, in the
order of completion. Beside a local output it is one file that grows (`core.jsonl.LineLog`); beside a remote
one, where nothing can grow, a folder of numbered parts, each written whole.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import IO, Protocol

from dspark_jax.core import storage
from dspark_jax.core.jsonl import LineLog

PART_LINES = 256
PART_S = 30.0
SYNC_S = 5.0


class Journal(Protocol):
    """Lines that survive a kill."""

    def open(self) -> IO[bytes]:
        """A seekable file of the whole lines that are there, oldest first."""
        ...

    def append(self, line: bytes) -> None:
        """Adds a line, newline included."""
        ...

    def clear(self) -> None:
        """Forgets all lines."""
        ...

    def close(self) -> None:
        """Makes all lines durable."""
        ...

    def remove(self) -> None:
        """Ends the journal's life; it must be closed."""
        ...


def open_journal(name: storage.Name) -> Journal:
    """The journal of that name, repaired if it was torn; empty where there was none.

    Raises:
      InputError: another process holds it (local journals only).
    """
    return Parts(str(name)) if storage.is_remote(name) else GrowingFile(Path(name))


def has_lines(name: storage.Name) -> bool:
    """Whether a journal of that name holds anything."""
    if storage.is_remote(name):
        return bool(storage.children(name))
    path = Path(name)
    return path.exists() and path.stat().st_size > 0


class GrowingFile:
    """A local journal: a kill loses nothing that was appended, a power cut at most `SYNC_S` seconds of it."""

    def __init__(self, path: Path):
        self._log = LineLog(path)
        self._synced_s = time.monotonic()

    def open(self) -> IO[bytes]:
        """A seekable file of the whole lines that are there, oldest first."""
        return open(self._log.path, "rb")

    def append(self, line: bytes) -> None:
        """Adds a line, newline included."""
        self._log.append(line)
        if time.monotonic() - self._synced_s > SYNC_S:
            self._log.sync()
            self._synced_s = time.monotonic()

    def clear(self) -> None:
        """Forgets all lines."""
        self._log.clear()

    def close(self) -> None:
        """Makes all lines durable."""
        self._log.close()

    def remove(self) -> None:
        """Ends the journal's life."""
        storage.remove(self._log.path)


class Parts:
    """A remote journal: a kill loses at most the last `PART_LINES` lines or `PART_S` seconds."""

    def __init__(self, name: str):
        self._name = name
        self._parts = [part for part in storage.children(name) if part.endswith(".jsonl")]
        self._pending: list[bytes] = []
        self._written_s = time.monotonic()

    def open(self) -> IO[bytes]:
        """A seekable file of the whole lines that are there, oldest first; a local copy."""
        copy = tempfile.TemporaryFile()  # noqa: SIM115 the caller closes it
        for part in self._parts:
            with storage.open_read(part) as file:
                shutil.copyfileobj(file, copy)
        copy.writelines(self._pending)
        copy.seek(0)
        return copy

    def append(self, line: bytes) -> None:
        """Adds a line, newline included."""
        self._pending.append(line)
        if len(self._pending) >= PART_LINES or time.monotonic() - self._written_s > PART_S:
            self._write_part()

    def clear(self) -> None:
        """Forgets all lines."""
        storage.remove(self._name)
        self._parts, self._pending = [], []

    def close(self) -> None:
        """Makes all lines durable."""
        if self._pending:
            self._write_part()

    def remove(self) -> None:
        """Ends the journal's life."""
        storage.remove(self._name)

    def _write_part(self) -> None:
        part = f"{self._name}/{len(self._parts):08d}.jsonl"
        storage.write(part, self._pending)
        self._parts.append(part)
        self._pending, self._written_s = [], time.monotonic()
