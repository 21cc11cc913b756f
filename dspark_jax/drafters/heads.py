"""Sequential heads: what the token before a row tells about the row's prediction.

Every head turns (hidden state, previous token) into a latent of rank R whose product with W2 is added to the
backbone's logits. Keeping the latent apart lets the loss fuse `latent W2` with the LM head, and lets the
decoder apply W2 to one row at a time. One `step` is the definition; `latents` scans it over a given block and
decoding scans it together with sampling.

Weights are parameters of the head itself, not of sub-modules: `setup` then makes them before the scan runs.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dspark_jax.drafters.config import RNN, Gated, Markov, SequentialHead
from dspark_jax.nn.layers import kernel_init, parameter

State = Any
"""What a head remembers from row to row: an array, or None for a head without memory."""


class MarkovHead(nn.Module):
    """latent = W1[prev] (DSpark eq. 5).

    Attributes:
      target_vocab_size: V, rows of W1.
      vocab_size: draft vocabulary, columns of W2.
      width: D of the hidden states.
      rank: R.
    """

    target_vocab_size: int
    vocab_size: int
    width: int
    rank: int

    def setup(self):
        V, R = self.target_vocab_size, self.rank
        self.w1 = parameter(self, "w1", kernel_init, ("token", "rank"), V, R)
        # W2 starts at zero, so that training starts from the bare backbone.
        self.w2 = parameter(self, "w2", nn.initializers.zeros, ("rank", "vocab"), R, self.vocab_size)
        self.setup_mixing()

    def setup_mixing(self):
        """Makes the parameters that a variant has beyond W1 and W2."""

    def embed(self, prev: Array) -> Array:
        """W1[prev]: ids [...] -> [..., R]."""
        return self.w1[prev]

    def initial_state(self, batch_shape: tuple[int, ...]) -> State:
        """The state before the first row of a block; None for a head without memory."""
        return None

    def step(self, state: State, hidden: Array, prev: Array) -> tuple[State, Array]:
        """(state, hidden [..., D], prev [...]) -> (state, latent [..., R])."""
        return state, self.embed(prev)

    def latents(self, hidden_xGD: Array, prev_xG: Array) -> Array:
        """Latents [..., G, R] of whole blocks whose previous tokens are known (training)."""

        def body(state, row):
            return self.step(state, *row)

        rows = (jnp.moveaxis(hidden_xGD, -2, 0), jnp.moveaxis(prev_xG, -1, 0))
        _, latents = jax.lax.scan(body, self.initial_state(prev_xG.shape[:-1]), rows)
        return jnp.moveaxis(latents, 0, -2)


class GatedHead(MarkovHead):
    """latent = sigmoid(Wg [h; W1[prev]] + b) * W1[prev]."""

    def setup_mixing(self):
        D, R = self.width, self.rank
        self.gate_kernel = parameter(self, "gate_kernel", kernel_init, ("embed", "rank"), D + R, R)
        self.gate_bias = parameter(self, "gate_bias", nn.initializers.zeros, ("rank",), R)

    def step(self, state: State, hidden: Array, prev: Array) -> tuple[State, Array]:
        embedded = self.embed(prev)
        gate = jnp.concatenate([hidden, embedded], axis=-1) @ self.gate_kernel + self.gate_bias
        return state, jax.nn.sigmoid(gate) * embedded


class RNNHead(MarkovHead):
    """z = [s; W1[prev]; h]; s' = g s + (1 - g) tanh(candidate); latent = tanh(output) (DSpark eq. 6)."""

    def setup_mixing(self):
        D, R = self.width, self.rank
        self.joint_kernel = parameter(self, "joint_kernel", kernel_init, ("embed", None), 2 * R + D, 3 * R)
        self.joint_bias = parameter(self, "joint_bias", nn.initializers.zeros, (None,), 3 * R)

    def initial_state(self, batch_shape: tuple[int, ...]) -> State:
        return jnp.zeros((*batch_shape, self.rank), jnp.float32)

    def step(self, state: State, hidden: Array, prev: Array) -> tuple[State, Array]:
        joint = jnp.concatenate([state, self.embed(prev), hidden], axis=-1)
        gate, candidate, output = jnp.split(joint @ self.joint_kernel + self.joint_bias, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(output)


HEADS: dict[type, type[MarkovHead]] = {Markov: MarkovHead, Gated: GatedHead, RNN: RNNHead}


def make_head(config: SequentialHead, *, target_vocab_size: int, vocab_size: int, width: int) -> MarkovHead:
    """The module that a head's configuration describes."""
    return HEADS[type(config)](target_vocab_size, vocab_size, width, config.rank)
