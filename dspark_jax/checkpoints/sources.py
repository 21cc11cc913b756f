"""Where the tensors of a target come from: one protocol, and Hugging Face directories."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from safetensors import safe_open

from dspark_jax.checkpoints.tap_sketches import SKETCHES
from dspark_jax.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD_BYTES = 4096  # of every tensor, in its identity


class TensorSource(Protocol):
    """A checkpoint in Hugging Face terms, read tensor by tensor."""

    path: Path
    """The file or directory that it is read from."""
    config: dict[str, Any]
    """The fields of config.json."""

    def names(self) -> tuple[str, ...]:
        """HF names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape, without reading the tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in HF orientation ([out, in]) and HF RoPE layout."""
        ...

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, with the chat template inside."""
        ...

    def generation(self) -> dict[str, Any]:
        """The fields of generation_config.json, or {}."""
        ...

    def identity(self) -> str:
        """A short stable hash of the config and of the beginning of every tensor's bytes."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
    """Where a tensor lies: file, shape, and its byte range in the file."""

    file: Path
    shape: tuple[int, ...]
    start_bytes: int
    end_bytes: int


class SafetensorsDirectory:
    """A Hugging Face directory: config.json and one or several safetensors files.

    Args:
      name_or_path: a local directory, or a hub id ("owner/model") that is fetched first.
    """

    def __init__(self, name_or_path: str | Path):
        self.path = _local_directory(name_or_path)
        self.config: dict[str, Any] = self._json("config.json")
        self._stored = self._find_tensors()

    def names(self) -> tuple[str, ...]:
        """HF names of all tensors."""
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape, from the file's header."""
        return self._stored[name].shape

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype; bfloat16 is `ml_dtypes.bfloat16`."""
        with safe_open(self._stored[name].file, framework="numpy") as file:
            return file.get_tensor(name)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The directory's own tokenizer, exactly as its tokenizer.json says."""
        if not (self.path / "tokenizer.json").exists():
            raise InputError(
                given=f"{self.path} has no tokenizer.json",
                expected="a fast tokenizer beside the weights",
                fix="copy the model's tokenizer.json and tokenizer_config.json there; for an older format "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...) writes them",
            )
        from transformers import PreTrainedTokenizerFast

        # Not AutoTokenizer: a family's class may rebuild the tokenizer from the vocabulary in its own way.
        return PreTrainedTokenizerFast.from_pretrained(self.path, local_files_only=True)

    def generation(self) -> dict[str, Any]:
        """The fields of generation_config.json, or {}."""
        present = (self.path / "generation_config.json").exists()
        return self._json("generation_config.json") if present else {}

    def identity(self) -> str:
        """A short stable hash of the config and of the beginning of every tensor's bytes."""
        return self._identity

    @functools.cached_property
    def _identity(self) -> str:
        config = {name: value for name, value in self.config.items() if name != SKETCHES}  # about the target
        return fingerprint(config, ((name, self.shape(name), self._head(name)) for name in self.names()))

    def _head(self, name: str) -> bytes:
        stored = self._stored[name]
        with open(stored.file, "rb") as stream:
            stream.seek(stored.start_bytes)
            return stream.read(min(stored.end_bytes - stored.start_bytes, HEAD_BYTES))

    def _json(self, name: str) -> dict[str, Any]:
        self._require([name])
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(
                given=f"{self.path / name}: {error}", expected="JSON", fix="download the file again"
            ) from error

    def _find_tensors(self) -> dict[str, _Stored]:
        """Locates every tensor, and checks that the index and the files agree."""
        if not (self.path / INDEX).exists():
            self._require([SINGLE])
            return _read_header(self.path / SINGLE)
        indexed: dict[str, str] = self._json(INDEX)["weight_map"]
        shards = sorted(set(indexed.values()))
        self._require(shards)
        found = {shard: _read_header(self.path / shard) for shard in shards}
        problems = [
            f"{name} is indexed in {shard} but not there"
            for name, shard in indexed.items()
            if name not in found[shard]
        ]
        problems += [
            f"{name} of {shard} is not in the index"
            for shard, tensors in found.items()
            for name in tensors
            if indexed.get(name) != shard
        ]
        if problems:
            raise InputError(
                given=f"{self.path}: {'; '.join(problems)}",
                expected=f"{INDEX} and the shards to agree",
                fix="download the index and all shards of one revision again",
            )
        return {name: found[shard][name] for name, shard in indexed.items()}

    def _require(self, files: list[str]) -> None:
        missing = [name for name in files if not (self.path / name).exists()]
        if missing:
            raise InputError(
                given=f"{self.path} lacks {', '.join(missing)}",
                expected=f"config.json and {SINGLE}, or {INDEX} with all its shards",
                fix="download the missing files (pickled .bin weights are not read)",
            )


def _read_header(file: Path) -> dict[str, _Stored]:
    """The tensors of a safetensors file: 8 bytes of length, a JSON directory, then the data."""
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            directory = json.loads(stream.read(length))
            size = stream.seek(0, os.SEEK_END)
    except (ValueError, OverflowError, MemoryError) as error:
        raise InputError(
            given=f"{file} does not begin with a safetensors header ({error})",
            expected="a safetensors file",
            fix="download the file again (a Git LFS pointer is a text file of some hundred bytes)",
        ) from error
    tensors = {
        name: _Stored(
            file=file,
            shape=tuple(entry["shape"]),
            start_bytes=8 + length + entry["data_offsets"][0],
            end_bytes=8 + length + entry["data_offsets"][1],
        )
        for name, entry in directory.items()
        if name != "__metadata__"
    }
    end_bytes = max((stored.end_bytes for stored in tensors.values()), default=0)
    if end_bytes > size:
        raise InputError(
            given=f"{file} has {size} bytes",
            expected=f"{end_bytes} bytes, as its header says",
            fix="the file is cut off: download it again",
        )
    return tensors


def fingerprint(config: dict[str, Any], heads: Iterable[tuple[str, tuple[int, ...], bytes]]) -> str:
    """Sixteen hex digits over a config and (name, shape, first bytes) of every tensor, in any order."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, shape, head in sorted(heads):
        digest.update(f"{name}{list(shape)}".encode())
        digest.update(head)
    return digest.hexdigest()[:16]


def _local_directory(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(
            given=f"{path} is not a directory",
            expected="a Hugging Face model directory, or a .gguf file",
            fix="give the directory that holds config.json",
        )
    import huggingface_hub

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(str(name_or_path), allow_patterns=wanted))
    except Exception as error:  # the hub client raises its own, requests' and the file system's errors
        raise InputError(
            given=f"{name_or_path}: no such local path, and the hub says {type(error).__name__}: {error}",
            expected="a local directory, a .gguf file, or a hub id that can be fetched or is cached",
            fix="check the spelling; offline, download the model elsewhere and give its directory",
        ) from error
