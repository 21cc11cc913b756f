"""Raw records, wherever they lie: JSON lines, parquet files, directories, data sets of the hub."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dspark_jax.core.errors import InputError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_FILE_ENDINGS = (".jsonl", ".json", ".gz", ".parquet")


class Row(NamedTuple):
    """One raw record: where it stands (for messages) and its fields, or what is wrong with it."""

    place: str
    fields: dict | None
    problem: str = ""


def open_rows(names: Paths) -> Iterator[Row]:
    """Rows of one or several sources, in their order.

    Args:
      names: JSON lines (plain or .gz); .parquet files; directories with a data set as the `datasets` package
        reads or saves it; or data sets of the hub, "owner/name" or "owner/name:split".

    Raises:
      InputError: there is nothing of that name.
    """
    for name in [names] if isinstance(names, str | os.PathLike) else names:
        path = Path(name)
        if path.is_dir():
            yield from _directory(path)
        elif path.suffix == ".parquet" and path.is_file():
            yield from load_with_datasets("parquet", place=str(path), data_files=str(path))
        elif not path.exists() and len(path.parts) == 2 and not str(path).endswith(_FILE_ENDINGS):
            repository, _, split = str(path).partition(":")
            yield from load_with_datasets(repository, split=split or "train")
        else:
            yield from _json_lines(path)


def load_with_datasets(
    name: str, /, *, split: str = "train", place: str | None = None, **options: Any
) -> Iterator[Row]:
    """Rows through the `datasets` package, one after the other: nothing is copied into a cache.

    Args:
      name: a data set on the hub, a directory, or a builder such as "parquet" with `data_files=...`.
      split: the part to read.
      place: what to call it in messages; by default its name and split.
      **options: passed on to `datasets.load_dataset` (`data_files`, `name`, `revision`, ...).
    """
    import datasets  # takes seconds to import, and most runs read JSON lines
    from datasets.exceptions import DatasetsError

    place = f"{name}[{split}]" if place is None else place
    try:
        rows = datasets.load_dataset(name, split=split, streaming=True, **options)
        for number, fields in enumerate(rows):
            yield Row(f"{place}:{number}", dict(fields))
    except (OSError, ValueError, DatasetsError) as error:
        raise InputError(
            given=f"data set {name!r}, split {split!r}: {error}",
            expected="something that datasets.load_dataset can open",
            fix="check the name and the network, or pass local files",
        ) from error


def _directory(path: Path) -> Iterator[Row]:
    if not (path / "dataset_info.json").exists():
        yield from load_with_datasets(str(path), place=str(path))
        return
    import datasets

    rows = datasets.load_from_disk(str(path))
    if isinstance(rows, datasets.DatasetDict):
        raise InputError(
            given=f"{path} with the splits {sorted(map(str, rows))}",
            expected="one split",
            fix="give the directory of the split, such as its folder `train`",
        )
    yield from (Row(f"{path}:{number}", dict(fields)) for number, fields in enumerate(rows))


def _json_lines(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise InputError(given=f"{path}: no such file", expected="a JSON lines file", fix="check the path")
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        for number in itertools.count(1):
            place = f"{path}:{number}"
            try:
                line = file.readline()
            except (EOFError, OSError) as error:
                yield Row(place, None, f"unreadable from here on ({error})")
                break
            if not line:
                break
            if line.strip():
                yield _row(place, line)


def _row(place: str, line: bytes) -> Row:
    try:
        fields = json.loads(line)
    except ValueError as error:
        return Row(place, None, f"not JSON ({error})")
    return Row(place, fields) if isinstance(fields, dict) else Row(place, None, "not a JSON object")
