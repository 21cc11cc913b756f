"""config.json -> DecoderConfig: every field is read, known to be harmless, or refused by name."""

from __future__ import annotations

import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.nn.config import BlockConfig, Experts, TokenScaling
from dspark_jax.nn.rope import DefaultRope, LinearRope, Llama3Rope, ProportionalRope, YarnRope
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.families import decoder_config_from_hf, like_the_last_layer, text_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 5000.0,
}


def test_llama():
    config = decoder_config_from_hf(
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_scaling": None}
    )

    assert config == DecoderConfig(
        family="llama",
        vocab_size=100,
        tie_embeddings=True,
        max_positions=512,
        layers=5
        * (
            BlockConfig(
                width=64,
                mlp_width=96,
                num_heads=8,
                num_kv_heads=2,
                head_dim=8,
                norm_eps=1e-5,
                qkv_bias=True,
                output_bias=True,
                mlp_bias=True,
                rope=DefaultRope(theta=5000.0),
            ),
        ),
    )


def test_absent_fields_mean_what_transformers_means():
    small = {
        name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "rope_theta")
    }
    block = decoder_config_from_hf(small).block
    assert block.num_kv_heads == 8 and block.rope == DefaultRope(theta=10_000.0)
    assert not (block.qkv_bias or block.mlp_bias or block.qk_norm)

    qwen3 = decoder_config_from_hf({**LLAMA, "model_type": "qwen3", "use_sliding_window": False})
    assert qwen3.block.head_dim == 128 and qwen3.block.qk_norm and not qwen3.tie_embeddings


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, DefaultRope(theta=7.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, LinearRope(theta=5000.0, factor=2.0)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            Llama3Rope(
                theta=5000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
            ),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 9.0, "factor": 4.0, "beta_fast": None}},
            YarnRope(theta=9.0, factor=4.0, original_max_positions=512),
        ),
        (
            {"rope_parameters": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5}},
            ProportionalRope(theta=5000.0, factor=2.0, partial_rotary_factor=0.5),
        ),
    ],
)
def test_rope(fields, rope):
    assert decoder_config_from_hf({**LLAMA, **fields}).block.rope == rope


def test_qwen3_with_its_sliding_window_switched_off():
    config = {**LLAMA, "model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": False}

    assert decoder_config_from_hf(config).family == "qwen3"
    with pytest.raises(InputError, match="sliding_window=4096, use_sliding_window=True"):
        decoder_config_from_hf({**config, "use_sliding_window": True})


QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [3],
    "output_router_logits": False,
}


def test_qwen3_moe():
    config = decoder_config_from_hf({**QWEN3_MOE, "decoder_sparse_step": 2})

    experts = Experts(number=16, per_token=4, width=24, normalise=True)
    assert [layer.experts for layer in config.layers] == [None, experts, None, None, None]
    assert config.block.qk_norm and config.block.head_dim == 8 and config.block.mlp_width == 96
    assert decoder_config_from_hf({**QWEN3_MOE, "num_local_experts": 8}).layers[0].experts.number == 8
    absent = {name: value for name, value in QWEN3_MOE.items() if name in LLAMA}
    (first, *_) = decoder_config_from_hf({**absent, "num_key_value_heads": None}).layers
    assert first.experts == Experts(number=128, per_token=8, width=768) and first.num_kv_heads == 4
    with pytest.raises(InputError, match="17 of 16 experts per token"):
        decoder_config_from_hf({**QWEN3_MOE, "num_experts_per_tok": 17})


def test_an_unknown_family_is_refused():
    with pytest.raises(
        InputError,
        match=r"'gpt2'.*one of \['gemma4_text', 'gemma4_unified_text', 'llama', 'qwen3', 'qwen3_moe'",
    ):
        decoder_config_from_hf({**LLAMA, "model_type": "gpt2"})


def test_all_problems_are_in_one_error():
    config = {
        **LLAMA,
        "hidden_act": "gelu",
        "attn_logit_softcapping": 50.0,
        "layer_types": ["full_attention", "sliding_attention"],
        "vocab_size": None,
        "quantization_config": {"quant_method": "fp8"},
        "rope_scaling": {"rope_type": "linear", "partial_rotary_factor": 0.5, "magic": 1},
    }

    with pytest.raises(InputError) as caught:
        decoder_config_from_hf(config)

    for problem in (
        "hidden_act='gelu'",
        "'attn_logit_softcapping'",
        "'sliding_attention'",
        "no field 'vocab_size'",
        "quantized weights",
        "partial_rotary_factor",
        "unknown key 'magic'",
        "no 'factor'",
    ):
        assert problem in caught.value.given


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_position_encodings_that_are_not_understood_are_refused(kind):
    with pytest.raises(InputError, match=f"rope_type '{kind}'"):
        decoder_config_from_hf({**LLAMA, "rope_parameters": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("fields", "problem"), [({"num_key_value_heads": 3}, "num_kv_heads=3"), ({"head_dim": 7}, "head_dim=7")]
)
def test_impossible_heads_are_refused(fields, problem):
    with pytest.raises(InputError, match=problem):
        decoder_config_from_hf({**LLAMA, **fields})


GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 5,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}


