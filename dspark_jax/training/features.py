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


@flax.struct.dataclass
class UnnormalisedFeatures:
    """The same from a store without normalisers.

    Attributes:
      features_BTCD: raw outputs of the tapped layers.
      hidden_BTD: final-normed hidden states.
    """

    features_BTCD: Array
    hidden_BTD: Array


def target_features(
    params: dict,
    tokens_BT: Array,
    *,
    config: DecoderConfig,
    taps: tuple[int, ...],
    dtype: DTypeLike,
) -> TargetFeatures:
    """Runs the target without a cache."""
    output: Any = Decoder(config, dtype).apply({"params": params}, tokens_BT, taps=taps)
    logz_BT = log_normalisers(params, output.hidden_BTD, config=config, dtype=dtype)
    return jax.lax.stop_gradient(TargetFeatures(output.features_BTCD, output.hidden_BTD, logz_BT))


def log_normalisers(
    params: dict, hidden_BTD: Array, *, config: DecoderConfig, dtype: DTypeLike, chunk: int = 64
) -> Array:
    """Log-sum-exp of the target's logits [B, T], of which `chunk` per sequence exist at a time."""
    decoder = Decoder(config, dtype)
    B, T, D = hidden_BTD.shape
    padded_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, -T % chunk), (0, 0)))
    chunks = padded_BTD.reshape(B, -1, chunk, D).swapaxes(0, 1)

    def normaliser(hidden_BcD: Array) -> Array:
        logits: Any = decoder.apply({"params": params}, hidden_BcD, method="unembed")
        return jax.nn.logsumexp(logits, axis=-1)

    return jax.lax.stop_gradient(jax.lax.map(normaliser, chunks).swapaxes(0, 1).reshape(B, -1)[:, :T])
