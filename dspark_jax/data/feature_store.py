"""The target's features on disk: written once, read at random in every epoch.

A store is a directory of ArrayRecord shards with one record per training sequence, a small index beside each
shard (ids, domains, lengths), and `manifest.json`, which alone decides what exists. Shards appear complete or
not at all, so a killed writer loses at most the shard that it was filling.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write, sync_directory
from dspark_jax.data.feature_record import FeatureRecord, pack_record, unpack_record

VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreDescription:
    """What the features of a store are features of; two stores that differ here cannot be mixed."""

    identity: str
    """Fingerprint of the target, as its checkpoint source states it."""
    taps: tuple[int, ...]
    """Tapped layers in the order of the C axis; -1 is the embedding output."""
    width: int
    """D."""
    template: str
    """Name of the chat template that made the token ids."""

    def __post_init__(self):
        if not self.taps or len(set(self.taps)) != len(self.taps):
            raise InputError(
                given=f"taps {self.taps}", expected="distinct layer numbers", fix="name each tap once"
            )

    def to_json(self) -> dict:
        return {"version": VERSION, "dtype": "bfloat16", **dataclasses.asdict(self), "taps": list(self.taps)}


class FeatureStoreWriter:
    """Appends records to a store, shard by shard, and resumes where a killed writer stopped.

    One writer per directory at a time. Use it as a context manager: leaving the block completes the last
    shard, also on an exception, since every record written so far is whole.

    Args:
      directory: created when absent; an existing store must have the same description.
      description: what the features belong to.
      shard_bytes: a shard is completed once it holds this much.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        description: StoreDescription,
        *,
        shard_bytes: int = 256 * 2**20,
    ):
        self.directory = Path(directory)
        self.description = description
        self._shard_bytes = shard_bytes
        self._shards: list[dict] = []
        self._done: set[str] = set()
        self.directory.mkdir(parents=True, exist_ok=True)
        if (self.directory / "manifest.json").exists():
            store = FeatureStore(self.directory)
            if store.description != description:
                raise InputError(
                    given=f"{self.directory} holds {store.description}",
                    expected=str(description),
                    fix="write into a new directory, or delete the old store",
                )
            self._shards, self._done = list(store.shards), set(store.ids)
        for leftover in self.directory.glob("*.partial"):
            leftover.unlink()
        self._open_shard()

    def done_ids(self) -> frozenset[str]:
        """Ids that need no more work: everything in completed shards and in the one being filled."""
        return frozenset(self._done)

    def write(self, record: FeatureRecord) -> None:
        """Appends one record; its id must be new."""
        example = record.example
        if example.id in self._done:
            raise InputError(
                given=f"id {example.id!r} twice",
                expected="one record per id",
                fix="skip what done_ids() names",
            )
        if record.features_TCD_np.shape[1:] != (len(self.description.taps), self.description.width):
            raise InputError(
                given=f"features of shape {record.features_TCD_np.shape} for {example.id!r}",
                expected=f"[T, {len(self.description.taps)}, {self.description.width}]",
                fix="write the taps and width that the store was created for",
            )
        payload = pack_record(record)
        self._writer.write(payload)
        self._done.add(example.id)
        self._index["ids"].append(example.id)
        self._index["domains"].append(example.domain)
        self._index["lengths"].append(len(example.tokens_np))
        self._bytes += len(payload)
        if self._bytes >= self._shard_bytes:
            self._complete_shard()
            self._open_shard()

    def close(self) -> None:
        """Completes the shard being filled. Nothing may be written afterwards."""
        self._complete_shard()

    def __enter__(self) -> FeatureStoreWriter:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _open_shard(self) -> None:
        self._name = f"shard-{len(self._shards):05d}"
        self._index = {"ids": [], "domains": [], "lengths": []}
        self._bytes = 0
        # Groups of one make every record readable alone; bfloat16 activations hardly compress.
        self._writer = ArrayRecordWriter(str(self._partial), "group_size:1,uncompressed")

    @property
    def _partial(self) -> Path:
        return self.directory / f"{self._name}.partial"

    def _complete_shard(self) -> None:
        self._writer.close()
        if not self._index["ids"]:
            self._partial.unlink(missing_ok=True)
            return
        with open(self._partial, "rb") as file:
            os.fsync(file.fileno())
        size_bytes = self._partial.stat().st_size
        _write_json(self.directory / f"{self._name}.index.json", self._index)
        os.replace(self._partial, self.directory / f"{self._name}.array_record")
        sync_directory(self.directory)
        # The manifest comes last: a shard that it does not name is overwritten by the next writer.
        self._shards.append({"name": self._name, "bytes": size_bytes, "records": len(self._index["ids"])})
        records = sum(shard["records"] for shard in self._shards)
        manifest = self.description.to_json() | {"records": records, "shards": self._shards}
        _write_json(self.directory / "manifest.json", manifest)


