"""What is kept for this user between runs: the fetched model, compiled programs, measured costs."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

SHORTEST_COMPILE_S = 0.5
"""Programs that compile faster are not kept."""


def cache_directory() -> Path:
    """DSPARK_CACHE, or dspark_jax in XDG_CACHE_HOME, or in ~/.cache."""
    if chosen := os.environ.get("DSPARK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark_jax"


def cpu_fingerprint() -> str:
    """Programs compiled for one CPU may crash on another that shares the home directory."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def keep_compiled_programs() -> None:
    """Lets JAX keep what it compiles for the next run, unless a place was chosen already."""
    import jax  # here, so that others may ask for directories before JAX reads its environment

    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update(
            "jax_compilation_cache_dir", str(cache_directory() / "compiled" / cpu_fingerprint())
        )
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_COMPILE_S)
