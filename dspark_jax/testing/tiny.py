"""Tiny random targets and drafters: every part of the real ones, at the size of a unit test.

    target = tiny_target(**TARGETS["qwen3"])
    drafter = tiny_drafter(target, **DRAFTERS["rnn"])
    drafter.drafter.training_rows(drafter.params, drafter.shared, ...)

`randomised` does the same for a drafter of your own. Fresh parameters would test little: projections of
scale 0.02 leave hidden states almost as they were, zero biases and unit norms hide a forgotten one, and a
zero W2 a forgotten head. Nothing here compiles: shapes are traced, numbers are numpy's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import Array

from dspark_jax.drafters.config import (
    RNN,
    Confidence,
    DSparkConfig,
    Eagle3Config,
    Gated,
    Layout,
    Markov,
    MTPConfig,
)
from dspark_jax.drafters.contract import Drafter, Params, SharedWeights
from dspark_jax.drafters.registry import DrafterConfig, make_drafter
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.decoder import Decoder, embedding_table, lm_head_kernel
from dspark_jax.targets.families import decoder_config_from_hf

TARGETS: dict[str, dict[str, Any]] = {
    "llama-gqa-tied": {},
    "llama-mha-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama-mqa-biased": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 3,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 3.0,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000.0,
            },
        },
    },
}
"""Fields of config.json that differ from the default tiny Llama."""

DRAFTERS: dict[str, dict[str, Any]] = {
    "markov": {"head": Markov(rank=4)},
    "gated": {"head": Gated(rank=4)},
    "rnn": {"head": RNN(rank=4)},
    "plain-confidence": {"confidence": Confidence(with_markov=False)},
    "dflash": {"head": None, "confidence": None},
    "fill-in": {"layout": Layout.FILL_IN},
    "eagle3": {"kind": Eagle3Config},
    "mtp-1": {"kind": MTPConfig, "block_len": 1},
    "mtp-3": {"kind": MTPConfig, "taps": (-1, 2)},
}
"""What differs from the default tiny drafter: one entry per kind, and per head and layout of DSpark."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyTarget:
    """A random decoder.

    Attributes:
      hf_config: the config.json that it would have.
      config: the same, as the decoder reads it.
      params: its parameters, float32.
    """

    hf_config: dict[str, Any]
    config: DecoderConfig
    params: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyDrafter:
    """A random drafter of a tiny target.

    Attributes:
      drafter: the pure functions.
      params: its parameters, float32.
      shared: the target's weights that it uses.
    """

    drafter: Drafter
    params: Params
    shared: SharedWeights


def tiny_target(*, seed: int = 0, **fields: Any) -> TinyTarget:
    """A tiny Llama (3 layers, 4 heads over 2, tied), or what `fields` of config.json make of it."""
    hf_config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 41,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,  # not width / heads
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        **fields,
    }
    config = decoder_config_from_hf(hf_config)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes: Any = jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens)
    return TinyTarget(hf_config=hf_config, config=config, params=randomised(shapes["params"], seed=seed))


def tiny_drafter(
    target: TinyTarget,
    *,
    kind: Callable[..., DrafterConfig] = DSparkConfig,
    seed: int = 1,
    draft_to_target_np: np.ndarray | None = None,
    **fields: Any,
) -> TinyDrafter:
    """A tiny DSpark drafter (2 layers, blocks of 3, Markov head), or what `fields` of its config make of it.

    Args:
      target: whose tokens it drafts.
      kind: the type of its configuration.
      seed: of its parameters.
      draft_to_target_np: target ids of a reduced draft vocabulary, or None for the whole one.
      **fields: of the configuration.
    """
    vocab_size = target.config.vocab_size
    settings: dict[str, Any] = {
        "target_vocab_size": vocab_size,
        "vocab_size": vocab_size if draft_to_target_np is None else len(draft_to_target_np),
        "block": target.config.block,
        "taps": (-1, 0, target.config.num_layers - 1),
        "block_len": 3,
    }
    if kind is DSparkConfig:
        settings |= {
            "num_layers": 2,
            "mask_token": vocab_size - 1,
            "head": Markov(rank=4),
            "confidence": Confidence(),
        }
    drafter = make_drafter(kind(**settings | fields))
    draft_to_target_V = None if draft_to_target_np is None else jnp.asarray(draft_to_target_np, jnp.int32)
    shared = SharedWeights.cut(
        embedding_table(target.params),
        lm_head_kernel(target.params),
        draft_to_target_V,
        target.config.scaling,
    )
    shapes = jax.eval_shape(drafter.init, jax.random.key(0))
    return TinyDrafter(drafter=drafter, params=randomised(shapes, seed=seed), shared=shared)


def randomised(shapes: Params, *, seed: int) -> Params:
    """Parameters (unboxed, float32) of which every single one matters; logits vary by about 2.

    Args:
      shapes: parameters or their shapes, boxed or not.
      seed: of numpy's generator.
    """
    generator = np.random.default_rng(seed)
    flat: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(nn.meta.unbox(shapes))
    return traverse_util.unflatten_dict(
        {path: _draw(generator, path[-1], x.shape) for path, x in flat.items()}
    )


def _draw(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    noise_np = generator.standard_normal(shape)
    if name in ("scale", "layer_scalar"):
        noise_np = 1 + 0.2 * noise_np
    elif name.endswith("bias"):
        noise_np *= 0.3
    elif name == "embedding":
        noise_np *= 2 / shape[1] ** 0.5
    elif name != "w1":
        noise_np *= 1.5 / shape[0] ** 0.5
    return jnp.asarray(noise_np, jnp.float32)
