"""The small building blocks: linear projection, RMS norm, gated MLP.

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
        y = project(x, self.kernel, dtype=self.dtype)
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
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.scale


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    width: int
    mlp_width: int
    use_bias: bool = False
    dtype: DTypeLike = jnp.float32

    def setup(self):
        def projection(features_in, features_out, axes):
            return Linear(features_in, features_out, axes, self.use_bias, self.dtype)

        self.gate = projection(self.width, self.mlp_width, ("embed", "mlp"))
        self.up = projection(self.width, self.mlp_width, ("embed", "mlp"))
        self.down = projection(self.mlp_width, self.width, ("mlp", "embed"))

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
