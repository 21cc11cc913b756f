"""Families as tables: Hugging Face config.json -> DecoderConfig. What is not understood is refused by name.

The names of tensors are in `checkpoints/hf_names.py` (`hf_tensor_map`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dspark_jax.core.errors import InputError
from dspark_jax.nn.config import BlockConfig, Experts, TokenScaling
from dspark_jax.nn.rope import DefaultRope, LinearRope, Llama3Rope, ProportionalRope, Rope, YarnRope
from dspark_jax.targets.config import DecoderConfig

# Fields that do not change what the network computes for a frozen target.
IGNORED = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache initializer_range"
    " bos_token_id eos_token_id pad_token_id pretraining_tp attention_dropout max_window_layers"
    " is_llama_config rope_interleaved _name_or_path return_dict output_hidden_states output_attentions"
    " chunk_size_feed_forward problem_type id2label label2id num_labels is_encoder_decoder"
    " tie_encoder_decoder unk_token_id _attn_implementation _attn_implementation_autoset"
    " transformers.js_config".split()
)
FULL, SLIDING = "full_attention", "sliding_attention"  # Hugging Face's names of layer types
Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family of targets as a table.

    Attributes:
      block: (fields, layer, its type) -> what BlockConfig has beside the dimensions of every family.
      read: fields that `block`, `layer_types` and `scaling` read.
      required: fields that are not understood unless they have one of these values.
      ignored: fields without effect while `required` holds.
      defaults: what transformers takes absent fields for.
      kinds: legal types of layers.
      layer_types: fields -> the type of every layer.
      scaling: fields -> what happens to embeddings and logits.
      dense: the family that has one MLP in the place of experts; None: the family itself.
    """

    block: Callable[[Fields, int, str], dict[str, Any]]
    read: frozenset[str] = frozenset()
    required: Mapping[str, tuple[Any, ...]]
    ignored: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kinds: frozenset[str] = frozenset({FULL})
    layer_types: Callable[[Fields], list[str]] = lambda fields: (
        fields.get("layer_types") or [FULL] * fields.get("num_hidden_layers", 0)
    )
    scaling: Callable[[Fields], TokenScaling] = lambda fields: TokenScaling()
    dense: str | None = None