class FeatureStore(Sequence[FeatureRecord]):
    """Random access to the completed shards of a store; sees what the manifest named when it was opened.

    Args:
      directory: where a FeatureStoreWriter wrote.
      taps: the taps to return, in this order; all stored ones by default.
    """

    def __init__(self, directory: str | os.PathLike[str], *, taps: tuple[int, ...] | None = None):
        self.directory = Path(directory)
        manifest = _read_json(self.directory / "manifest.json")
        if (manifest["version"], manifest["dtype"]) != (VERSION, "bfloat16"):
            raise InputError(
                given=f"{self.directory}: version {manifest['version']}, dtype {manifest['dtype']}",
                expected=f"version {VERSION}, dtype bfloat16",
                fix="write the store again with this version of dspark_jax",
            )
        self.description = StoreDescription(
            identity=manifest["identity"],
            taps=tuple(manifest["taps"]),
            width=manifest["width"],
            template=manifest["template"],
        )
        self.shards: tuple[dict, ...] = tuple(manifest["shards"])
        self.taps = self.description.taps if taps is None else tuple(taps)
        self.require(taps=self.taps)
        rows = [self.description.taps.index(tap) for tap in self.taps]
        self._tap_rows = None if self.taps == self.description.taps else rows

        indices = [self._checked_index(shard) for shard in self.shards]
        self.ids: tuple[str, ...] = tuple(item for index in indices for item in index["ids"])
        self.domains: tuple[str, ...] = tuple(item for index in indices for item in index["domains"])
        self.lengths_tokens_np = np.asarray(
            [item for index in indices for item in index["lengths"]], np.int64
        )
        self._rows_np = np.arange(len(self.ids))
        # Naming the record range spares opening every shard just to count its records.
        paths = [f"{self._shard_path(shard)}[0:{shard['records']}]" for shard in self.shards]
        self._payloads = grain.sources.ArrayRecordDataSource(paths) if paths else ()

    def require(
        self, *, identity: str | None = None, taps: Iterable[int] = (), template: str | None = None
    ) -> None:
        """Refuses a store made by another target or template, or without these taps."""
        mine, problems = self.description, []
        if identity not in (None, mine.identity):
            problems.append(f"target {mine.identity!r} instead of {identity!r}")
        if template not in (None, mine.template):
            problems.append(f"template {mine.template!r} instead of {template!r}")
        if missing := [tap for tap in taps if tap not in mine.taps]:
            problems.append(f"taps {mine.taps}, without {missing}")
        if problems:
            raise InputError(
                given=f"{self.directory} holds features of " + "; ".join(problems),
                expected="features of the same target, template and layers as the training run",
                fix="write a new store for this run",
            )

    def select(self, keep: Callable[[str], bool]) -> FeatureStore:
        """A view of the records whose id satisfies `keep`, in the same order."""
        kept = [row for row, record_id in enumerate(self.ids) if keep(record_id)]
        view = copy.copy(self)
        view.ids = tuple(self.ids[row] for row in kept)
        view.domains = tuple(self.domains[row] for row in kept)
        view.lengths_tokens_np, view._rows_np = self.lengths_tokens_np[kept], self._rows_np[kept]
        return view

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index) -> FeatureRecord:
        row = int(self._rows_np[index])
        try:
            record = unpack_record(self._payloads[row])
        except (RuntimeError, ValueError) as error:  # ArrayRecord's own checksums, or a foreign record
            raise InputError(
                given=f"{self.directory}: record {self.ids[index]!r} is damaged ({error})",
                expected="the bytes that were written",
                fix="copy the store again, or delete it and write it again",
            ) from error
        if self._tap_rows is None:
            return record
        return dataclasses.replace(record, features_TCD_np=record.features_TCD_np[:, self._tap_rows])

    def _shard_path(self, shard: dict) -> Path:
        return self.directory / f"{shard['name']}.array_record"

    def _checked_index(self, shard: dict) -> dict:
        path = self._shard_path(shard)
        size_bytes = path.stat().st_size if path.exists() else 0
        index = _read_json(self.directory / f"{shard['name']}.index.json")
        if size_bytes != shard["bytes"] or len(index["ids"]) != shard["records"]:
            raise InputError(
                given=f"{path}: {size_bytes} bytes, {len(index['ids'])} records",
                expected=f"{shard['bytes']} bytes, {shard['records']} records, as the manifest says",
                fix="copy the store again, or delete it and write it again",
            )
        return index


def _write_json(path: Path, content: dict) -> None:
    with atomic_write(path, "w") as file:
        json.dump(content, file)


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise InputError(
            given=f"{path}: {error}",
            expected="a complete feature store",
            fix="check the directory, or write the store with `python -m dspark_jax cache-features`",
        ) from error
