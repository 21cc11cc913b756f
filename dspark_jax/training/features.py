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
    """The same without normalisers: from a store that has none, or of a step, which needs few of them.

    Attributes:
      features_BTCD: raw outputs of the tapped layers.
      hidden_BTD: final-normed hidden states.
    """

    features_BTCD: Array
    hidden_BTD: Array


def target_features(
    params: dict,
    tokens_BT: Array,
    starts_BT: Array | None = None,
    *,
    config: DecoderConfig,
    taps: tuple[int, ...],
    dtype: DTypeLike,
) -> TargetFeatures:
    """Runs the target without a cache, and its LM head for the normaliser of every position."""
    found = hidden_features(params, tokens_BT, starts_BT, config=config, taps=taps, dtype=dtype)
    logz_BT = log_normalisers(params, found.hidden_BTD, config=config, dtype=dtype)
    return TargetFeatures(found.features_BTCD, found.hidden_BTD, logz_BT)


def hidden_features(
    params: dict,
    tokens_BT: Array,
    starts_BT: Array | None,
    *,
    config: DecoderConfig,
    taps: tuple[int, ...],
    dtype: DTypeLike,
    parts: int = 1,
) -> UnnormalisedFeatures:
    """Runs the target without a cache and without its LM head.

    Args:
      params: the target's parameters.
      tokens_BT: sequences.
      starts_BT: place where the document of every token starts; None: a sequence is one document.
      config: the target's dimensions.
      taps: layers whose outputs are the features.
      dtype: dtype in which matrix products read their inputs.
      parts: parts of the batch that are run one after the other; divides it.
    """

    def run(tokens_BT: Array, starts_BT: Array | None) -> UnnormalisedFeatures:
        output: Any = Decoder(config, dtype).apply(
            {"params": params}, tokens_BT, starts_BT=starts_BT, taps=taps
        )
        return UnnormalisedFeatures(output.features_BTCD, output.hidden_BTD)

    if parts == 1:
        return jax.lax.stop_gradient(run(tokens_BT, starts_BT))
    divided = jax.tree.map(lambda x: strided_parts(x, parts), (tokens_BT, starts_BT))
    found = jax.lax.map(lambda part: run(*part), divided)
    return jax.lax.stop_gradient(jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), found))


def strided_parts(x: Array, parts: int) -> Array:
    """[B, ...] -> [parts, B / parts, ...], every n-th row together: each part is spread over all devices."""
    return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)


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
