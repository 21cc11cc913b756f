"""The dimensions of one transformer block, and what surrounds a stack of them; for targets and drafters."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dspark_jax.core.errors import InputError
from dspark_jax.nn.rope import Rope

Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of gated MLPs in the place of one.

    Attributes:
      number: experts E of a layer.
      per_token: experts that a token meets, those that its router finds most likely.
      width: inner width F of each.
      normalise: the weights of a token's experts are divided by their sum.
    """

    number: int
    per_token: int
    width: int
    normalise: bool = False

    def __post_init__(self):
        if not 1 <= self.per_token <= self.number:
            raise InputError(
                given=f"{self.per_token} of {self.number} experts per token",
                expected="at least one, and no more than there are",
                fix="correct the expert counts of the configuration",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One pre-norm attention + gated-MLP block.

    Attributes:
      width: residual width D.
      mlp_width: inner width F of the gated MLP.
      experts: what takes the MLP's place (Qwen3-MoE), or None.
      num_heads: query heads N.
      num_kv_heads: key/value heads K; N is a multiple of K.
      head_dim: H, not necessarily D / N.
      norm_eps: epsilon of every RMS norm.
      qk_norm: RMS norm over each head of q and k before RoPE (Qwen3, Gemma).
      v_norm: the same for v, without a scale (Gemma 4).
      values_from_keys: v is the k projection before norm and RoPE; there is no v projection (Gemma 4).
      attention_scale: factor on q k; None: H^-1/2.
      window: a query sees this many positions, its own included; None: all before it.
      branch_norms: attention and MLP outputs are normed, too, before they are added (Gemma).
      layer_scalar: the block's output is multiplied by a frozen number of its own (Gemma 4).
      activation: of the MLP's gate.
      qkv_bias: bias on the q, k and v projections.
      output_bias: bias on the attention output projection.
      mlp_bias: bias on the three MLP projections.
      rope: position encoding.
    """

    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    qk_norm: bool = False
    v_norm: bool = False
    values_from_keys: bool = False
    attention_scale: float | None = None
    window: int | None = None
    branch_norms: bool = False
    layer_scalar: bool = False
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: Experts | None = None
    rope: Rope

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                given=f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}",
                expected="num_heads to be a multiple of num_kv_heads",
                fix="correct the attention head counts of the configuration",
            )
        if self.head_dim % 2:
            raise InputError(
                given=f"head_dim={self.head_dim}",
                expected="an even head size (RoPE turns pairs)",
                fix="correct head_dim",
            )
        if self.window is not None and self.window < 1:
            raise InputError(
                given=f"window={self.window}",
                expected="at least 1: a position sees itself",
                fix="correct the sliding window, or set it to null",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenScaling:
    """What a family does to embeddings and logits beside its two tables; drafters do the same.

    Attributes:
      embedding: factor on looked-up embeddings (Gemma: the root of D).
      softcap: c of logits = c tanh(logits / c), or None (Gemma).
    """

    embedding: float = 1.0
    softcap: float | None = None
