"""A mixture of experts: each token passes through the few gated MLPs that its router chooses.

Rows are sorted by expert, so that each expert multiplies all of its rows at once (`jax.lax.ragged_dot`); no
token is dropped. A mesh axis divides the experts, and outside of here the tokens: these are gathered before,
and what the experts made of them is added up and divided again after. Tokens travel, weights do not.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from dspark_jax.core.sharding import by_device, divided_over
from dspark_jax.nn.config import Activation, Experts
from dspark_jax.nn.layers import ACTIVATIONS, Linear, kernel_init, parameter


class ExpertsMLP(nn.Module):
    """The sum of a token's experts, weighted by the router's softmax over all of them.

    Attributes:
      width: residual width D.
      experts: how many there are, and how wide.
      dtype: dtype in which the experts' products read their inputs; the router's are float32.
      activation: of the gates.
    """

    width: int
    experts: Experts
    dtype: DTypeLike = jnp.float32
    activation: Activation = "silu"

    def setup(self):
        E, D, F = self.experts.number, self.width, self.experts.width
        up, down = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        self.router = Linear(D, E, ("embed", None))
        self.gate_kernel = parameter(self, "gate_kernel", kernel_init, up, E, D, F)
        self.up_kernel = parameter(self, "up_kernel", kernel_init, up, E, D, F)
        self.down_kernel = parameter(self, "down_kernel", kernel_init, down, E, F, D)

    def __call__(self, x: Array) -> Array:
        """[B, ..., D] -> [B, ..., D], float32."""
        weights, ids = jax.lax.top_k(jax.nn.softmax(self.router(x)), self.experts.per_token)
        if self.experts.normalise:
            weights = weights / weights.sum(-1, keepdims=True)
        batch = divided_over("batch", x.shape[0])
        expert = divided_over("expert", self.experts.number)
        mlp = divided_over("mlp", self.experts.width)
        rows, up, down = PartitionSpec(batch), PartitionSpec(expert, None, mlp), PartitionSpec(expert, mlp)
        mixture = functools.partial(
            _mixture,
            activation=self.activation,
            expert=expert,
            mlp=mlp,
            tokens=tuple(axis for axis in expert if axis in batch),
        )
        kernels = (
            kernel.astype(self.dtype) for kernel in (self.gate_kernel, self.up_kernel, self.down_kernel)
        )
        return by_device(mixture, (rows, rows, rows, up, up, down), rows)(
            x.astype(self.dtype), ids, weights, *kernels
        )


def _mixture(
    x: Array,
    ids: Array,
    weights: Array,
    *kernels: Array,
    activation: Activation,
    expert: tuple[str, ...],
    mlp: tuple[str, ...],
    tokens: tuple[str, ...],
) -> Array:
    """One device's tokens [B, ..., D] through all experts; its own part of these is `kernels`.

    Args:
      x: the tokens.
      ids: their experts [B, ..., K].
      weights: the weights of these.
      *kernels: gate and up [E, D, F], down [E, F, D], of this device.
      activation: of the gates.
      expert: mesh axes that divide the experts.
      mlp: mesh axes that divide F.
      tokens: which of `expert` divide the tokens, too.
    """
    if tokens:
        x, ids, weights = (jax.lax.all_gather(a, tokens, tiled=True) for a in (x, ids, weights))
    if expert:
        ids = ids - jax.lax.axis_index(expert) * len(kernels[0])
    rows = (a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
    mixed = own_experts(*rows, *kernels, activation=activation).reshape(x.shape)
    if tokens:
        return jax.lax.psum_scatter(jax.lax.psum(mixed, mlp) if mlp else mixed, tokens, tiled=True)
    summed = expert + mlp
    return jax.lax.psum(mixed, summed) if summed else mixed


def own_experts(
    x_TD: Array,
    ids_TK: Array,
    weights_TK: Array,
    gate_EDF: Array,
    up_EDF: Array,
    down_EFD: Array,
    *,
    activation: Activation,
) -> Array:
    """What E experts add to T tokens [T, D], float32; ids outside 0..E-1 are other devices' experts."""
    T, K = ids_TK.shape
    E = len(gate_EDF)
    is_own_TK = (ids_TK >= 0) & (ids_TK < E)
    expert_N = jnp.where(is_own_TK, ids_TK, E).reshape(-1)
    order_N = jnp.argsort(expert_N, stable=True)  # the others' rows come last, in no group
    sizes_E = jnp.bincount(expert_N, length=E).astype(jnp.int32)
    product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes_E, preferred_element_type=jnp.float32)
    rows_ND = x_TD[order_N // K]
    inner_NF = ACTIVATIONS[activation](product(rows_ND, gate_EDF)) * product(rows_ND, up_EDF)
    out_ND = product(inner_NF.astype(x_TD.dtype), down_EFD)
    back_TK = jnp.argsort(order_N).reshape(T, K)
    # What stands in the rows of no group is not defined.
    out_TKD = jnp.where(is_own_TK[..., None], out_ND[back_TK] * weights_TK[..., None], 0.0)
    return out_TKD.sum(1)
