"""Drafter checkpoints: Hugging Face directories in DeepSpec's format (spec section 9), with one addition.

`draft_to_target` (int32 [Vd], unknown to DeepSpec) holds the target ids of a reduced draft vocabulary.
A drafter that shares the target's embedding and LM head simply does not store them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import Array
from jax.typing import DTypeLike
from safetensors.numpy import save

from dspark_jax.checkpoints.hf_names import ParamSlot, flat_boxes, slots
from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write
from dspark_jax.drafters.config import RNN, Confidence, DSparkConfig, Gated, Markov, SequentialHead
from dspark_jax.drafters.contract import Params, SharedWeights
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.targets.families import decoder_config_from_hf

DRAFTER_NAMES = {
    "fc/kernel": "fc.weight",
    "hidden_norm/scale": "hidden_norm.weight",
    "final_norm/scale": "norm.weight",
    "head/w1": "markov_head.markov_w1.weight",
    "head/w2": "markov_head.markov_w2.weight",
    "head/gate_kernel": "markov_head.gate_proj.weight",
    "head/gate_bias": "markov_head.gate_proj.bias",
    "head/joint_kernel": "markov_head.joint_proj.weight",
    "head/joint_bias": "markov_head.joint_proj.bias",
    "confidence/kernel": "confidence_head.proj.weight",
    "confidence/bias": "confidence_head.proj.bias",
}
EMBEDDING, LM_HEAD, VOCABULARY = "embed_tokens.weight", "lm_head.weight", "draft_to_target"
HEAD_TYPES: dict[str, type] = {"vanilla": Markov, "gated": Gated, "rnn": RNN}
ARCHITECTURES = {"qwen3": "Qwen3DSparkModel", "llama": "LlamaDSparkModel"}
# Fields of config.json that describe the drafter; all others describe its layers as the target's config does.
OWN_FIELDS = frozenset(
    "block_size mask_token_id target_layer_ids num_target_layers num_anchors markov_rank markov_head_type"
    " enable_confidence_head confidence_head_with_markov draft_vocab_size".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedDrafter:
    """A drafter from a directory.

    Attributes:
      drafter: the pure functions.
      params: its parameters.
      draft_to_target_np: target ids of the draft vocabulary, or None for the whole one.
      embedding_VD: its own embedding table, or None when it shares the target's.
      head_DV: its own LM head, or None.
    """

    drafter: DSpark
    params: Params
    draft_to_target_np: np.ndarray | None
    embedding_VD: Array | None
    head_DV: Array | None

    def shared_weights(self, embedding_VD: Array, head_DV: Array) -> SharedWeights:
        """The embedding and LM head to draft with: its own where it has them, else the target's."""
        vocabulary = None if self.draft_to_target_np is None else jnp.asarray(self.draft_to_target_np)
        embedding = embedding_VD if self.embedding_VD is None else self.embedding_VD
        return SharedWeights.cut(embedding, head_DV if self.head_DV is None else self.head_DV, vocabulary)


def drafter_slots(drafter: DSpark) -> dict[str, ParamSlot]:
    """File name -> slot for every trained parameter."""
    flat = flat_boxes(jax.eval_shape(drafter.init, jax.random.key(0)))
    without_prefix = {path[path[0] == "backbone" :]: box for path, box in flat.items()}
    named = slots(traverse_util.unflatten_dict(without_prefix), DRAFTER_NAMES, "layers.")
    paths = {path[path[0] == "backbone" :]: path for path in flat}
    return {name: dataclasses.replace(slot, path=paths[slot.path]) for name, slot in named.items()}


def save_drafter(
    directory: Path,
    *,
    drafter: DSpark,
    params: Params,
    draft_to_target_np: np.ndarray | None,
    target_hf_config: Mapping[str, Any],
    num_anchors: int,
    dtype: DTypeLike = jnp.bfloat16,
) -> None:
    """Writes config.json and model.safetensors; each file appears whole or not at all.

    Args:
      directory: created when absent.
      drafter: the drafter.
      params: its parameters.
      draft_to_target_np: its reduced vocabulary, or None.
      target_hf_config: the target's config.json; all of its fields are kept.
      num_anchors: anchors per sequence in training, recorded as DeepSpec does.
      dtype: dtype in the file.
    """
    if problem := _mask_problem(drafter.config.mask_token, target_hf_config):
        raise InputError(
            given=problem, expected="a token that never occurs in text", fix="choose another one"
        )
    flat = traverse_util.flatten_dict(params)
    tensors = {}
    for name, slot in drafter_slots(drafter).items():
        array_np = np.asarray(flat[slot.path]).astype(dtype)
        tensors[name] = np.ascontiguousarray(array_np.T if slot.transpose else array_np)
    if draft_to_target_np is not None:
        tensors[VOCABULARY] = np.asarray(draft_to_target_np, np.int32)
    config = {
        **target_hf_config,
        **_own_fields(drafter.config, num_anchors),
        "architectures": [ARCHITECTURES[target_hf_config["model_type"]]],
        "num_target_layers": target_hf_config["num_hidden_layers"],
        "num_hidden_layers": drafter.config.num_layers,
        "tie_word_embeddings": False,
        "dtype": jnp.dtype(dtype).name,
    }
    if config.get("layer_types"):  # one entry per layer, or transformers refuses the file
        config["layer_types"] = config["layer_types"][:1] * drafter.config.num_layers
    with atomic_write(directory / "model.safetensors") as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    with atomic_write(directory / "config.json", "w") as file:
        json.dump(config, file, indent=2, sort_keys=True)


