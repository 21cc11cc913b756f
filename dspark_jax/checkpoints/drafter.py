"""Drafter checkpoints: Hugging Face directories in DeepSpec's format (spec section 9), with two additions.

`draft_to_target` (int32 [Vd], unknown to DeepSpec) holds the target ids of a reduced draft vocabulary, and
the field `sample_from_anchor` of config.json names the layout. A drafter that shares the target's embedding
and LM head simply does not store them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dspark_jax.checkpoints.drafter_formats import (
    TEMPLATE,
    architecture,
    format_of,
    mask_problem,
    own_fields,
    read_config,
)
from dspark_jax.checkpoints.hf_names import ParamSlot, flat_boxes, slots
from dspark_jax.checkpoints.safetensors_files import MAX_SHARD_BYTES, write_tensors
from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.checkpoints.tap_sketches import SKETCHES
from dspark_jax.core.distributed import place
from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write
from dspark_jax.core.sharding import param_sharding, serving_axes
from dspark_jax.drafters.contract import Drafter, Params, SharedWeights
from dspark_jax.drafters.registry import DrafterConfig, make_drafter
from dspark_jax.nn.config import TokenScaling
from dspark_jax.targets.families import like_the_last_layer, text_config

EMBEDDING, LM_HEAD, VOCABULARY = "embed_tokens.weight", "lm_head.weight", "draft_to_target"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedDrafter:
    """A drafter from a directory.

    Attributes:
      drafter: the pure functions.
      params: its parameters.
      draft_to_target_np: target ids of the draft vocabulary, or None for the whole one.
      embedding_VD: its own embedding table, or None when it shares the target's.
      head_DV: its own LM head, or None.
      template: name of the chat template that it was trained on, in its mode; None where the file does not
        say it.
      tap_sketches_CS: sketches of what its taps read in training, or None.
    """

    drafter: Drafter
    params: Params
    draft_to_target_np: np.ndarray | None
    embedding_VD: Array | None
    head_DV: Array | None
    template: str | None = None
    tap_sketches_CS: np.ndarray | None = None

    def shared_weights(self, embedding_VD: Array, head_DV: Array, scaling: TokenScaling) -> SharedWeights:
        """The embedding and LM head to draft with: its own where it has them, else the target's."""
        vocabulary = None if self.draft_to_target_np is None else jnp.asarray(self.draft_to_target_np)
        embedding = embedding_VD if self.embedding_VD is None else self.embedding_VD
        head = head_DV if self.head_DV is None else self.head_DV
        return SharedWeights.cut(embedding, head, vocabulary, scaling)


def drafter_slots(drafter: Drafter) -> dict[str, ParamSlot]:
    """File name -> slot for every trained parameter."""
    flat = flat_boxes(jax.eval_shape(drafter.init, jax.random.key(0)))
    without_prefix = {path[path[0] == "backbone" :]: box for path, box in flat.items()}
    names: Any = format_of(drafter.config).names
    named = slots(traverse_util.unflatten_dict(without_prefix), names, "layers.")
    paths = {path[path[0] == "backbone" :]: path for path in flat}
    return {name: dataclasses.replace(slot, path=paths[slot.path]) for name, slot in named.items()}


