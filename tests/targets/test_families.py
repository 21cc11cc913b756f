"""config.json -> DecoderConfig: every field is read, known to be harmless, or refused by name."""

from __future__ import annotations

import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.rope import DefaultRope, LinearRope, Llama3Rope, YarnRope
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.families import decoder_config_from_hf

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
        num_layers=5,
        tie_embeddings=True,
        max_positions=512,
        block=BlockConfig(
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
    ],
)
def test_rope(fields, rope):
    assert decoder_config_from_hf({**LLAMA, **fields}).block.rope == rope


def test_qwen3_with_its_sliding_window_switched_off():
    config = {**LLAMA, "model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": False}

    assert decoder_config_from_hf(config).family == "qwen3"
    with pytest.raises(InputError, match="sliding_window=4096, use_sliding_window=True"):
        decoder_config_from_hf({**config, "use_sliding_window": True})


def test_an_unknown_family_is_refused():
    with pytest.raises(InputError, match=r"'gpt2'.*one of \['llama', 'qwen3'\]"):
        decoder_config_from_hf({**LLAMA, "model_type": "gpt2"})


def test_all_problems_are_in_one_error():
    config = {
        **LLAMA,
        "hidden_act": "gelu",
        "attn_logit_softcapping": 50.0,
        "layer_types": ["full_attention", "sliding_attention"],
        "vocab_size": None,
        "rope_scaling": {"rope_type": "linear", "partial_rotary_factor": 0.5, "magic": 1},
    }

    with pytest.raises(InputError) as caught:
        decoder_config_from_hf(config)

    for problem in (
        "hidden_act='gelu'",
        "'attn_logit_softcapping'",
        "'sliding_attention'",
        "no field 'vocab_size'",
        "partial_rotary_factor",
        "unknown key 'magic'",
        "no 'factor'",
    ):
        assert problem in caught.value.given


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_position_encodings_that_are_not_understood_are_refused(kind):
    with pytest.raises(InputError, match=f"rope_type '{kind}'"):
        decoder_config_from_hf({**LLAMA, "rope_parameters": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("fields", "problem"), [({"num_key_value_heads": 3}, "num_kv_heads=3"), ({"head_dim": 7}, "head_dim=7")]
)
def test_impossible_heads_are_refused(fields, problem):
    with pytest.raises(InputError, match=problem):
        decoder_config_from_hf({**LLAMA, **fields})
