"""DeepSpec's feature caches: read bit by bit where they lie, refused when they are not what they say."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.data.deepspec_cache import DeepSpecCache, is_deepspec_cache
from dspark_jax.data.pipeline import DataConfig, training_batches

TAPS, WIDTH = (-1, 4, 9), 6
LENGTHS = (7, 12, 5, 9)


def sample(number: int, padding: int = 0) -> tuple[np.ndarray, ...]:
    """ids, attention mask, loss mask, features [T, C D], final hidden states [T, D]."""
    rng = np.random.default_rng(number)
    T = LENGTHS[number] + padding
    bits = rng.integers(0, 2**16, (T, len(TAPS) + 1, WIDTH), np.uint16).view(ml_dtypes.bfloat16)
    return (
        rng.integers(0, 2**31, T, np.int32),
        (np.arange(T) < LENGTHS[number]).astype(np.uint8),
        (rng.random(T) < 0.7).astype(np.uint8),
        bits[:, :-1].reshape(T, -1),
        bits[:, -1],
    )


def write_cache(directory: Path, samples: list[tuple[np.ndarray, ...]], **changes) -> Path:
    """The files as the format says, two samples to a shard; `changes` go into the manifest."""
    directory.mkdir(exist_ok=True)
    shards, index = [b""], b""
    for number, arrays in enumerate(samples):
        if number and number % 2 == 0:
            shards.append(b"")
        offsets = []
        for array in arrays:
            offsets.append(len(shards[-1]))
            shards[-1] += array.tobytes()
        index += struct.pack("<QIIQQQQQ", 100 + number, len(shards) - 1, len(arrays[0]), *offsets)
    (directory / "samples.idx").write_bytes(index)
    for number, content in enumerate(shards):
        (directory / f"shard-{number:05d}.bin").write_bytes(content)
    manifest = {
        "version": 2,
        "num_samples": len(samples),
        "num_shards": len(shards),
        "target_layer_ids": list(TAPS),
        "hidden_size": WIDTH,
        "hidden_dtype": "bfloat16",
        "target_model_name_or_path": "tiny",
        "shards": [{"shard_id": n, "file_name": f"shard-{n:05d}.bin"} for n in range(len(shards))],
        **changes,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


@pytest.fixture
def cache(tmp_path) -> Path:
    return write_cache(tmp_path / "cache", [sample(number) for number in range(4)])


def test_every_bit_of_every_sample(cache):
    assert is_deepspec_cache(cache) and not is_deepspec_cache(cache.parent)
    read = DeepSpecCache(cache)
    assert read.ids == ("100", "101", "102", "103") and read.target_name == "tiny"
    assert read.lengths_tokens_np.tolist() == list(LENGTHS)
    for number, record in enumerate(read):
        ids, _, loss_mask, features, hidden = sample(number)
        assert record.example.tokens_np.tobytes() == ids.tobytes()
        assert record.example.loss_mask_np.dtype == np.bool_
        assert record.example.loss_mask_np.tolist() == loss_mask.astype(bool).tolist()
        assert record.features_TCD_np.shape == (LENGTHS[number], len(TAPS), WIDTH)
        assert record.features_TCD_np.tobytes() == features.tobytes()
        assert record.hidden_TD_np.tobytes() == hidden.tobytes()
        assert record.logz_T_np is None


def test_nothing_is_copied(cache):
    read = DeepSpecCache(cache)
    for record in read:
        arrays = (
            record.example.tokens_np,
            record.example.loss_mask_np,
            record.features_TCD_np,
            record.hidden_TD_np,
        )
        shard = read._shard(0 if record.example.id in ("100", "101") else 1)
        assert all(np.shares_memory(array, shard) and not array.flags.writeable for array in arrays)


def test_taps_can_be_chosen_and_reordered(cache):
    chosen = DeepSpecCache(cache, taps=(9, -1))[3]

    stored = sample(3)[3].reshape(LENGTHS[3], len(TAPS), WIDTH)
    assert chosen.features_TCD_np.tobytes() == stored[:, [2, 0]].tobytes()
    with pytest.raises(InputError, match=r"without \[5\]"):
        DeepSpecCache(cache, taps=(4, 5))


def test_padding_is_cut_off(tmp_path):
    read = DeepSpecCache(write_cache(tmp_path / "padded", [sample(0, padding=4)]))

    assert len(read[0].example.tokens_np) == len(read[0].hidden_TD_np) == LENGTHS[0]
    ids, attended, *rest = sample(0, padding=4)
    left = write_cache(tmp_path / "left", [(ids, attended[::-1].copy(), *rest)])
    with pytest.raises(InputError, match="sample 100 with padding before its tokens"):
        DeepSpecCache(left)[0]


def test_batches_of_the_pipeline(cache):
    config = DataConfig(batch_size=2, max_length=8, num_anchors=3)
    batches = training_batches(DeepSpecCache(cache, taps=(9, 4)), config=config)

    assert batches.truncated_examples == 2
    originals = {sample(number)[0][0]: sample(number) for number in range(4)}
    for batch in (next(batches), next(batches)):
        assert "logz_BT" not in batch and batch["features_BTCD"].shape == (2, 8, 2, WIDTH)
        for row, tokens_T in enumerate(batch["tokens_BT"]):
            _, _, _, features, hidden = originals.pop(tokens_T[0])
            T = min(8, len(hidden))
            expected = features.reshape(-1, len(TAPS), WIDTH)[:T, [2, 1]]
            assert batch["features_BTCD"][row, :T].tobytes() == expected.tobytes()
            assert batch["hidden_BTD"][row, :T].tobytes() == hidden[:T].tobytes()
            assert not batch["hidden_BTD"][row, T:].any()
    assert not originals


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 3}, "version 3 instead of 2"),
        ({"hidden_dtype": "float8_e4m3fn"}, "hidden_dtype 'float8_e4m3fn'"),
        ({"num_samples": 5}, "224 bytes for 5 samples"),
        ({"shards": [{"file_name": "shard-00000.bin"}]}, "samples of shard 1, and 1 shards"),
        ({"hidden_size": 7}, "target_last_hidden_states of "),
    ],
)
def test_what_the_files_do_not_hold_is_refused(tmp_path, changes, problem):
    directory = write_cache(tmp_path / "cache", [sample(number) for number in range(4)], **changes)

    with pytest.raises(InputError) as caught:
        DeepSpecCache(directory)

    assert problem in caught.value.given


def test_missing_and_short_shards_are_refused(cache):
    whole = (cache / "shard-00001.bin").read_bytes()
    (cache / "shard-00001.bin").write_bytes(whole[:-1])
    with pytest.raises(InputError, match=r"target_last_hidden_states of 1 samples \(first: 103\)"):
        DeepSpecCache(cache)

    (cache / "shard-00001.bin").unlink()
    with pytest.raises(InputError, match=r"no shard-00001\.bin"):
        DeepSpecCache(cache)
    (cache / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"manifest\.json"):
        DeepSpecCache(cache)