def test_gemma4():
    config = decoder_config_from_hf(GEMMA4)

    shared = dict(
        width=64,
        mlp_width=96,
        num_heads=8,
        qk_norm=True,
        v_norm=True,
        attention_scale=1.0,
        branch_norms=True,
        layer_scalar=True,
        activation="gelu_tanh",
    )
    sliding = BlockConfig(**shared, num_kv_heads=4, head_dim=8, window=5, rope=DefaultRope(theta=10_000.0))
    full = BlockConfig(
        **shared,
        num_kv_heads=2,
        head_dim=16,
        values_from_keys=True,
        rope=ProportionalRope(theta=1_000_000.0, partial_rotary_factor=0.25),
    )
    assert config == DecoderConfig(
        family="gemma4_text",
        vocab_size=100,
        layers=(*5 * [sliding], full, full),  # five to one, and the last one sees everything
        tie_embeddings=True,
        max_positions=131_072,
        scaling=TokenScaling(embedding=8.0, softcap=30.0),
    )
    assert config.block == full and config.num_layers == 7


def test_gemma4_with_its_own_values_has_as_many_of_them_in_every_layer():
    layers = decoder_config_from_hf({**GEMMA4, "attention_k_eq_v": False}).layers

    assert {layer.num_kv_heads for layer in layers} == {4}
    assert not any(layer.values_from_keys for layer in layers)
    assert [layer.head_dim for layer in layers] == [8, 8, 8, 8, 8, 16, 16]


def test_gemma4_with_heads_written_per_layer():
    own = {"head_dim": 16, "num_key_value_heads": 2}
    written = {key: value for key, value in GEMMA4.items() if "global" not in key}

    config = decoder_config_from_hf({**written, "per_layer_config": {"5": own, "6": own}})

    assert config == decoder_config_from_hf(GEMMA4)
    with pytest.raises(InputError, match=r"per_layer_config with \['intermediate_size'\]"):
        decoder_config_from_hf({**written, "per_layer_config": {"5": {"intermediate_size": 9}}})


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_a_multimodal_config_is_unwrapped(kind):
    around = {
        "architectures": [],
        "model_type": kind,
        "vision_config": {"hidden_size": 3},
        "audio_config": None,
        "image_token_id": 99,
        "tie_word_embeddings": False,
        "eos_token_id": [1, 6],
    }
    wrapped = {
        **around,
        "text_config": {**GEMMA4, "model_type": f"{kind}_text", "max_position_embeddings": 9},
    }

    config = decoder_config_from_hf(wrapped)

    assert config.family == f"{kind}_text" and config.max_positions == 9 and not config.tie_embeddings
    assert config.layers == decoder_config_from_hf(GEMMA4).layers
    assert text_config(wrapped)["eos_token_id"] == [1, 6]
    with pytest.raises(InputError, match=r"quantized weights.*'surprise'"):
        decoder_config_from_hf({**wrapped, "surprise": 1, "quantization_config": {"bits": 4}})


def test_what_of_gemma4_is_not_built_is_refused_by_name():
    fields = {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 2,
        "use_bidirectional_attention": "all",
        "hidden_activation": "silu",
    }

    with pytest.raises(InputError) as caught:
        decoder_config_from_hf({**GEMMA4, **fields, "layer_types": ["full_attention", "chunked", "chunked"]})

    for name, value in fields.items():
        assert f"{name}={value!r}" in caught.value.given
    assert "layer_types 'chunked'" in caught.value.given and "of 3 layers instead of 7" in caught.value.given
    without = {key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"}
    with pytest.raises(InputError, match="hidden_size_per_layer_input=256"):
        decoder_config_from_hf(without)  # what transformers takes an absent field for


def test_like_the_last_layer():
    own = {"head_dim": 16, "num_key_value_heads": 2}
    kinds = ["sliding_attention", "full_attention"]
    target = {**GEMMA4, "num_hidden_layers": 2, "layer_types": kinds, "per_layer_config": {"1": own}}

    for fields in (LLAMA, GEMMA4, QWEN3_MOE, target):
        repeated = decoder_config_from_hf(like_the_last_layer(fields, 3))
        assert repeated.layers == 3 * (decoder_config_from_hf(fields).block,)
    assert like_the_last_layer(QWEN3_MOE, 3)["model_type"] == "qwen3"
