"""What the drafter learns from: the frozen target's features, hidden states and normalisers."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.decoder import Decoder


@flax.struct.dataclass
class TargetFeatures:
    """The target's view of a batch of sequences.

    Attributes:
      features_BTCD: raw outputs of the tapped layers.
      hidden_BTD: final-normed hidden states: times the LM head they are the logits.
      logz_BT: log-sum-exp of the logits over the whole vocabulary, float32.
    """

    features_BTCD: Array
    hidden_BTD: Array
    logz_BT: Array


def target_features(
    params: dict,
    tokens_BT: Array,
    *,
    config: DecoderConfig,
    taps: tuple[int, ...],
    dtype: DTypeLike,
    chunk: int = 64,
) -> TargetFeatures:
    """Runs the target without a cache; logits exist for `chunk` positions per sequence at a time."""
    decoder = Decoder(config, dtype)
    output: Any = decoder.apply({"params": params}, tokens_BT, taps=taps)
    B, T, D = output.hidden_BTD.shape
    padded_BTD = jnp.pad(output.hidden_BTD, ((0, 0), (0, -T % chunk), (0, 0)))
    chunks = padded_BTD.reshape(B, -1, chunk, D).swapaxes(0, 1)

    def normaliser(hidden_BcD: Array) -> Array:
        logits: Any = decoder.apply({"params": params}, hidden_BcD, method="unembed")
        return jax.nn.logsumexp(logits, axis=-1)

    logz_BT = jax.lax.map(normaliser, chunks).swapaxes(0, 1).reshape(B, -1)[:, :T]
    return jax.lax.stop_gradient(TargetFeatures(output.features_BTCD, output.hidden_BTD, logz_BT))
