"""Files by name, whether they lie here or in a bucket (`gs://bucket/file`).

A local name is a path. Anything with a scheme goes to fsspec, which knows `gs://` once gcsfs is installed
(extra [gcs]). Whatever is written appears whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import IO, Any

import fsspec

from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write

Name = str | os.PathLike[str]


def is_remote(name: Name) -> bool:
    """Whether a name is a URL rather than a path."""
    return "://" in os.fspath(name)


def open_read(name: Name) -> IO[bytes]:
    """Opens a file for reading; it can seek.

    Raises:
      FileNotFoundError: there is none.
    """
    if not is_remote(name):
        return open(name, "rb")
    system, path = _resolve(name)
    return system.open(path, "rb")


def exists(name: Name) -> bool:
    """Whether there is such a file."""
    if not is_remote(name):
        return os.path.isfile(name)
    system, path = _resolve(name)
    return system.isfile(path)


def write(name: Name, chunks: Iterable[bytes]) -> None:
    """Writes a file; after a fault the old content is there, or none."""
    if not is_remote(name):
        with atomic_write(name) as file:
            file.writelines(chunks)
        return
    system, path = _resolve(name)
    # Closing an object makes it visible even after an exception, so it gets its name in a step of its own.
    unfinished = f"{path}.unfinished"
    with system.open(unfinished, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
    system.mv(unfinished, path)


def children(name: Name) -> list[str]:
    """Full names of the files directly under a remote folder, sorted; none where there is no folder."""
    system, path = _resolve(name)
    system.invalidate_cache()
    if not system.exists(path):
        return []
    return sorted(system.unstrip_protocol(found) for found in system.ls(path, detail=False))


def remove(name: Name) -> None:
    """Removes a file, or a remote folder with all that is in it; no error where there is none."""
    if not is_remote(name):
        if os.path.exists(name):
            os.unlink(name)
        return
    system, path = _resolve(name)
    if system.exists(path):
        system.rm(path, recursive=True)


def _resolve(name: Name) -> tuple[Any, str]:
    """The file system behind a URL, and the path in it."""
    try:
        return fsspec.core.url_to_fs(os.fspath(name))
    except (ImportError, ValueError) as error:
        raise InputError(
            given=f"{name}: {error}",
            expected="a path, or a URL whose file system is installed",
            fix="for gs:// install the extra: pip install 'dspark_jax[gcs]'",
        ) from error
