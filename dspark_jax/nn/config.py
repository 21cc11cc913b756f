"""The dimensions of one transformer block, shared by targets and drafters."""

from __future__ import annotations

import dataclasses

from dspark_jax.core.errors import InputError
from dspark_jax.nn.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One pre-norm attention + gated-MLP block.

    Attributes:
      width: residual width D.
      mlp_width: inner width F of the gated MLP.
      num_heads: query heads N.
      num_kv_heads: key/value heads K; N is a multiple of K.
      head_dim: H, not necessarily D / N.
      norm_eps: epsilon of every RMS norm.
      qk_norm: RMS norm over each head of q and k before RoPE (Qwen3).
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
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
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
