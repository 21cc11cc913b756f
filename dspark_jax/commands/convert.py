"""`dspark convert`: a drafter directory into the format of another project, or into ours."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from dspark_jax.checkpoints.convert import Format, TargetTensors, convert
from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.checkpoints.targets import open_source
from dspark_jax.drafters.config import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a drafter in another format; weights are copied bit by bit unless a dtype is asked for."""

    source: str
    """Drafter directory or hub id: dspark_jax, DeepSpec, or the original DFlash."""
    output: Path
    """New directory."""
    target: str
    """Its target: directory, hub id, .gguf file or embedded name; embedding and LM head are compared."""
    to: Literal["dspark_jax", "deepspec", "speculators"] = "dspark_jax"
    """Format to write: ours (without what equals the target's), DeepSpec's (with it), or of speculators."""
    layout: Literal["anchor-first", "fill-in"] | None = None
    """Which rows predict, for a source that does not name it and is not what its class says."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """dtype of the weights; by default as they are."""
    max_shard_gb: float = 5.0
    """Above this size the weights are written as several files with an index."""


def run(config: Convert) -> None:
    """Converts, and says what the drafter shares with its target."""
    done = convert(
        SafetensorsDirectory(config.source),
        config.output,
        to=Format(config.to),
        target=TargetTensors(open_source(config.target), config.target),
        layout=None if config.layout is None else Layout(config.layout),
        dtype=config.dtype,
        max_shard_bytes=int(config.max_shard_gb * 1e9),
    )
    layout = getattr(done.config, "layout", None)
    print(
        f"{type(done.config).__name__.removesuffix('Config')}, {done.dtype}"
        + (f", {layout}" if layout else "")
    )
    for what, names in (("the target's", done.shared), ("its own", done.own)):
        if names:
            print(f"{what}: {', '.join(names)}")
    print(f"wrote {config.output}")