def _own_fields(config: DSparkConfig, num_anchors: int) -> dict[str, Any]:
    head_types = {cls: name for name, cls in HEAD_TYPES.items()}
    fields = {
        "block_size": config.block_len,
        "mask_token_id": config.mask_token,
        "target_layer_ids": list(config.taps),
        "num_anchors": num_anchors,
        "markov_rank": config.head.rank if config.head else 0,
        "markov_head_type": head_types[type(config.head)] if config.head else "vanilla",
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": bool(config.confidence and config.confidence.with_markov),
    }
    if config.vocab_size != config.target_vocab_size:
        fields["draft_vocab_size"] = config.vocab_size
    return fields


def load_drafter(path: str | Path, *, dtype: DTypeLike = jnp.float32) -> LoadedDrafter:
    """Reads a directory written by `save_drafter` or by DeepSpec.

    Raises:
      InputError: unknown fields, and unknown, missing or misshapen tensors, all at once.
    """
    source = SafetensorsDirectory(path)
    drafter = DSpark(_config(source.config), jnp.dtype(dtype))
    expected = drafter_slots(drafter)
    shapes = {name: slot.shape for name, slot in expected.items()}
    V, D = drafter.config.target_vocab_size, drafter.config.block.width
    optional = {EMBEDDING: (V, D), LM_HEAD: (V, D), VOCABULARY: (drafter.config.vocab_size,)}
    present = set(source.names())
    problems = [f"unknown {name}" for name in sorted(present - set(shapes) - set(optional))]
    problems += [f"missing {name}" for name in sorted(set(shapes) - present)]
    problems += [
        f"{name} of shape {source.shape(name)} instead of {shape}"
        for name, shape in {**shapes, **optional}.items()
        if name in present and tuple(source.shape(name)) != shape
    ]
    if drafter.config.vocab_size != V and VOCABULARY not in present:
        problems.append(f"draft_vocab_size without {VOCABULARY}")
    if VOCABULARY in present:
        ids_np = source.read(VOCABULARY)
        if len(np.unique(ids_np)) < ids_np.size or ids_np.min() < 0 or ids_np.max() >= V:
            problems.append(f"{VOCABULARY} with repeated ids or ids outside 0..{V - 1}")
    if problems:
        raise InputError(
            given=f"{path}: " + "; ".join(problems),
            expected="exactly the tensors that its config.json describes",
            fix="check that config.json and model.safetensors belong together",
        )

    def read(name: str, transpose: bool) -> Array:
        array_np = source.read(name)
        return jnp.asarray(np.ascontiguousarray(array_np.T if transpose else array_np), dtype)

    flat = {slot.path: read(name, slot.transpose) for name, slot in expected.items()}
    return LoadedDrafter(
        drafter=drafter,
        params=traverse_util.unflatten_dict(flat),
        draft_to_target_np=source.read(VOCABULARY) if VOCABULARY in present else None,
        embedding_VD=read(EMBEDDING, transpose=False) if EMBEDDING in present else None,
        head_DV=read(LM_HEAD, transpose=True) if LM_HEAD in present else None,
    )


def _mask_problem(mask_token: int | None, hf: Mapping[str, Any]) -> str | None:
    """Padding as mask token: other engines give it no embedding, or mask its rows out."""
    is_padding = mask_token is not None and mask_token == hf.get("pad_token_id")
    return f"mask_token_id {mask_token}, the padding id" if is_padding else None


def _config(hf: Mapping[str, Any]) -> DSparkConfig:
    known = set(ARCHITECTURES.values())
    if not set(hf.get("architectures") or []) <= known or "block_size" not in hf:
        raise InputError(
            given=f"architectures {hf.get('architectures')}",
            expected=f"a drafter: one of {sorted(known)}",
            fix="pass a drafter directory; for a target use --target",
        )
    needed = ["mask_token_id", "target_layer_ids", "markov_rank", "enable_confidence_head"]
    needed += ["confidence_head_with_markov"] if hf.get("enable_confidence_head") else []
    problems = [f"no field {name!r}" for name in needed if hf.get(name) is None]
    if hf.get("markov_rank") and hf.get("markov_head_type") not in HEAD_TYPES:
        problems.append(f"markov_head_type {hf.get('markov_head_type')!r}")
    if problem := _mask_problem(hf.get("mask_token_id"), hf):
        problems.append(problem)
    layers = None
    try:
        layers = decoder_config_from_hf({name: value for name, value in hf.items() if name not in OWN_FIELDS})
    except InputError as error:
        problems.append(error.given)
    if problems or layers is None:
        raise InputError(
            given="a drafter's config with " + ", ".join(problems),
            expected=f"DeepSpec's fields, and markov_head_type one of {sorted(HEAD_TYPES)}",
            fix="use a config.json as dspark_jax or DeepSpec writes it",
        )
    head: SequentialHead | None = None
    if hf["markov_rank"]:
        head = HEAD_TYPES[hf["markov_head_type"]](rank=hf["markov_rank"])
    confidence = None
    if hf["enable_confidence_head"]:
        confidence = Confidence(with_markov=hf["confidence_head_with_markov"])
    return DSparkConfig(
        target_vocab_size=layers.vocab_size,
        vocab_size=hf.get("draft_vocab_size") or layers.vocab_size,
        num_layers=layers.num_layers,
        block=layers.block,
        taps=tuple(hf["target_layer_ids"]),
        block_len=hf["block_size"],
        mask_token=hf["mask_token_id"],
        head=head,
        confidence=confidence,
    )
