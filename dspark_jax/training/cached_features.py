"""Whether a cache of DeepSpec holds the features of the target that it is used with."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.checkpoints.targets import LoadedTarget
from dspark_jax.core.distributed import place
from dspark_jax.core.errors import InputError
from dspark_jax.core.sharding import on_mesh, replicated
from dspark_jax.data.deepspec_cache import DeepSpecCache
from dspark_jax.targets.decoder import Decoder

TOKENS = 64
"""Tokens of the first sequence on which the target is run."""
TOLERANCE = 0.1
"""Largest relative error: some hundredths are the price of bfloat16, a wrong layer is far beyond."""


def check_cache(cache: DeepSpecCache, target: LoadedTarget, mesh: Mesh) -> None:
    """Runs the target on the beginning of the first sequence and compares.

    Raises:
      InputError: names every stored layer that is not what the target computes.
    """
    record = cache[0]
    tokens_1T = record.example.tokens_np[None, :TOKENS]

    def run(params, tokens_1T) -> Any:
        with on_mesh(mesh):
            return Decoder(target.config).apply({"params": params}, tokens_1T, taps=cache.taps)

    program = jax.jit(run, out_shardings=replicated(mesh))
    output = program(target.params, place(tokens_1T, replicated(mesh)))
    stored = dict(
        zip((f"layer {tap}" for tap in cache.taps), np.moveaxis(record.features_TCD_np, 1, 0), strict=True)
    )
    ours = dict(zip(stored, np.moveaxis(np.asarray(output.features_BTCD[0]), 1, 0), strict=True))
    stored["the final norm"], ours["the final norm"] = record.hidden_TD_np, np.asarray(output.hidden_BTD[0])
    errors = {name: _relative_error(array_np[:TOKENS], ours[name]) for name, array_np in stored.items()}
    wrong = [
        f"{name} (relative error {error:.2f})" for name, error in errors.items() if not error < TOLERANCE
    ]
    if wrong:
        raise InputError(
            given=f"{cache.directory} (target {cache.target_name}), where other values are stored for "
            + ", ".join(wrong),
            expected="features of the target of this run",
            fix="use the target with which the cache was made, or train with the target online",
        )


def _relative_error(stored_np: np.ndarray, ours_np: np.ndarray) -> float:
    ours_np = np.asarray(ours_np, np.float32)
    return float(np.linalg.norm(stored_np.astype(np.float32) - ours_np) / np.linalg.norm(ours_np))
