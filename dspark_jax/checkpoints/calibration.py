"""Calibration files: temperatures of the confidence head, bound to what they were measured on.

A calibration belongs to one target, drafter, way of sampling and numerics (spec section 7). A file that does
not match is refused by name, never used silently.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write

VERSION = 1


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
    """Sampling options, canonical text."""
    numerics: str
    """dtype of the models and platform."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The content of a calibration file."""

    identity: CalibrationIdentity
    temperatures: tuple[float, ...]
    """T_1 .. T_G of Sequential Temperature Scaling."""
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Figures for the reader, such as rounds and errors before and after; nothing computes with them."""

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "w") as file:
            json.dump({"version": VERSION, **dataclasses.asdict(self)}, file, indent=2, allow_nan=False)


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
    if len(found.temperatures) != block_len or not all(0 < T < float("inf") for T in found.temperatures):
        problems.append(f"temperatures {found.temperatures} for blocks of {block_len}")
    if problems:
        raise InputError(
            given=f"{path}, a calibration of {'; '.join(problems)}",
            expected="one of these models, options and numerics",
            fix="calibrate again with `dspark calibrate`",
        )
    return found