def _dimensions(fields: Fields) -> dict[str, Any]:
    """What BlockConfig has in every family."""
    heads, bias = fields["num_attention_heads"], fields.get("attention_bias", False)
    return dict(
        width=fields["hidden_size"],
        mlp_width=fields["intermediate_size"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", heads),
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        qkv_bias=bias,
        output_bias=bias,
    )


def _llama(fields: Fields, layer: int, kind: str) -> dict[str, Any]:
    return dict(mlp_bias=fields.get("mlp_bias", False))


def _qwen3(fields: Fields, layer: int, kind: str) -> dict[str, Any]:
    return dict(qk_norm=True)


def _qwen3_moe(fields: Fields, layer: int, kind: str) -> dict[str, Any]:
    is_dense = layer in fields["mlp_only_layers"] or (layer + 1) % fields["decoder_sparse_step"]
    experts = Experts(
        number=fields.get("num_local_experts", fields["num_experts"]),
        per_token=fields["num_experts_per_tok"],
        width=fields["moe_intermediate_size"],
        normalise=fields["norm_topk_prob"],
    )
    return dict(qk_norm=True, experts=None if is_dense else experts)


def _gemma4(fields: Fields, layer: int, kind: str) -> dict[str, Any]:
    return dict(
        qk_norm=True,
        v_norm=True,
        values_from_keys=fields["attention_k_eq_v"] and kind == FULL,
        attention_scale=1.0,
        window=fields["sliding_window"] if kind == SLIDING else None,
        branch_norms=True,
        layer_scalar=True,
        activation="gelu_tanh",
        **_gemma4_heads(fields, layer, kind),
    )


def _gemma4_heads(fields: Fields, layer: int, kind: str) -> dict[str, int]:
    """Head size and kv heads of a layer that has its own; newer files write them out for every such layer."""
    if "per_layer_config" in fields:
        own = dict(fields["per_layer_config"].get(str(layer), {}))
    elif kind == FULL:
        own = {"head_dim": fields["global_head_dim"]}
        if fields["attention_k_eq_v"] and "num_global_key_value_heads" in fields:
            own["num_key_value_heads"] = fields["num_global_key_value_heads"]
    else:
        own = {}
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    if unknown := sorted(own.keys() - names):
        raise InputError(
            given=f"per_layer_config with {unknown}",
            expected=f"only {sorted(names)}",
            fix="use a target whose layers differ in nothing else",
        )
    return {names[name]: value for name, value in own.items()}


def _gemma4_layer_types(fields: Fields) -> list[str]:
    L = fields.get("num_hidden_layers", 0)
    kinds = fields.get("layer_types") or [SLIDING if (i + 1) % 6 else FULL for i in range(L)]
    return [*kinds[:-1], FULL]  # transformers makes the last layer a full one, whatever is written


NO_SLIDING = {"sliding_window": (None,), "use_sliding_window": (False,)}
GEMMA4 = Family(
    block=_gemma4,
    read=frozenset(
        "attention_k_eq_v sliding_window global_head_dim num_global_key_value_heads"
        " per_layer_config final_logit_softcapping".split()
    ),
    required={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "enable_moe_block": (False,),
        "hidden_size_per_layer_input": (0,),
        "num_kv_shared_layers": (0,),
        "use_bidirectional_attention": (None, "vision"),  # among tokens of an image only
    },
    ignored=frozenset(
        "vocab_size_per_layer_input use_double_wide_mlp num_experts top_k_experts"
        " moe_intermediate_size".split()
    ),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": False,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
    },
    kinds=frozenset({FULL, SLIDING}),
    layer_types=_gemma4_layer_types,
    scaling=lambda fields: TokenScaling(
        embedding=fields["hidden_size"] ** 0.5, softcap=fields.get("final_logit_softcapping")
    ),
)
FAMILIES: dict[str, Family] = {
    "llama": Family(
        block=_llama,
        read=frozenset({"mlp_bias"}),
        required={"hidden_act": ("silu",), **NO_SLIDING},
    ),
    "qwen3": Family(
        block=_qwen3,
        required={"hidden_act": ("silu",), "mlp_bias": (False,), **NO_SLIDING},
        defaults={"head_dim": 128},  # whatever the width
    ),
    "qwen3_moe": Family(
        block=_qwen3_moe,
        dense="qwen3",
        read=frozenset(
            "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob"
            " decoder_sparse_step mlp_only_layers".split()
        ),
        required={"hidden_act": ("silu",), "mlp_bias": (False,), **NO_SLIDING},
        ignored=frozenset({"output_router_logits", "router_aux_loss_coef"}),
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "max_position_embeddings": 32_768,
        },
    ),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": dataclasses.replace(
        GEMMA4,
        defaults={
            **GEMMA4.defaults,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262_144,
        },
    ),
}

# Fields without which nothing can be read, and fields that are read for every family.
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
READ = frozenset(
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps vocab_size"
    " num_hidden_layers tie_word_embeddings max_position_embeddings rope_parameters rope_theta rope_scaling"
    " layer_types attention_bias quantization_config".split()
)
# Beside `text_config` in a multimodal config.json; what these describe, text never meets.
OTHER_MODALITIES = frozenset(
    "text_config vision_config audio_config boi_token_id eoi_token_id image_token_id video_token_id"
    " boa_token_id eoa_token_id eoa_token_index audio_token_id vision_soft_tokens_per_image".split()
)


def text_config(config: Fields) -> dict[str, Any]:
    """The text model's own config.json; that of a multimodal model (`text_config` inside) is unwrapped."""
    if "text_config" not in config:
        return dict(config)
    around = {name: value for name, value in config.items() if name not in OTHER_MODALITIES}
    tied = {name: value for name, value in around.items() if name == "tie_word_embeddings"}
    return {**around, **config["text_config"], **tied}


