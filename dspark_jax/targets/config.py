"""What a target is: the frozen decoder whose distribution is reproduced."""

from __future__ import annotations

import dataclasses

from dspark_jax.nn.config import BlockConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer of identical blocks.

    Attributes:
      family: Hugging Face `model_type` it was read from.
      vocab_size: V.
      num_layers: L.
      block: dimensions of every layer.
      tie_embeddings: the LM head is the embedding table transposed.
      max_positions: longest context that the target was made for, in tokens.
    """

    family: str
    vocab_size: int
    num_layers: int
    block: BlockConfig
    tie_embeddings: bool
    max_positions: int
