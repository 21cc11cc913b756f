"""The small building blocks: embedding lookup, linear projection, RMS norm, gated MLP, soft cap.

Each parameter's shape, dtype, logical axes and initialiser are written once, here, beside the parameter.
Matrix products read `dtype` inputs and accumulate in float32; the results stay float32. (On CPU a bfloat16
result would make XLA cast the weights again at every call, see docs/architecture.md.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.core.sharding import by_sequence, whole_width
from dspark_jax.nn.config import Activation

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}

kernel_init = nn.initializers.normal(0.02)


def parameter(
    module: nn.Module, name: str, init: Callable, axes: tuple[str | None, ...], *shape: int
) -> Array:
    """Declares a float32 parameter of `module`, boxed with its logical axes while it is being created."""
    value: Any = module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)
    return value


class Linear(nn.Module):
    """y = x W (+ b), with W stored [in, out]."""

    features_in: int
    features_out: int
    axes: tuple[str | None, str | None]
    use_bias: bool = False
    dtype: DTypeLike = jnp.float32

    def setup(self):
        self.kernel = parameter(self, "kernel", kernel_init, self.axes, self.features_in, self.features_out)
        if self.use_bias:
            self.bias = parameter(self, "bias", nn.initializers.zeros, self.axes[1:], self.features_out)

    def __call__(self, x: Array) -> Array:
        """[..., in] -> [..., out], float32."""
        y = project(x, whole_width(self.kernel, self.axes), dtype=self.dtype)
        return y + self.bias if self.use_bias else y


def project(x: Array, kernel: Array, *, dtype: DTypeLike) -> Array:
    """x [..., in] times kernel [in, out], read in `dtype`, accumulated and returned in float32."""
    return jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, in float32."""

    size: int
    eps: float

    def setup(self):
        self.scale = parameter(self, "scale", nn.initializers.ones, ("norm",), self.size)

    def __call__(self, x: Array) -> Array:
        return unit_rms(x, self.eps) * self.scale


def unit_rms(x: Array, eps: float) -> Array:
    """x / rms(x) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def embed(table_VD: Array, tokens: Array, scale: float = 1.0) -> Array:
    """Rows [..., D] of the embedding table for ids [...], times `scale`; float32.

    The scale is rounded to the table's dtype, as it was when Gemma was trained (bfloat16: 62 for D = 3840).
    """
    rounded = jnp.asarray(scale, table_VD.dtype).astype(jnp.float32)
    return by_sequence(table_VD[tokens]).astype(jnp.float32) * rounded


def soft_cap(logits: Array, cap: float | None) -> Array:
    """cap tanh(logits / cap), or the logits themselves."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    width: int
    mlp_width: int
    use_bias: bool = False
    dtype: DTypeLike = jnp.float32
    activation: Activation = "silu"

    def setup(self):
        def projection(features_in, features_out, axes):
            return Linear(features_in, features_out, axes, self.use_bias, self.dtype)

        self.gate = projection(self.width, self.mlp_width, ("embed", "mlp"))
        self.up = projection(self.width, self.mlp_width, ("embed", "mlp"))
        self.down = projection(self.mlp_width, self.width, ("mlp", "embed"))

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]."""
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))
