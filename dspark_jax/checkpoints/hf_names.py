"""Hugging Face tensor names and orientations against our parameter trees, once for both directions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dspark_jax.core.errors import InputError
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.decoder import Decoder

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSlot:
    """Where one tensor of a file goes.

    Attributes:
      path: keys into the nested parameter dict.
      transpose: files keep matrices [out, in], we keep them [in, out].
      shape: shape in the file.
      axes: logical axes of our (already transposed) parameter.
      expert: which expert's matrix the tensor is, in a parameter that stacks those of all; None: the whole.
    """

    path: Path
    transpose: bool
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    expert: int | None = None

    def from_file(self, tensor_np: np.ndarray) -> np.ndarray:
        """A tensor of a file as our parameter (or an expert's part of it) has it."""
        return np.ascontiguousarray(tensor_np.T if self.transpose else tensor_np)

    def to_file(self, parameter_np: np.ndarray) -> np.ndarray:
        """The tensor of a file that holds our parameter, or an expert's part of it."""
        part_np = parameter_np if self.expert is None else parameter_np[self.expert]
        return np.ascontiguousarray(part_np.T if self.transpose else part_np)


# Within one layer: our names -> theirs.
LAYER_NAMES = {
    "input_norm/scale": "input_layernorm.weight",
    "post_attention_norm/scale": "post_attention_layernorm.weight",
    "pre_mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "post_mlp_norm/scale": "post_feedforward_layernorm.weight",
    "layer_scalar": "layer_scalar",
    "hidden_norm/scale": "hidden_norm.weight",  # Eagle3
    "token_norm/scale": "enorm.weight",  # MTP
    "state_norm/scale": "hnorm.weight",
    "projection/kernel": "eh_proj.weight",
    "head_norm/scale": "shared_head.norm.weight",
    "attention/q_norm/scale": "self_attn.q_norm.weight",
    "attention/k_norm/scale": "self_attn.k_norm.weight",
    **{
        f"attention/{ours}/{part}": f"self_attn.{ours}_proj.{theirs}"
        for ours in "qkvo"
        for part, theirs in (("kernel", "weight"), ("bias", "bias"))
    },
    **{
        f"mlp/{ours}/{part}": f"mlp.{ours}_proj.{theirs}"
        for ours in ("gate", "up", "down")
        for part, theirs in (("kernel", "weight"), ("bias", "bias"))
    },
    "mlp/router/kernel": "mlp.gate.weight",
    **{f"mlp/{ours}_kernel": f"mlp.experts.*.{ours}_proj.weight" for ours in ("gate", "up", "down")},
}
EXPERT = "*"  # stands for the number of an expert, each of which has a tensor of its own
TARGET_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "lm_head/kernel": "lm_head.weight",
}
# Files of multimodal models: where the text model is, and what text never meets.
INNER_PREFIX = "model.language_model."
OTHER_MODALITIES = tuple(
    f"model.{part}." for part in "vision_tower vision_embedder audio_tower embed_vision embed_audio".split()
)
# Buffers that old exports stored beside the parameters; they follow from the config.
NOT_PARAMETERS = ("rotary_emb.inv_freq",)


def hf_name(path: Path, names: dict[str, str], layer_prefix: str) -> str:
    """Their name of our parameter `path`; `layers_3/...` becomes `<layer_prefix>3.<name in the layer>`."""
    joined = "/".join(path)
    try:
        if path[0].startswith("layers_") and joined not in names:
            return f"{layer_prefix}{path[0].removeprefix('layers_')}.{LAYER_NAMES['/'.join(path[1:])]}"
        return names[joined]
    except KeyError:
        raise InputError(
            given=f"parameter {joined}",
            expected="a parameter with a name in the file format",
            fix="add it to hf_names.py",
        ) from None


def flat_boxes(boxed_params: dict[str, Any]) -> dict[Path, Any]:
    """Path -> box (value and logical axes) of every parameter."""
    return traverse_util.flatten_dict(boxed_params, is_leaf=lambda _, x: isinstance(x, nn.Partitioned))


def slots(boxed_params: dict[str, Any], names: dict[str, str], layer_prefix: str) -> dict[str, ParamSlot]:
    """File name -> slot for every parameter of an abstract, boxed tree (`eval_shape` of a module's init)."""
    result = {}
    for path, box in flat_boxes(boxed_params).items():
        transpose = path[-1].endswith("kernel") or path[-1] == "w2"
        name, shape, experts = hf_name(path, names, layer_prefix), tuple(box.value.shape), [None]
        if EXPERT in name:
            shape, experts = shape[1:], range(shape[0])
        for expert in experts:
            result[name.replace(EXPERT, str(expert))] = ParamSlot(
                path=path,
                transpose=transpose,
                shape=shape[::-1] if transpose else shape,
                axes=tuple(box.names),
                expert=expert,
            )
    return result


def text_tensors(names: Iterable[str]) -> dict[str, str]:
    """Name in a file of the text model alone -> name in this file, for every parameter that concerns text."""
    present = [name for name in names if not name.endswith(NOT_PARAMETERS)]
    if not any(name.startswith(INNER_PREFIX) for name in present):
        return {name: name for name in present}
    return {
        name.replace(INNER_PREFIX, "model.", 1) if name.startswith(INNER_PREFIX) else name: name
        for name in present
        if not name.startswith(OTHER_MODALITIES)
    }


@functools.cache
def hf_tensor_map(config: DecoderConfig) -> dict[str, ParamSlot]:
    """HF tensor name -> slot for every parameter of a target."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    boxed = jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens)["params"]
    return slots(boxed, TARGET_NAMES, "model.layers.")
