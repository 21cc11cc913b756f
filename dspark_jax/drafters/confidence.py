"""The confidence head: how likely is this row's token to be accepted, given that all before it were?"""

from __future__ import annotations

import flax.linen as nn
from jax import Array

from dspark_jax.nn.layers import kernel_init, parameter


class ConfidenceHead(nn.Module):
    """logit = w . x + b, with x = [h; W1[prev]] or h.

    Attributes:
      size: width of x.
    """

    size: int

    def setup(self):
        self.kernel = parameter(self, "kernel", kernel_init, ("embed", None), self.size, 1)
        self.bias = parameter(self, "bias", nn.initializers.zeros, (None,), 1)

    def __call__(self, x: Array) -> Array:
        """[..., size] -> logits [...]."""
        return (x @ self.kernel + self.bias)[..., 0]