def like_the_last_layer(config: Fields, num_layers: int) -> dict[str, Any]:
    """The text config.json of a network whose layers all repeat the target's last one, as a drafter's do.

    They have one MLP where the target has experts.
    """
    family = FAMILIES[config["model_type"]]
    changed: dict[str, Any] = {"num_hidden_layers": num_layers}
    if family.dense:
        heads = _dimensions({**family.defaults, **config})
        changed |= {
            "model_type": family.dense,
            "head_dim": heads["head_dim"],
            "num_key_value_heads": heads["num_kv_heads"],
        }
        about_experts = family.read | family.ignored
        config = {name: value for name, value in config.items() if name not in about_experts}
    if config.get("layer_types") or len(family.kinds) > 1:
        changed["layer_types"] = [FULL] * num_layers
    if config.get("per_layer_config"):
        own = config["per_layer_config"].get(str(config["num_hidden_layers"] - 1), {})
        changed["per_layer_config"] = {str(i): own for i in range(num_layers)}
        # What older readers know instead.
        names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        changed |= {older: own[name] for name, older in names.items() if name in own}
    return {**config, **changed}


def decoder_config_from_hf(config: Fields) -> DecoderConfig:
    """Reads a Hugging Face config.json (as a dict).

    Raises:
      InputError: an unknown family, field or value; all of them at once.
    """
    config = text_config(config)
    name = config.get("model_type")
    if name not in FAMILIES:
        raise InputError(
            given=f"model_type {name!r}",
            expected=f"one of {sorted(FAMILIES)}",
            fix="use a target of a supported family",
        )
    family = FAMILIES[name]
    fields = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    problems = [
        f"{key}={fields[key]!r}"
        for key, legal in family.required.items()
        if fields.get(key, legal[0]) not in legal and not _sliding_is_off(key, fields)
    ]
    if "quantization_config" in fields:
        problems.append("quantized weights (quantization_config)")
    known = READ | IGNORED | family.read | family.ignored | set(family.required)
    problems += [f"unknown field {key!r}" for key in sorted(set(fields) - known)]
    problems += [f"no field {key!r}" for key in NEEDED if key not in fields]
    kinds = family.layer_types(fields)
    if len(kinds) != fields.get("num_hidden_layers", len(kinds)):
        problems.append(f"layer_types of {len(kinds)} layers instead of {fields['num_hidden_layers']}")
    problems += [f"layer_types {kind!r}" for kind in sorted(set(kinds) - family.kinds)]
    layers: tuple[BlockConfig, ...] = ()
    try:
        ropes = {kind: _rope_of(fields, kind) for kind in sorted(family.kinds.intersection(kinds))}
        if not problems:
            layers = tuple(
                BlockConfig(**{**_dimensions(fields), **family.block(fields, i, kind)}, rope=ropes[kind])
                for i, kind in enumerate(kinds)
            )
    except InputError as error:
        problems.append(error.given)
    if problems:
        raise InputError(
            given=f"{name} config with " + ", ".join(problems),
            expected="fields whose effect on the network is known",
            fix="remove the fields if they have no effect, or use another target",
        )
    return DecoderConfig(
        family=name,
        vocab_size=fields["vocab_size"],
        layers=layers,
        tie_embeddings=fields.get("tie_word_embeddings", False),
        max_positions=fields.get("max_position_embeddings", 2048),
        scaling=family.scaling(fields),
    )


def _sliding_is_off(name: str, config: Mapping[str, Any]) -> bool:
    return name == "sliding_window" and config.get("use_sliding_window") is False


def _rope_of(fields: Fields, kind: str) -> Rope:
    """The RoPE of one type of layers: `rope_parameters` has a table for each, or one for all."""
    written = fields.get("rope_parameters", {})
    return rope_from_hf({**fields, "rope_parameters": written.get(kind, written)})


ROPES: dict[str, type[Rope]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "proportional": ProportionalRope,
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
    fields = dataclasses.fields(ROPES[kind]) if kind in ROPES else ()
    names = {field.name for field in fields}
    problems = []
    if "partial_rotary_factor" not in names and given.pop("partial_rotary_factor", 1.0) != 1.0:
        problems.append("a partial_rotary_factor other than 1")
    values |= given  # all other keys are called as the fields are
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
