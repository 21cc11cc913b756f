"""What a target is: the frozen decoder whose distribution is reproduced."""

from __future__ import annotations

import dataclasses

from dspark_jax.nn.config import BlockConfig, TokenScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer.

    Attributes:
      family: Hugging Face `model_type` it was read from.
      vocab_size: V.
      layers: dimensions of every layer, all of one width.
      tie_embeddings: the LM head is the embedding table transposed.
      max_positions: longest context that the target was made for, in tokens.
      scaling: what happens to embeddings and logits.
    """

    family: str
    vocab_size: int
    layers: tuple[BlockConfig, ...]
    tie_embeddings: bool
    max_positions: int
    scaling: TokenScaling = dataclasses.field(default_factory=TokenScaling)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def block(self) -> BlockConfig:
        """Dimensions of the last layer, which sees the whole context, with one MLP in the place of experts.

        This is what a drafter's layers repeat.
        """
        return dataclasses.replace(self.layers[-1], experts=None)
