"""What every test runs on: the CPU as eight devices, no network, compiled programs kept between runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest

from dspark_jax.core.user_cache import cache_directory, cpu_fingerprint


def _compilation_cache() -> Path | None:
    """A folder that belongs to these tests alone, or None where none can be written."""
    folder = cache_directory() / "pytest" / cpu_fingerprint()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


os.environ.update(
    JAX_PLATFORMS="cpu",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    # XLA sizes its thread pool by this; with fewer threads than launches queued on the virtual devices,
    # programs with collectives can wait for one another for ever.
    NPROC="16",
)
if cache := _compilation_cache():
    # Environment rather than jax.config, so that the commands which tests start as processes share it.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2 * 1024**3))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

if "jax" in sys.modules:
    raise RuntimeError("a pytest plugin imported jax before tests/conftest.py: switch it off with -p no:NAME")

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)

# A first call compiles, so a deadline would say nothing; failures must come back on every machine.
hypothesis.settings.register_profile("dspark", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dspark")


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """Programs that run for milliseconds are not worth seconds of LLVM's optimiser."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def tpu_devices() -> Callable[..., Sequence]:
    """Devices of a topology to compile for; the test is skipped where there is no TPU compiler."""
    if "CI" not in os.environ:  # there they must run
        pytest.importorskip("libtpu", reason="no TPU compiler: pip install 'dspark_jax[tpu]' on Linux x86-64")
    from dspark_jax.core.topology import tpu_devices

    return tpu_devices
