"""The foundations that everything else trusts: whole files, useful errors, independent randomness."""

from __future__ import annotations

import itertools
import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write
from dspark_jax.core.keys import Purpose, request_key, round_keys


class TestAtomicWrite:
    def test_new_content_replaces_the_old(self, tmp_path):
        path = tmp_path / "made" / "on" / "demand" / "state.json"
        for content in ("old", "new"):
            with atomic_write(path, "w") as file:
                file.write(content)

        assert path.read_text() == "new"
        assert os.listdir(path.parent) == ["state.json"]

    @pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt, SystemExit])
    def test_a_fault_while_writing_leaves_the_old_content(self, tmp_path, fault):
        path = tmp_path / "state.bin"
        path.write_bytes(b"old")

        with pytest.raises(fault), atomic_write(path) as file:
            file.write(b"half of the new cont")
            raise fault

        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["state.bin"]

    def test_a_fault_before_the_first_version_leaves_nothing(self, tmp_path):
        with pytest.raises(RuntimeError), atomic_write(tmp_path / "state.bin") as file:
            file.write(b"half")
            raise RuntimeError

        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_a_full_disk_leaves_the_old_content(self, tmp_path, monkeypatch, step):
        path = tmp_path / "state.bin"
        path.write_bytes(b"old")

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, step, full)
            with atomic_write(path) as file:
                file.write(b"new")

        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["state.bin"]

    def test_nothing_shows_under_the_name_before_the_end(self, tmp_path):
        path = tmp_path / "state.bin"
        with atomic_write(path) as file:
            file.write(b"new")
            file.flush()
            assert not path.exists()
        assert path.exists()

    def test_permissions_are_those_of_any_new_file(self, tmp_path):
        (tmp_path / "plain").touch()
        with atomic_write(tmp_path / "atomic"):
            pass

        plain, atomic = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic"))
        assert atomic == plain


def test_an_input_error_says_what_was_given_expected_and_to_do():
    parts = {
        "given": "line 3: temperature -1",
        "expected": "a number of at least 0",
        "fix": "use 0 for greedy",
    }
    error = InputError(**parts)

    assert isinstance(error, ValueError)
    assert {name: getattr(error, name) for name in parts} == parts
    assert all(part in str(error) for part in parts.values())


class TestKeys:
    def test_batch_mates_change_nothing(self):
        requests_B = jnp.stack([request_key(seed) for seed in (3, 1, 4, 1)])
        positions_B = jnp.array([5, 9, 2, 6], jnp.int32)

        together = bits(round_keys(requests_B, positions_B, Purpose.DRAFT))

        for rows in ([2, 0, 3, 1], [0], [1], [2], [3]):
            chosen = np.array(rows)
            apart = bits(round_keys(requests_B[chosen], positions_B[chosen], Purpose.DRAFT))
            assert apart == [together[row] for row in rows]

    def test_request_position_and_purpose_each_make_another_stream(self):
        streams = [
            bits(round_keys(request_key(seed, number)[None], jnp.array([position], jnp.int32), purpose))[0]
            for seed, number, position, purpose in itertools.product((0, 1), (0, 1), (0, 1, 2), Purpose)
        ]

        assert len(set(streams)) == len(streams) == 2 * 2 * 3 * len(Purpose)

    def test_compiled_and_plain_keys_agree(self):
        requests_B = jnp.stack([request_key(seed) for seed in range(3)])
        positions_B = jnp.arange(3, dtype=jnp.int32)

        compiled = jax.jit(round_keys, static_argnames="purpose")

        for purpose in Purpose:
            plain = round_keys(requests_B, positions_B, purpose)
            assert bits(compiled(requests_B, positions_B, purpose=purpose)) == bits(plain)


def bits(keys_B) -> list[tuple[int, ...]]:
    return [tuple(words) for words in jax.random.key_data(keys_B).tolist()]
