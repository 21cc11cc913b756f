"""What another implementation recorded on a tiny model (a "golden" directory), and how ours is compared.

DIR/drafter and DIR/target are Hugging Face directories; DIR/train.npz holds one training batch with what came
out of it, DIR/greedy_decode.json the rounds of greedy decoding (docs/checkpoints.md has every field).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from dspark_jax.checkpoints.drafter import LoadedDrafter, drafter_slots, load_drafter
from dspark_jax.checkpoints.drafter_formats import layer_config
from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.checkpoints.targets import open_source, read_params
from dspark_jax.core.errors import InputError
from dspark_jax.drafters.contract import Params, SharedWeights
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.decoder import embedding_table, lm_head_kernel

FORWARD_TOLERANCE = 2e-5
"""Largest error of a forward value; in units of the field's largest value where that is above 1."""
GRADIENT_TOLERANCE = 1e-4
"""Largest error of a gradient, relative to the largest entry of its parameter's gradient."""
EXACT = 0.0
"""Ids, masks and decoding traces: nothing may differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One recorded field against ours.

    Attributes:
      field: its name.
      error: the largest error, or the number of entries that differ.
      tolerance: largest error that passes.
    """

    field: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Within the tolerance; NaN is not."""
        return self.error <= self.tolerance


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenCase:
    """A golden directory, loaded as users load checkpoints.

    Attributes:
      loaded: the drafter.
      shared: the embedding and LM head that it uses.
      target: the target's dimensions, or None.
      target_params: its parameters, or None.
      train: the arrays of train.npz, or {}.
      decode: the content of greedy_decode.json, or {}.
    """

    loaded: LoadedDrafter
    shared: SharedWeights
    target: DecoderConfig | None
    target_params: Params | None
    train: dict[str, np.ndarray]
    decode: dict[str, Any]


def load_case(directory: Path) -> GoldenCase:
    """Reads a golden directory.

    Raises:
      InputError: there is no drafter, or nothing to compare it with.
    """
    train, decode = directory / "train.npz", directory / "greedy_decode.json"
    if not (train.exists() or decode.exists()):
        raise InputError(
            given=f"{directory} without train.npz and greedy_decode.json",
            expected="a golden directory: drafter/, target/, train.npz, greedy_decode.json",
            fix="record the values of the other implementation first; docs/checkpoints.md has the layout",
        )
    loaded = load_drafter(directory / "drafter")
    target, target_params = None, None
    embedding_VD, head_DV = loaded.embedding_VD, loaded.head_DV
    scaled_like = layer_config(SafetensorsDirectory(directory / "drafter").config, problems=[])
    if (directory / "target").is_dir():
        target, target_params = read_params(open_source(directory / "target"))
        scaled_like = target
        embedding_VD, head_DV = embedding_table(target_params), lm_head_kernel(target_params)
    if scaled_like is None or embedding_VD is None or head_DV is None:
        raise InputError(
            given=f"{directory} without target/, and a drafter without its own embedding and LM head",
            expected="one of the two",
            fix="add the target's directory",
        )
    return GoldenCase(
        loaded=loaded,
        shared=loaded.shared_weights(embedding_VD, head_DV, scaled_like.scaling),
        target=target,
        target_params=target_params,
        train=dict(np.load(train)) if train.exists() else {},
        decode=json.loads(decode.read_text()) if decode.exists() else {},
    )


def compare(field: str, ours_np: np.ndarray, theirs_np: np.ndarray, tolerance: float) -> Comparison:
    """The largest error of a field, or the number of differing entries where nothing may differ."""
    if tolerance == EXACT:
        return Comparison(field=field, error=float((ours_np != theirs_np).sum()), tolerance=EXACT)
    difference = np.abs(np.asarray(ours_np, np.float64) - theirs_np).max(initial=0.0)
    scale = max(1.0, np.abs(theirs_np).max(initial=0.0))
    return Comparison(field=field, error=float(difference / scale), tolerance=tolerance)


def compare_gradients(case: GoldenCase, gradients: Params) -> Iterator[Comparison]:
    """Every recorded gradient; a parameter whose gradient is not recorded is not compared.

    Raises:
      InputError: gradients of parameters that the drafter does not have.
    """
    slots = drafter_slots(case.loaded.drafter)
    recorded = {name.removeprefix("grad/") for name in case.train if name.startswith("grad/")}
    if unknown := sorted(recorded - slots.keys()):
        raise InputError(
            given=f"gradients of {unknown}",
            expected="gradients of the drafter's own parameters",
            fix="record the trained parameters under their names in the checkpoint",
        )
    flat = traverse_util.flatten_dict(gradients)
    for name in sorted(recorded):
        slot, theirs_np = slots[name], case.train[f"grad/{name}"]
        ours_np = np.asarray(flat[slot.path])
        difference = np.abs((ours_np.T if slot.transpose else ours_np) - theirs_np).max()
        scale = np.abs(theirs_np).max()
        error = float(difference / scale if scale else difference)
        yield Comparison(field=f"grad/{name}", error=error, tolerance=GRADIENT_TOLERANCE)


def compare_exactly(field: str, ours: Iterable[Any], theirs: Iterable[Any]) -> Comparison:
    """How many entries differ; what one of the two has beyond the other's end is not compared."""
    differing = sum(mine != other for mine, other in zip(ours, theirs, strict=False))
    return Comparison(field=field, error=float(differing), tolerance=EXACT)
