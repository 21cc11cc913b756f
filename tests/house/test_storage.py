"""Files here and in a bucket behave alike; the bucket lies in memory."""

from __future__ import annotations

import pytest

from dspark_jax.core import storage
from dspark_jax.core.errors import InputError


@pytest.fixture(params=["local", "remote"])
def folder(request, tmp_path):
    if request.param == "local":
        yield str(tmp_path)
    else:
        yield "memory://bucket"
        storage.remove("memory://bucket")


def test_write_read_remove(folder):
    name = f"{folder}/a.txt"
    assert not storage.exists(name)
    storage.write(name, [b"one\n", b"two\n"])
    storage.write(name, [b"three\n", b"four\n"])

    with storage.open_read(name) as file:
        assert list(file) == [b"three\n", b"four\n"]
        file.seek(6)
        assert file.readline() == b"four\n"
    storage.remove(name)
    storage.remove(name)
    assert not storage.exists(name)
    with pytest.raises(FileNotFoundError):
        storage.open_read(name)


def test_half_a_write_is_none(folder):
    def chunks():
        yield b"half"
        raise RuntimeError

    name = f"{folder}/a.txt"
    storage.write(name, [b"old"])
    with pytest.raises(RuntimeError):
        storage.write(name, chunks())

    with storage.open_read(name) as file:
        assert file.read() == b"old"


def test_children():
    assert storage.children("memory://bucket/nothing") == []
    for name in ("b", "a"):
        storage.write(f"memory://bucket/folder/{name}", [b""])
    found = storage.children("memory://bucket/folder")
    assert [name.rpartition("/")[2] for name in found] == ["a", "b"]
    storage.remove("memory://bucket/folder")
    assert storage.children("memory://bucket/folder") == []


def test_an_unknown_scheme():
    with pytest.raises(InputError, match="whose file system is installed"):
        storage.exists("nowhere://bucket/a")
