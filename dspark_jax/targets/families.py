"""Families as tables: Hugging Face config.json -> DecoderConfig. What is not understood is refused by name.

The names of tensors are in `checkpoints/hf_names.py` (`hf_tensor_map`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dspark_jax.core.errors import InputError
from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.rope import DefaultRope, LinearRope, Llama3Rope, Rope, YarnRope
from dspark_jax.targets.config import DecoderConfig

# Fields that do not change what the network computes for a frozen target.
IGNORED = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache initializer_range bos_token_id"
    " eos_token_id pad_token_id pretraining_tp attention_dropout max_window_layers is_llama_config rope_interleaved"
    " _name_or_path return_dict output_hidden_states output_attentions chunk_size_feed_forward problem_type"
    " id2label label2id num_labels is_encoder_decoder tie_encoder_decoder unk_token_id _attn_implementation"
    " _attn_implementation_autoset quantization_config transformers.js_config".split()
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
    return dict(qk_norm=True, qkv_bias=bias, output_bias=bias)


FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"llama": _llama, "qwen3": _qwen3}

# Fields that are read, per family beyond the common ones, and fields that must have one value to be understood.
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
        f"layer_types {kind!r}" for kind in set(config.get("layer_types") or ()) - {"full_attention"}
    ]
    known = READ | IGNORED | set(REQUIRED) | {"layer_types"}
    problems += [
        f"unknown field {name!r}" for name in sorted(set(config) - known) if config[name] is not None
    ]
    if problems:
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
        block=BlockConfig(**_common_block(config), **FAMILIES[family](config), rope=rope_from_hf(config)),
    )


def _sliding_is_off(name: str, config: Mapping[str, Any]) -> bool:
    return name == "sliding_window" and config.get("use_sliding_window") is False


def rope_from_hf(config: Mapping[str, Any]) -> Rope:
    """`rope_parameters` (or the older `rope_theta` and `rope_scaling`) -> a Rope.

    Raises:
      InputError: variants that depend on the run-time length (dynamic, longrope), unknown keys or variants.
    """
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    theta = float(given.pop("rope_theta", config.get("rope_theta", 10_000.0)))
    original = given.pop("original_max_position_embeddings", config.get("max_position_embeddings", 2048))

    def refuse(problem: str, expected: str):
        return InputError(
            given=f"rope parameters: {problem}",
            expected=expected,
            fix="use a target with a supported position encoding",
        )

    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise refuse("partial_rotary_factor != 1", "full rotation")
    make: dict[str, tuple[Callable[..., Rope], dict[str, str]]] = {
        "default": (DefaultRope, {}),
        "linear": (LinearRope, {"factor": "factor"}),
        "llama3": (
            Llama3Rope,
            {
                "factor": "factor",
                "low_freq_factor": "low_freq_factor",
                "high_freq_factor": "high_freq_factor",
            },
        ),
        "yarn": (
            YarnRope,
            {name: name for name in ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor")},
        ),
    }
    if kind not in make:
        raise refuse(f"rope_type {kind!r}", f"one of {sorted(make)}")
    cls, names = make[kind]
    if unknown := {name for name in set(given) - set(names) if given[name] is not None}:
        raise refuse(f"{kind} with unknown {sorted(unknown)}", f"only {sorted(names)}")
    fields = {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None}
    if kind in ("llama3", "yarn"):
        fields["original_max_positions"] = int(original)
    return cls(theta=theta, **fields)
