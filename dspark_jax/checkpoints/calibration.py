"""Calibration files: temperatures of the confidence head, bound to what they were measured on.

A calibration belongs to one target, drafter, way of sampling and numerics (spec section 7). A file that does
not match is refused by name, never used silently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write

VERSION = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationIdentity:
    """What temperatures are true for."""

    target: str
    """The target's identity, as its checkpoint source states it."""
    drafter: str
    """Fingerprint of the drafter's files."""
    template: str
    """Name of the chat template, in its mode."""
    sampling: str
    """How tokens are drawn, in words (`SamplingOptions.law`)."""
    numerics: str
    """dtype of the models and platform."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The content of a calibration file."""

    identity: CalibrationIdentity
    temperatures: tuple[float, ...]
    """T_1 .. T_G of Sequential Temperature Scaling."""
    shifts: tuple[float, ...]
    """Added to the scaled confidence logits, one for each position."""
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Figures for the reader, such as rounds and errors before and after; nothing computes with them."""

    @property
    def scaling_np(self) -> np.ndarray:
        """[2, G], as `speculation.calibration` has it."""
        return np.array([self.temperatures, self.shifts])

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "w") as file:
            json.dump({"version": VERSION, **dataclasses.asdict(self)}, file, indent=2, allow_nan=False)


def find_calibration(directory: Path, expected: CalibrationIdentity, *, block_len: int) -> Calibration | None:
    """The calibration beside a drafter (calibration*.json) that is for exactly this, or None."""
    for path in sorted(directory.glob("calibration*.json")):
        with contextlib.suppress(InputError):
            return load_calibration(path, expected, block_len=block_len)
    return None


def load_calibration(path: Path, expected: CalibrationIdentity, *, block_len: int) -> Calibration:
    """Reads a calibration for these models.

    Raises:
      InputError: no such file, or one that was measured on something else.
    """
    try:
        content = json.loads(path.read_text())
        found = Calibration(
            identity=CalibrationIdentity(**content["identity"]),
            temperatures=tuple(map(float, content["temperatures"])),
            shifts=tuple(map(float, content["shifts"])),
            evidence=content["evidence"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            given=f"{path}: {error!r}",
            expected="a calibration file",
            fix="write one with `dspark calibrate`",
        ) from error
    problems = [
        f"{field.name} {getattr(found.identity, field.name)!r} instead of {getattr(expected, field.name)!r}"
        for field in dataclasses.fields(CalibrationIdentity)
        if getattr(found.identity, field.name) != getattr(expected, field.name)
    ]
    if content.get("version") != VERSION:
        problems.append(f"version {content.get('version')} instead of {VERSION}")
    if {len(found.temperatures), len(found.shifts)} != {block_len}:
        problems.append(f"{len(found.temperatures)} temperatures for blocks of {block_len}")
    elif not (np.isfinite(found.scaling_np).all() and min(found.temperatures) > 0):
        problems.append(f"temperatures {found.temperatures}, shifts {found.shifts}")
    if problems:
        raise InputError(
            given=f"{path}, a calibration of {'; '.join(problems)}",
            expected="one of these models, options and numerics",
            fix="calibrate again with `dspark calibrate`",
        )
    return found
