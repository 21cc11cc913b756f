"""Drafter directories from one format into another; tensors are copied bit by bit."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.drafter import EMBEDDING, LM_HEAD, VOCABULARY, checked_config, write_config
from dspark_jax.checkpoints.drafter_formats import LAYOUT, with_lifted_dflash
from dspark_jax.checkpoints.hf_names import hf_tensor_map, text_tensors
from dspark_jax.checkpoints.safetensors_files import MAX_SHARD_BYTES, Tensors, write_tensors
from dspark_jax.checkpoints.sources import SafetensorsDirectory, TensorSource
from dspark_jax.checkpoints.speculators_format import speculators_config, speculators_tensors
from dspark_jax.core.errors import InputError
from dspark_jax.drafters.config import DSparkConfig, Eagle3Config, Layout
from dspark_jax.drafters.registry import DrafterConfig
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.families import decoder_config_from_hf

DEEPSPEC_FAMILIES = ("qwen3", "gemma4_text", "gemma4_unified_text")


class Format(enum.StrEnum):
    """What a directory is written for."""

    DSPARK_JAX = "dspark_jax"
    """DeepSpec's format without copies of the target's tensors, its layout named."""
    DEEPSPEC = "deepspec"
    """DeepSpec's format with embedding and LM head, as DeepSpec releases drafters."""
    SPECULATORS = "speculators"
    """The format of the `speculators` project."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion found.

    Attributes:
      config: the drafter.
      shared: tensors among embedding and LM head that are the target's.
      own: those of the drafter's own.
      dtype: dtype of the weights in the output.
    """

    config: DrafterConfig
    shared: tuple[str, ...]
    own: tuple[str, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterFiles:
    """A drafter directory that was read and checked, and what it shares with its target.

    Attributes:
      config: the drafter.
      fields: its config.json, in DeepSpec's terms and with its layout named.
      source: its tensors.
      target: the target's tensors under the drafter's names, and its dimensions.
      shared: those of them that the drafter uses as they are.
      own: the drafter's own tensors in their place.
    """

    config: DrafterConfig
    fields: dict[str, Any]
    source: SafetensorsDirectory
    target: TargetTensors
    shared: tuple[str, ...]
    own: tuple[str, ...]

    def tensors(self, dtype: np.dtype) -> Tensors:
        """Everything that is the drafter's own; floating-point numbers in `dtype`."""
        given_away = set(self.shared)

        def read(name: str) -> np.ndarray:
            array_np = self.source.read(name)
            return array_np if name == VOCABULARY else array_np.astype(dtype)

        return {name: functools.partial(read, name) for name in self.source.names() if name not in given_away}


class TargetTensors:
    """Embedding and LM head of a target under the names that they have in a drafter's file.

    Args:
      source: the target's checkpoint.
      name: how the user calls it.
    """

    def __init__(self, source: TensorSource, name: str):
        self.name = name
        self.hf_config: Mapping[str, Any] = source.config
        self.config: DecoderConfig = decoder_config_from_hf(source.config)
        self._source = source
        by_path = {slot.path: file_name for file_name, slot in hf_tensor_map(self.config).items()}
        embedding = by_path[("embedding",)]
        self._names = {EMBEDDING: embedding, LM_HEAD: by_path.get(("lm_head", "kernel"), embedding)}
        self._present = text_tensors(source.names())

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The tensor [V, D] in `dtype`."""
        return self._source.read(self._present[self._names[name]]).astype(dtype)


def convert(
    source: SafetensorsDirectory,
    output: Path,
    *,
    to: Format,
    target: TargetTensors,
    layout: Layout | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Converted:
    """Writes a drafter directory in another format.

    Args:
      source: a directory of dspark_jax, DeepSpec or the original DFlash.
      output: a directory that does not exist yet, or is empty.
      to: format to write.
      target: the drafter's target, with which embedding and LM head are compared.
      layout: the layout of the source where its config.json does not name one; None: that of its class.
      dtype: dtype of the weights in the output; None: as they are.
      max_shard_bytes: above this size the weights are written as shards with an index.

    Raises:
      InputError: the source is not understood, or the format cannot hold it; lists everything at once.
    """
    if output.exists() and any(output.iterdir()):
        raise InputError(
            given=f"{output}, which is not empty", expected="a new directory", fix="choose another one"
        )
    files = read_files(source, target, layout)
    stored = files.source.read(next(name for name in source.names() if name != VOCABULARY)).dtype
    wanted = stored if dtype is None else jnp.dtype(dtype)
    tensors = dict(files.tensors(wanted))
    config: dict[str, Any] = {**files.fields, "dtype": wanted.name}
    match to:
        case Format.DEEPSPEC:
            _refuse(to, _not_in_deepspec(files))
            tensors |= {name: functools.partial(target.read, name, wanted) for name in files.shared}
        case Format.SPECULATORS:
            config, problems = speculators_config(files.config, config, target)
            problems += [f"an own {name}" for name in files.own]
            _refuse(to, problems)
            tensors = speculators_tensors(files.config, tensors, lambda: target.read(LM_HEAD, wanted))
    write_tensors(output, tensors, max_shard_bytes=max_shard_bytes)
    write_config(output, config)
    return Converted(config=files.config, shared=files.shared, own=files.own, dtype=wanted.name)


def read_files(source: SafetensorsDirectory, target: TargetTensors, layout: Layout | None) -> DrafterFiles:
    """Reads and checks a directory, and compares it with its target.

    Raises:
      InputError: it is not understood, or belongs to another target; lists everything at once.
    """
    source.config = _with_layout(with_lifted_dflash(source.config), layout)
    config = checked_config(source)
    problems = []
    for what, ours, theirs in (
        ("vocabulary", config.target_vocab_size, target.config.vocab_size),
        ("width", config.block.width, target.config.block.width),
        ("num_target_layers", source.config.get("num_target_layers"), target.config.num_layers),
    ):
        if ours not in (None, theirs):
            problems.append(f"{what} {ours} instead of {theirs}")
    if max(config.taps) >= target.config.num_layers:
        problems.append(
            f"target_layer_ids {list(config.taps)} of a target with {target.config.num_layers} layers"
        )
    if problems:
        raise InputError(
            given=f"{source.path}, a drafter with " + ", ".join(problems),
            expected=f"what the target {target.name} has",
            fix="pass the target that this drafter was trained for",
        )
    present = [name for name in (EMBEDDING, LM_HEAD) if name in source.names()]
    stored = {name: source.read(name) for name in present}
    own = tuple(
        name for name, array in stored.items() if not np.array_equal(array, target.read(name, array.dtype))
    )
    return DrafterFiles(
        config=config,
        fields={**source.config, "num_target_layers": target.config.num_layers},
        source=source,
        target=target,
        shared=tuple(name for name in (EMBEDDING, LM_HEAD) if name not in own),
        own=own,
    )


def _with_layout(fields: Mapping[str, Any], layout: Layout | None) -> dict[str, Any]:
    """Names the layout in config.json: as the user says, else as the class has it."""
    named = fields.get(LAYOUT)
    has_layout = "block_size" in fields and isinstance(named, bool | None)
    if not has_layout and layout is None:
        return dict(fields)  # of a class without layouts, or refused later with everything else
    wanted = named is not False if layout is None else layout is Layout.ANCHOR_FIRST
    if not has_layout or named not in (None, wanted):
        raise InputError(
            given=f"--layout {layout} for {fields.get('architectures')} with {LAYOUT} {named}",
            expected="the layout that the checkpoint names",
            fix="leave --layout out, or correct config.json if you know that it is wrong",
        )
    return {**fields, LAYOUT: wanted}


def _not_in_deepspec(files: DrafterFiles) -> list[str]:
    problems = []
    if not isinstance(files.config, DSparkConfig | Eagle3Config):
        problems.append(f"a drafter of class {files.fields['architectures'][0]}")
    if files.fields["model_type"] not in DEEPSPEC_FAMILIES:
        problems.append(f"layers of family {files.fields['model_type']}")
    if files.config.vocab_size != files.config.target_vocab_size:
        problems.append("a reduced draft vocabulary")
    if isinstance(files.config, DSparkConfig) and files.config.layout is Layout.FILL_IN:
        problems.append("the fill-in layout")
    return problems


def _refuse(to: Format, problems: list[str]) -> None:
    if problems:
        raise InputError(
            given=", ".join(problems),
            expected=f"what the format {to} can hold (docs/checkpoints.md)",
            fix="keep the drafter in another format",
        )
