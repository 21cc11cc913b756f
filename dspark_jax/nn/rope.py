"""Rotary position embeddings, in the half-split layout of Hugging Face checkpoints.

A variant is a type; all of them turn frequencies into angles in the same way and differ only in
`inverse_frequencies` and `amplitude`. Formulas follow the public definitions of each method: RoPE
(arXiv 2104.09864), position interpolation (2306.15595), YaRN (2309.00071), and Llama 3.1's wavelength ramp.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class DefaultRope:
    """Plain RoPE: frequency i is theta^(-2i/H)."""

    theta: float

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position [H/2], float64."""
        return self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin (YaRN's attention temperature; 1 elsewhere)."""
        return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRope(DefaultRope):
    """Position interpolation: every frequency divided by `factor`."""

    factor: float

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        return super().inverse_frequencies(head_dim) / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalRope(DefaultRope):
    """Gemma 4: the slowest pairs of a head do not turn; the others keep the frequencies of the whole head."""

    factor: float = 1.0
    partial_rotary_factor: float = 1.0

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        plain = super().inverse_frequencies(head_dim) / self.factor
        turning = int(self.partial_rotary_factor * head_dim // 2)
        return np.where(np.arange(len(plain)) < turning, plain, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope(DefaultRope):
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        plain = super().inverse_frequencies(head_dim)
        turns = self.original_max_positions * plain / (2 * math.pi)
        keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return plain * (keep + (1 - keep) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRope(DefaultRope):
    """YaRN: frequencies that turn seldom are interpolated, fast ones kept; cos and sin are scaled."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        plain = super().inverse_frequencies(head_dim)

        def pair_with_turns(turns: float) -> float:
            positions_per_radian = self.original_max_positions / (turns * 2 * math.pi)
            return head_dim * math.log(positions_per_radian) / (2 * math.log(self.theta))

        first, last = pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        last = last + 0.001 if first == last else last
        interpolate = np.clip((np.arange(head_dim // 2) - first) / (last - first), 0, 1)
        return plain * (1 - interpolate + interpolate / self.factor)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


Rope = DefaultRope | LinearRope | ProportionalRope | Llama3Rope | YarnRope


def rope_angles(rope: Rope, head_dim: int, positions_BT: Array) -> tuple[Array, Array]:
    """cos and sin [B, T, 1, H] (float32) for integer positions [B, T]; one axis is left for the heads."""
    frequencies = jnp.asarray(rope.inverse_frequencies(head_dim), jnp.float32)
    angles = positions_BT.astype(jnp.float32)[..., None, None] * jnp.concatenate([frequencies, frequencies])
    return jnp.cos(angles) * rope.amplitude, jnp.sin(angles) * rope.amplitude


def apply_rope(x_BTNH: Array, angles: tuple[Array, Array]) -> Array:
    """Rotates the pairs (i, i + H/2) of every head."""
    cos, sin = angles
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    rotated = jnp.concatenate([-second, first], axis=-1)
    return (x_BTNH * cos + rotated * sin).astype(x_BTNH.dtype)
