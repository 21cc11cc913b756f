"""Feature caches of DeepSpec (`manifest.json` version 2) as a training source, read where they lie.

A cache is `manifest.json`, `samples.idx` with one fixed-size record per sequence, and shards of raw arrays.
All arrays of a record are read-only views of memory-mapped shards: what is not used is never read.

It holds bfloat16 features and final-normed hidden states, and no normalisers: these are computed from the
hidden states where they are needed. It names its target by a path only, so nothing here can tell whether the
features are really this target's: `training/cached_features.py` runs the target on one sequence and compares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.data.feature_record import FeatureRecord
from dspark_jax.data.sources import Example

INDEX, MANIFEST, VERSION = "samples.idx", "manifest.json", 2
# Offsets of the arrays in their shard, in this order in the index, with bytes per token.
ARRAYS = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states")
RECORD = np.dtype(
    [("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4"), *((name, "<u8") for name in ARRAYS)]
)
DOMAIN = "deepspec"


def is_deepspec_cache(path: Path) -> bool:
    """Whether a feature store is one of DeepSpec's."""
    return (path / INDEX).exists()


class DeepSpecCache(Sequence[FeatureRecord]):
    """Random access to the sequences of a cache.

    Args:
      directory: of the cache.
      taps: the taps to return, in this order; all stored ones by default.

    Attributes:
      ids: the sample ids as text, which is what the order of a training run depends on.
      domains: the same for all records; the cache knows none.
      lengths_tokens_np: tokens of every record, padding included.
      width: D.
      target_name: what DeepSpec called the target, or None.
    """

    def __init__(self, directory: str | os.PathLike[str], *, taps: tuple[int, ...] | None = None):
        self.directory = Path(directory)
        manifest = self._manifest()
        stored = tuple(manifest["target_layer_ids"])
        self.width: int = manifest["hidden_size"]
        self.target_name: str | None = manifest.get("target_model_name_or_path")
        self.taps = stored if taps is None else tuple(taps)
        self._num_taps = len(stored)
        self._shards: list[str] = [shard["file_name"] for shard in manifest["shards"]]
        self._maps: dict[int, np.ndarray] = {}
        self._index: np.ndarray = np.zeros(0, RECORD)
        if manifest["num_samples"]:  # an empty file cannot be mapped
            self._index = np.memmap(self.directory / INDEX, RECORD, mode="r")
        if missing := [tap for tap in self.taps if tap not in stored]:
            self._refuse([f"taps {stored}, without {missing}"])
        self._tap_rows = None if self.taps == stored else [stored.index(tap) for tap in self.taps]
        self._check_extent()
        self.ids: tuple[str, ...] = tuple(str(sample_id) for sample_id in self._index["sample_id"])
        self.domains: tuple[str, ...] = (DOMAIN,) * len(self.ids)
        self.lengths_tokens_np = self._index["seq_len"].astype(np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index) -> FeatureRecord:
        entry = self._index[int(index)]
        T, C, D = int(entry["seq_len"]), self._num_taps, self.width
        shard = self._shard(int(entry["shard_id"]))

        def view(name: str, dtype, *shape: int) -> np.ndarray:
            start = int(entry[name])
            size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return shard[start : start + size_bytes].view(dtype).reshape(shape)

        kept = self._unpadded(view("attention_mask", np.uint8, T), str(entry["sample_id"]))
        features = view("target_hidden_states", ml_dtypes.bfloat16, T, C, D)[:kept]
        example = Example(
            id=str(entry["sample_id"]),
            domain=DOMAIN,
            tokens_np=view("input_ids", "<i4", T)[:kept],
            loss_mask_np=view("loss_mask", np.uint8, T)[:kept].view(np.bool_),
        )
        return FeatureRecord(
            example,
            features if self._tap_rows is None else features[:, self._tap_rows],
            view("target_last_hidden_states", ml_dtypes.bfloat16, T, D)[:kept],
            None,
        )

    def examples(self) -> list[Example]:
        """Tokens and loss masks of all records; reads nothing of the features."""
        return [record.example for record in self]

    def _unpadded(self, attended_T: np.ndarray, sample_id: str) -> int:
        """Tokens before the padding, which must stand at the end: our positions start at the first token."""
        kept = int(attended_T.sum())
        if not attended_T[:kept].all():
            self._refuse([f"sample {sample_id} with padding before its tokens"])
        return kept

    def _shard(self, number: int) -> np.ndarray:
        if number not in self._maps:
            self._maps[number] = np.memmap(self.directory / self._shards[number], np.uint8, mode="r")
        return self._maps[number]

    def _manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads((self.directory / MANIFEST).read_text())
        except (FileNotFoundError, json.JSONDecodeError) as error:
            raise InputError(
                given=f"{self.directory / MANIFEST}: {error}",
                expected="a feature cache of DeepSpec",
                fix="check the directory",
            ) from error
        needed = ("version", "num_samples", "target_layer_ids", "hidden_size", "shards")
        problems = [f"no field {name!r} in {MANIFEST}" for name in needed if name not in manifest]
        as_we_read = {
            "version": VERSION,
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": RECORD.itemsize,
        }
        problems += [
            f"{name} {manifest[name]!r} instead of {value!r}"
            for name, value in as_we_read.items()
            if manifest.get(name, value) != value
        ]
        index = self.directory / INDEX
        if not problems and index.stat().st_size != manifest["num_samples"] * RECORD.itemsize:
            problems.append(f"{INDEX} of {index.stat().st_size} bytes for {manifest['num_samples']} samples")
        self._refuse(problems)
        return manifest

    def _check_extent(self) -> None:
        """Every array of every record lies inside its shard."""
        if not len(self._index):
            return
        paths = [self.directory / name for name in self._shards]
        problems = [f"no {path.name}" for path in paths if not path.exists()]
        shard_ids_np = np.asarray(self._index["shard_id"])
        if shard_ids_np.max() >= len(paths):
            problems.append(f"samples of shard {shard_ids_np.max()}, and {len(paths)} shards")
        self._refuse(problems)
        sizes_np = np.asarray([path.stat().st_size for path in paths], np.uint64)[shard_ids_np]
        per_token = (4, 1, 1, 2 * self._num_taps * self.width, 2 * self.width)
        lengths_np = self._index["seq_len"].astype(np.uint64)
        for name, size_bytes in zip(ARRAYS, per_token, strict=True):
            outside = np.flatnonzero(self._index[name] + lengths_np * np.uint64(size_bytes) > sizes_np)
            if outside.size:
                sample = self._index["sample_id"][outside[0]]
                problems.append(
                    f"{name} of {outside.size} samples (first: {sample}) beyond the end of their shard"
                )
        self._refuse(problems)

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            raise InputError(
                given=f"{self.directory} with " + "; ".join(problems),
                expected=f"a feature cache of DeepSpec, version {VERSION}, bfloat16, with the drafter's taps",
                fix="copy the cache again, or train with the target online (no --feature-store)",
            )
