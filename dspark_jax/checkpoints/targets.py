"""Loading a target: checkpoint tensors streamed one by one into a parameter tree."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dspark_jax.checkpoints.embedded import EMBEDDED_NAME, fetch_embedded_target
from dspark_jax.checkpoints.gguf_file import GGUFFile
from dspark_jax.checkpoints.hf_names import ParamSlot, hf_tensor_map, text_tensors
from dspark_jax.checkpoints.sources import SafetensorsDirectory, TensorSource
from dspark_jax.core.distributed import place
from dspark_jax.core.errors import InputError
from dspark_jax.core.sharding import param_sharding
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.families import decoder_config_from_hf, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    """A target ready to run.

    Attributes:
      config: dimensions of the decoder.
      params: nested dict of arrays for the decoder's `apply`.
      tokenizer: with the chat template inside.
      identity: short hash of the checkpoint; calibrations and caches belong to it.
      eos_ids: tokens that end a response.
      generation: the fields of generation_config.json (recommended sampling among them), or {}.
      hf_config: the fields of config.json, which an exported drafter repeats.
    """

    config: DecoderConfig
    params: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast
    identity: str
    eos_ids: tuple[int, ...]
    generation: dict[str, Any]
    hf_config: dict[str, Any]


def load_target(
    name_or_path: str | Path, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> LoadedTarget:
    """Loads a target by name, path or hub id.

    Args:
      name_or_path: "smollm2-135m" (the embedded default), a .gguf file, a Hugging Face directory or a hub id.
      dtype: dtype of all parameters.
      mesh: where the parameters live, each on its own sharding; the default device when None.

    Raises:
      InputError: the checkpoint is incomplete, or holds something that is not understood.
    """
    source = open_source(name_or_path)
    config, params = read_params(source, dtype=dtype, mesh=mesh)
    generation = source.generation()
    tokenizer = source.tokenizer()
    return LoadedTarget(
        config=config,
        params=params,
        tokenizer=tokenizer,
        identity=source.identity(),
        eos_ids=_eos_ids(generation, text_config(source.config), tokenizer),
        generation=generation,
        hf_config=dict(source.config),
    )


def open_source(name_or_path: str | Path) -> TensorSource:
    """Finds the checkpoint behind a name, path or hub id, without reading its tensors."""
    if name_or_path == EMBEDDED_NAME:
        return GGUFFile(fetch_embedded_target())
    if str(name_or_path).endswith(".gguf"):
        return GGUFFile(name_or_path)
    return SafetensorsDirectory(name_or_path)


def read_params(
    source: TensorSource, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> tuple[DecoderConfig, dict[str, Any]]:
    """Streams every parameter of a source to its place; the host holds one at a time.

    Returns:
      The decoder's config and its parameters: nested dicts, kernels [in, out].

    Raises:
      InputError: lists all unknown, missing and misshapen tensors at once.
    """
    config = decoder_config_from_hf(source.config)
    slots = hf_tensor_map(config)
    present = text_tensors(source.names())
    _check_names(source, slots, present)
    names_of: dict[tuple[str, ...], list[str]] = {}
    for name, slot in slots.items():
        names_of.setdefault(slot.path, []).append(name)
    flat = {}
    for path, names in names_of.items():
        slot = slots[names[0]]
        parts = [slots[name].from_file(source.read(present[name])).astype(dtype) for name in names]
        value_np = parts[0] if slot.expert is None else np.stack(parts)
        sharding = None if mesh is None else param_sharding(mesh, slot.axes, value_np.shape)
        flat[path] = jax.device_put(value_np) if sharding is None else place(value_np, sharding)
    return config, traverse_util.unflatten_dict(flat)


def _check_names(source: TensorSource, slots: dict[str, ParamSlot], present: dict[str, str]) -> None:
    names = set(present)
    if _LM_HEAD in names and _LM_HEAD not in slots:
        names.remove(_LM_HEAD)
        own_head = source.read(present[_LM_HEAD])
        if _EMBEDDING in names and not np.array_equal(own_head, source.read(present[_EMBEDDING])):
            raise InputError(
                given=f"a config with tied embeddings, but {_LM_HEAD} differs from {_EMBEDDING}",
                expected="equal tensors, or an untied config",
                fix="set tie_word_embeddings to false in config.json if the model has its own LM head",
            )
    shapes = {name: tuple(source.shape(present[name])) for name in sorted(names)}
    problems = [
        f"unknown tensor {present[name]} {list(shape)}" for name, shape in shapes.items() if name not in slots
    ]
    problems += [f"missing tensor {name} {list(slots[name].shape)}" for name in sorted(slots.keys() - names)]
    problems += [
        f"{present[name]} has shape {list(shapes[name])} instead of {list(slot.shape)}"
        for name, slot in slots.items()
        if name in names and shapes[name] != tuple(slot.shape)
    ]
    if problems:
        raise InputError(
            given="; ".join(problems),
            expected=f"exactly the {len(slots)} tensors that the config describes",
            fix="use config.json and weights of one and the same model; quantised exports are not read",
        )


def _eos_ids(
    generation: dict[str, Any], config: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> tuple[int, ...]:
    """End-of-response ids; the generation config knows best (a chat model often has several)."""
    candidates: tuple[Any, ...] = (
        generation.get("eos_token_id"),
        config.get("eos_token_id"),
        tokenizer.eos_token_id,
    )
    given = next((ids for ids in candidates if ids is not None), ())
    return (given,) if isinstance(given, int) else tuple(given)
