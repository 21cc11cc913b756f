"""Families as tables: Hugging Face config.json -> DecoderConfig. What is not understood is refused by name.

The names of tensors are in `checkpoints/hf_names.py` (`hf_tensor_map`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dspark_jax.core.errors import InputError
from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.rope import DefaultRope, LinearRope, Llama3Rope, Rope, YarnRope
from dspark_jax.targets.config import DecoderConfig

# Fields that do not change what the network computes for a frozen target.
IGNORED = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache initializer_range"
    " bos_token_id eos_token_id pad_token_id pretraining_tp attention_dropout max_window_layers"
    " is_llama_config rope_interleaved _name_or_path return_dict output_hidden_states output_attentions"
    " chunk_size_feed_forward problem_type id2label label2id num_labels is_encoder_decoder"
    " tie_encoder_decoder unk_token_id _attn_implementation _attn_implementation_autoset"
    " quantization_config transformers.js_config".split()
)


def _common_block(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return dict(
        width=config["hidden_size"],
        mlp_width=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = config.get("attention_bias", False)
    return dict(qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False))


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = config.get("attention_bias", False)
    head_dim = config.get("head_dim") or 128  # transformers' default, whatever the width
    return dict(qk_norm=True, qkv_bias=bias, output_bias=bias, head_dim=head_dim)


FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"llama": _llama, "qwen3": _qwen3}

# Fields without which nothing can be read, fields that are read, and fields whose value must be one of these.
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
READ = frozenset(
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps vocab_size"
    " num_hidden_layers tie_word_embeddings max_position_embeddings rope_parameters rope_theta rope_scaling"
    " attention_bias mlp_bias".split()
)
REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
}


def decoder_config_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face config.json (as a dict).

    Raises:
      InputError: an unknown family, field or value; all of them at once.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise InputError(
            given=f"model_type {family!r}",
            expected=f"one of {sorted(FAMILIES)}",
            fix="use a target of a supported family",
        )
    problems = [
        f"{name}={config[name]!r}"
        for name, legal in REQUIRED.items()
        if config.get(name, legal[0]) not in legal and not _sliding_is_off(name, config)
    ]
    problems += [
        f"layer_types {kind!r}" for kind in sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    ]
    known = READ | IGNORED | set(REQUIRED) | {"layer_types"}
    problems += [
        f"unknown field {name!r}" for name in sorted(set(config) - known) if config[name] is not None
    ]
    problems += [f"no field {name!r}" for name in NEEDED if config.get(name) is None]
    rope = None
    try:
        rope = rope_from_hf(config)
    except InputError as error:
        problems.append(error.given)
    if problems or rope is None:
        raise InputError(
            given=f"{family} config with " + ", ".join(problems),
            expected="fields whose effect on the network is known",
            fix="remove the fields if they have no effect, or use another target",
        )
    return DecoderConfig(
        family=family,
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        max_positions=config.get("max_position_embeddings", 2048),
        block=BlockConfig(**{**_common_block(config), **FAMILIES[family](config), "rope": rope}),
    )


def _sliding_is_off(name: str, config: Mapping[str, Any]) -> bool:
    return name == "sliding_window" and config.get("use_sliding_window") is False


ROPES: dict[str, type[Rope]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}


def rope_from_hf(config: Mapping[str, Any]) -> Rope:
    """`rope_parameters` (or the older `rope_theta` and `rope_scaling`) -> a Rope.

    Raises:
      InputError: variants that depend on the run-time length (dynamic, longrope), unknown or missing keys.
    """
    written = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = {name: value for name, value in written.items() if value is not None}
    older_name = given.pop("type", "default")
    kind = given.pop("rope_type", older_name)
    max_positions = config.get("max_position_embeddings", 2048)
    values = {
        "theta": float(given.pop("rope_theta", config.get("rope_theta", 10_000.0))),
        "original_max_positions": given.pop("original_max_position_embeddings", max_positions),
    }
    problems = []
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        problems.append("a partial_rotary_factor other than 1")
    values |= given  # all other keys are called as the fields are
    fields = dataclasses.fields(ROPES[kind]) if kind in ROPES else ()
    names = {field.name for field in fields}
    if kind not in ROPES:
        problems.append(f"rope_type {kind!r}")
    else:
        problems += [f"an unknown key {name!r}" for name in sorted(given.keys() - names)]
        needed = {field.name for field in fields if field.default is dataclasses.MISSING}
        problems += [f"no {name!r}" for name in sorted(needed - values.keys())]
    if problems:
        raise InputError(
            given=f"{kind} rope parameters with " + ", ".join(problems),
            expected=f"rope_type one of {sorted(ROPES)} with its own keys",
            fix="use a target with a supported position encoding",
        )
    return ROPES[kind](**{name: value for name, value in values.items() if name in names})
