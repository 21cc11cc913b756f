"""Where and when a figure was measured; a number without this is an anecdote."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("dspark_jax", "jax", "jaxlib", "flax", "numpy", "transformers")


def provenance() -> dict[str, Any]:
    """Date, machine and versions, plain JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": platform.system(),
            "devices": sorted({device.device_kind for device in jax.devices()}),
        },
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
    }


def plain_settings(config: Any) -> dict[str, Any]:
    """The settings of a command, a dataclass, as plain JSON; paths become text."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # Linux; elsewhere platform knows
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
