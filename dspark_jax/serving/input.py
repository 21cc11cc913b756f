"""The lines of a job's input, read once to know what they are and once more to answer them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Iterator
from typing import IO

import numpy as np
from tqdm import tqdm

from dspark_jax.core import storage
from dspark_jax.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """A file of prompts as it was found.

    Attributes:
      name: path or URL.
      sha256: of its content.
      size_bytes: its length.
      lines: those that are not blank.
      offsets_np: int64, where each line that is not blank begins, in the order in which they shall be read;
        None for the order of the file.
      numbers_np: int64, the line numbers that belong to `offsets_np`.
    """

    name: str
    sha256: str
    size_bytes: int
    lines: int
    offsets_np: np.ndarray | None = None
    numbers_np: np.ndarray | None = None

    def numbered_lines(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, line) of the lines; blank ones may be among them."""
        with storage.open_read(self.name) as file:
            if self.offsets_np is None or self.numbers_np is None:
                yield from enumerate(file, start=1)
                return
            for offset, number in zip(self.offsets_np, self.numbers_np, strict=True):
                file.seek(int(offset))
                yield int(number), file.readline()


def scan(name: str, *, longest_first: bool, max_new_tokens: int) -> Input:
    """Reads a file through, without keeping it.

    Args:
      name: path or URL.
      longest_first: order lines by the most tokens that they may ask for, then by their bytes. Takes 24 bytes
        of memory a line, 48 while it sorts.
      max_new_tokens: longest answer to a line that says nothing else.

    Raises:
      InputError: there is no such file.
    """
    try:
        file = storage.open_read(name)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise InputError(
            given=f"{name}: no such file", expected="a file of prompts", fix="check --input"
        ) from error
    offsets, numbers, sizes = array("q"), array("q"), array("q")
    digest, size_bytes, lines = hashlib.sha256(), 0, 0
    with file:
        for number, line in enumerate(_with_progress(file), start=1):
            digest.update(line)
            if line.strip():
                lines += 1
                if longest_first:
                    offsets.append(size_bytes)
                    numbers.append(number)
                    sizes.append(_answer_tokens(line, max_new_tokens) << 32 | min(len(line), 2**32 - 1))
            size_bytes += len(line)
    found = Input(name=name, sha256=digest.hexdigest(), size_bytes=size_bytes, lines=lines)
    if not longest_first:
        return found
    order_np = np.argsort(-np.array(sizes, np.int64), kind="stable")
    return dataclasses.replace(
        found,
        offsets_np=np.array(offsets, np.int64)[order_np],
        numbers_np=np.array(numbers, np.int64)[order_np],
    )


def _with_progress(file: IO[bytes]) -> Iterator[bytes]:
    with tqdm(desc="reading the input", unit="B", unit_scale=True, delay=2) as progress:
        for line in file:
            progress.update(len(line))
            yield line


def _answer_tokens(line: bytes, default: int) -> int:
    """What a line says of max_new_tokens; a bad line is refused later, not here."""
    if b"max_new_tokens" not in line:
        return default
    try:
        fields = json.loads(line)
        tokens = fields["max_new_tokens"]
        return min(max(int(tokens), 0), 2**30)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return default
