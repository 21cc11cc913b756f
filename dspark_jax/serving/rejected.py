"""The side file of lines that could not be answered: OUTPUT.rejected.jsonl."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO

from dspark_jax.core import storage
from dspark_jax.core.jsonl import json_line


class Rejected:
    """Collects refused lines; every run reads all lines again, so every run writes the file anew.

    Args:
      name: path or URL; the file appears with the first refused line.
    """

    def __init__(self, name: str):
        self.name = name
        self._file: IO[bytes] | None = None
        storage.remove(name)

    @property
    def written(self) -> bool:
        """Whether there is such a file."""
        return self._file is not None

    def add(self, line_number: int, reason: str, line: bytes) -> None:
        """Keeps one line, as text: bytes that are no UTF-8 become U+FFFD."""
        if self._file is None:
            # In a bucket nothing can grow: there the file is written at the end.
            remote = storage.is_remote(self.name)
            opened = tempfile.TemporaryFile if remote else lambda: open(self.name, "wb")  # noqa: SIM115
            self._file = opened()
        text = line.decode("utf-8", errors="replace").rstrip("\r\n")
        self._file.write(json_line({"line": line_number, "reason": reason, "text": text}))
        self._file.flush()

    def close(self) -> None:
        """Makes the file complete as far as lines were read."""
        if self._file is None:
            return
        with self._file as file:
            if storage.is_remote(self.name):
                file.seek(0)
                storage.write(self.name, file)


@contextlib.contextmanager
def rejected_lines(name: str) -> Iterator[Rejected]:
    """A side file that is closed whatever happens."""
    rejected = Rejected(name)
    try:
        yield rejected
    finally:
        rejected.close()