def save_drafter(
    directory: Path,
    *,
    drafter: Drafter,
    params: Params,
    draft_to_target_np: np.ndarray | None,
    target_hf_config: Mapping[str, Any],
    num_anchors: int,
    template: str | None = None,
    tap_sketches_CS: np.ndarray | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes config.json and the weights; each file appears whole or not at all.

    Args:
      directory: created when absent.
      drafter: the drafter.
      params: its parameters.
      draft_to_target_np: its reduced vocabulary, or None.
      target_hf_config: the target's config.json; all of its fields are kept.
      num_anchors: anchors per sequence in training, recorded as DeepSpec does.
      template: name of the chat template that rendered its training data, or None if unknown.
      tap_sketches_CS: sketches of what its taps read in training (`tap_sketches.py`), or None if unknown.
      dtype: dtype in the file.
      max_shard_bytes: above this size the weights are written as shards with an index.
    """
    of_target = text_config(target_hf_config)
    own = {**own_fields(drafter.config), "num_anchors": num_anchors}
    own |= {} if template is None else {TEMPLATE: template}
    own |= {} if tap_sketches_CS is None else {SKETCHES: tap_sketches_CS.tolist()}
    if problem := mask_problem(own.get("mask_token_id"), of_target):
        raise InputError(
            given=problem, expected="a token that never occurs in text", fix="choose another one"
        )
    of_layers = like_the_last_layer(of_target, drafter.config.num_layers)
    flat = traverse_util.flatten_dict(params)

    def tensor(slot: ParamSlot) -> np.ndarray:
        return slot.to_file(np.asarray(flat[slot.path]).astype(dtype))

    tensors = {name: functools.partial(tensor, slot) for name, slot in drafter_slots(drafter).items()}
    if draft_to_target_np is not None:
        tensors[VOCABULARY] = functools.partial(np.asarray, draft_to_target_np, np.int32)
    config = {
        **of_layers,
        **own,
        "architectures": [architecture(format_of(drafter.config), of_layers["model_type"])],
        "num_target_layers": of_target["num_hidden_layers"],
        "tie_word_embeddings": False,
        "dtype": jnp.dtype(dtype).name,
    }
    write_tensors(directory, tensors, max_shard_bytes=max_shard_bytes)
    write_config(directory, config)


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Writes config.json."""
    with atomic_write(directory / "config.json", "w") as file:
        json.dump(config, file, indent=2, sort_keys=True)


def load_drafter(
    path: str | Path, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> LoadedDrafter:
    """Reads a directory written by `save_drafter`, by DeepSpec or by the original DFlash.

    Args:
      path: the directory.
      dtype: dtype of all parameters.
      mesh: where they live, each as serving cuts it; the default device when None.

    Raises:
      InputError: unknown fields, and unknown, missing or misshapen tensors, all at once.
    """
    source = SafetensorsDirectory(path)
    drafter = make_drafter(checked_config(source), jnp.dtype(dtype))
    present = source.names()

    def placed(value_np: np.ndarray, axes: tuple[str | None, ...]) -> Array:
        value_np = value_np.astype(dtype)
        if mesh is None:
            return jax.device_put(value_np)
        return place(value_np, param_sharding(mesh, serving_axes(axes), value_np.shape))

    def shared_table(name: str) -> Array | None:
        return placed(source.read(name), ("vocab", "embed")) if name in present else None

    flat = {
        slot.path: placed(slot.from_file(source.read(name)), slot.axes)
        for name, slot in drafter_slots(drafter).items()
    }
    sketches, head_VD = source.config.get(SKETCHES), shared_table(LM_HEAD)
    return LoadedDrafter(
        drafter=drafter,
        params=traverse_util.unflatten_dict(flat),
        draft_to_target_np=source.read(VOCABULARY) if VOCABULARY in present else None,
        embedding_VD=shared_table(EMBEDDING),
        head_DV=None if head_VD is None else head_VD.T,
        template=source.config.get(TEMPLATE),
        tap_sketches_CS=None if sketches is None else np.asarray(sketches),
    )


def checked_config(source: SafetensorsDirectory) -> DrafterConfig:
    """The drafter that a directory holds, once its fields and tensors are known to be right.

    Raises:
      InputError: lists everything that is not as config.json says, or not understood.
    """
    config, problems = read_config(source.config)
    if config is not None:
        problems += _tensor_problems(source, config)
    if problems or config is None:
        raise InputError(
            given=f"{source.path}: " + "; ".join(problems),
            expected="known fields, and exactly the tensors that they describe",
            fix="check that config.json and the weights belong together and were written by dspark_jax, "
            "DeepSpec or DFlash",
        )
    return config


def _tensor_problems(source: SafetensorsDirectory, config: DrafterConfig) -> list[str]:
    needed = {name: slot.shape for name, slot in drafter_slots(make_drafter(config)).items()}
    V, D = config.target_vocab_size, config.block.width
    optional = {EMBEDDING: (V, D), LM_HEAD: (V, D), VOCABULARY: (config.vocab_size,)}
    present = set(source.names())
    problems = [f"unknown tensor {name}" for name in sorted(present - set(needed) - set(optional))]
    problems += [f"missing tensor {name}" for name in sorted(set(needed) - present)]
    problems += [
        f"{name} of shape {source.shape(name)} instead of {shape}"
        for name, shape in {**needed, **optional}.items()
        if name in present and tuple(source.shape(name)) != shape
    ]
    if config.vocab_size != V and VOCABULARY not in present:
        problems.append(f"draft_vocab_size without {VOCABULARY}")
    if VOCABULARY in present:
        ids_np = source.read(VOCABULARY)
        if len(np.unique(ids_np)) < ids_np.size or ids_np.min() < 0 or ids_np.max() >= V:
            problems.append(f"{VOCABULARY} with repeated ids or ids outside 0..{V - 1}")
    return problems
