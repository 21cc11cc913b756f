"""A few numbers by which a layer of a target is recognised: does a tap read the layer it was trained on?

One tap of several that is one layer off costs a drafter next to nothing, so no trial of it shows that.
Training writes a sketch of what every tap reads on fixed tokens into config.json; at load all layers are
sketched in one short pass, and compared.

A sketch is made of what a layer adds to the residual stream, not of the stream itself, which changes slowly,
and of signed roots, since a few dimensions are huge. Similarity is the cosine. Measured on SmolLM2 (all 31
layers): a layer to itself 1.00, served in bfloat16 1.00, with noise of 5 % / 10 % of their deviation in all
matrices 0.85 / 0.57 and above; to any other layer at most 0.48, with noise 0.61.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dspark_jax.core.distributed import run_together
from dspark_jax.core.sharding import mesh_of, on_mesh, replicated
from dspark_jax.drafters.contract import Params
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.decoder import EMBEDDING_TAP, Decoder

SKETCHES = "tap_sketches"
"""The field of config.json that holds them. Only ours."""
TOKENS = 16
LAST = 4
"""Tokens of the sequence whose outputs are sketched: the first ones are unlike all others."""
PROJECTIONS = 8
SKETCH_SIZE = LAST * PROJECTIONS
DIGITS = 2
ALIKE = 0.7
"""Above this similarity it is the same layer of the same target."""
APART = 0.15
"""Lead in similarity of another layer that names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TapMatch:
    """One tap of a drafter against the layers of a target.

    Attributes:
      number: its place among the taps, from 0.
      layer: the layer that it reads.
      similarity: of that layer to the sketch, at most 1.
      nearest: the layer that is most like the sketch.
      nearest_similarity: its similarity.
    """

    number: int
    layer: int
    similarity: float
    nearest: int
    nearest_similarity: float

    @property
    def reads_another(self) -> bool:
        """Whether the tap was trained on another layer of this target."""
        return self.nearest_similarity >= ALIKE and self.nearest_similarity - self.similarity >= APART

    @property
    def recognised(self) -> bool:
        """Whether the layer is the one that was sketched."""
        return self.similarity >= ALIKE


def layer_sketches(config: DecoderConfig, params: Params) -> np.ndarray:
    """Sketches [L + 1, S] of the embedding and of all layers, on every process.

    Args:
      config: the target's dimensions.
      params: its parameters, wherever they lie.
    """
    mesh = mesh_of(params)
    tokens_1T = np.arange(1, TOKENS + 1)[None] * 2654435761 % config.vocab_size  # spread over the vocabulary
    signs_DP = np.random.RandomState(0).choice([-1.0, 1.0], size=(config.block.width, PROJECTIONS))

    def sketch(params: Params) -> Array:
        with on_mesh(mesh):
            output = Decoder(config, params["embedding"].dtype).apply(
                {"params": params},
                jnp.asarray(tokens_1T, jnp.int32),
                taps=tuple(range(EMBEDDING_TAP, config.num_layers)),
            )
        outputs_TCD = output.features_BTCD[0, -LAST:].astype(jnp.float32)  # type: ignore[union-attr]
        added_TCD = jnp.diff(outputs_TCD, axis=1, prepend=0.0)
        roots_TCD = jnp.sign(added_TCD) * jnp.sqrt(jnp.abs(added_TCD))
        unit_TCD = roots_TCD / (jnp.linalg.norm(roots_TCD, axis=-1, keepdims=True) + 1e-9)
        return (unit_TCD @ signs_DP.astype(np.float32)).swapaxes(0, 1).reshape(-1, SKETCH_SIZE)

    program = jax.jit(sketch) if mesh is None else jax.jit(sketch, out_shardings=replicated(mesh))
    return np.asarray(jax.device_get(run_together(program, params)), np.float64).round(DIGITS)


def match_taps(taps: tuple[int, ...], recorded_CS: np.ndarray, layers_LS: np.ndarray) -> list[TapMatch]:
    """Every tap against all layers.

    Args:
      taps: layers that the drafter reads.
      recorded_CS: sketches of what its taps read when it was trained.
      layers_LS: sketches of this target, as `layer_sketches` makes them.
    """
    similarity_CL = _unit(recorded_CS) @ _unit(layers_LS).T
    return [
        TapMatch(
            number=number,
            layer=tap,
            similarity=float(similarity_L[tap - EMBEDDING_TAP]),
            nearest=int(similarity_L.argmax()) + EMBEDDING_TAP,
            nearest_similarity=float(similarity_L.max()),
        )
        for number, (tap, similarity_L) in enumerate(zip(taps, similarity_CL, strict=True))
    ]


def sketches_of(taps: tuple[int, ...], layers_LS: np.ndarray) -> np.ndarray:
    """The sketches [C, S] that a drafter with these taps records."""
    return layers_LS[np.asarray(taps) - EMBEDDING_TAP]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-9)
