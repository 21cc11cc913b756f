"""The feature store: bit-exact, resumable after a kill, and never read when it is not what it should be."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.core.errors import InputError
from dspark_jax.data import feature_store
from dspark_jax.data.feature_record import FeatureRecord, dry_run_bytes, pack_record, unpack_record
from dspark_jax.data.feature_store import FeatureStore, FeatureStoreWriter, StoreDescription
from dspark_jax.data.pipeline import DataConfig, training_batches
from dspark_jax.data.sources import Example

TAPS, WIDTH = (-1, 4, 9), 6
DESCRIPTION = StoreDescription(identity="target-a", taps=TAPS, width=WIDTH, template="chat()")


def record(number: int, length: int = 8, record_id: str | None = None) -> FeatureRecord:
    rng = np.random.default_rng(number)
    # All bit patterns, infinities and NaNs of bfloat16 among them.
    bits = rng.integers(0, 2**16, (length, len(TAPS) + 1, WIDTH), np.uint16).view(ml_dtypes.bfloat16)
    example = Example(
        id=f"é{number}" if record_id is None else record_id,
        domain=("math", "code")[number % 2],
        tokens_np=rng.integers(0, 2**31, length, np.int32),
        loss_mask_np=rng.random(length) < 0.5,
    )
    return FeatureRecord(example, bits[:, :-1], bits[:, -1], rng.standard_normal(length, np.float32))


def assert_same(ours: FeatureRecord, theirs: FeatureRecord) -> None:
    assert (ours.example.id, ours.example.domain) == (theirs.example.id, theirs.example.domain)
    for our_array, their_array in zip(arrays(ours), arrays(theirs), strict=True):
        assert our_array.dtype == their_array.dtype and our_array.shape == their_array.shape
        assert our_array.tobytes() == their_array.tobytes()


def arrays(item: FeatureRecord) -> tuple[np.ndarray, ...]:
    return (
        item.example.tokens_np,
        item.example.loss_mask_np,
        item.features_TCD_np,
        item.hidden_TD_np,
        item.logz_T_np,
    )


def write(directory, numbers, **options) -> None:
    with FeatureStoreWriter(directory, DESCRIPTION, **options) as writer:
        for number in numbers:
            writer.write(record(number, length=5 + number))


@given(number=st.integers(0, 2**32 - 1), length=st.integers(0, 9), record_id=st.text(max_size=9))
def test_a_record_survives_bit_by_bit_without_copies(number, length, record_id):
    original = record(number, length, record_id)
    payload = pack_record(original)
    unpacked = unpack_record(payload)
    assert_same(unpacked, original)
    assert len(payload) == dry_run_bytes([original.example], len(TAPS), WIDTH)
    assert not any(array.flags.owndata or array.flags.writeable for array in arrays(unpacked))


def test_store_round_trip_over_several_shards(tmp_path):
    write(tmp_path, range(10), shard_bytes=1500)
    store = FeatureStore(tmp_path)
    assert len(store.shards) > 2
    assert store.ids == tuple(f"é{number}" for number in range(10))
    assert store.domains[:2] == ("math", "code")
    assert store.lengths_tokens_np.tolist() == list(range(5, 15))
    for number in (9, 0, 4):
        assert_same(store[number], record(number, length=5 + number))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["records"] == 10 and manifest["taps"] == list(TAPS)
    assert not list(tmp_path.glob("*.partial"))


def test_taps_can_be_chosen_and_reordered(tmp_path):
    write(tmp_path, [3])
    chosen = FeatureStore(tmp_path, taps=(9, -1))[0]
    expected = record(3, length=8).features_TCD_np[:, [2, 0]]
    assert chosen.features_TCD_np.tobytes() == expected.tobytes()
    with pytest.raises(InputError, match=r"without \[5\]"):
        FeatureStore(tmp_path, taps=(4, 5))


def test_select_is_a_view(tmp_path):
    write(tmp_path, range(6), shard_bytes=1500)
    view = FeatureStore(tmp_path).select(lambda record_id: record_id in ("é1", "é4", "é5"))
    view = view.select(lambda record_id: record_id != "é1")
    assert view.ids == ("é4", "é5") and view.lengths_tokens_np.tolist() == [9, 10]
    assert_same(view[0], record(4, length=9))


def test_a_killed_writer_resumes(tmp_path):
    killed = FeatureStoreWriter(tmp_path, DESCRIPTION, shard_bytes=1500)
    for number in range(8):
        killed.write(record(number, length=5 + number))
    assert list(tmp_path.glob("*.partial"))  # never closed: the last shard is lost, the others are there

    writer = FeatureStoreWriter(tmp_path, DESCRIPTION, shard_bytes=1500)
    assert 0 < len(writer.done_ids()) < 8
    with writer:
        for number in range(10):
            if f"é{number}" not in writer.done_ids():
                writer.write(record(number, length=5 + number))
    store = FeatureStore(tmp_path)
    assert len(store) == 10
    for item in store:
        number = int(item.example.id[1:])
        assert_same(item, record(number, length=5 + number))


def test_a_kill_between_shard_and_manifest_loses_that_shard_only(tmp_path, monkeypatch):
    write(tmp_path, [0, 1])
    write_json = feature_store._write_json

    def killed_at_the_manifest(path, content):
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        write_json(path, content)

    monkeypatch.setattr(feature_store, "_write_json", killed_at_the_manifest)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [2, 3])
    monkeypatch.undo()
    assert FeatureStore(tmp_path).ids == ("é0", "é1")
    write(tmp_path, [4])
    assert FeatureStore(tmp_path).ids == ("é0", "é1", "é4")
    assert_same(FeatureStore(tmp_path)[2], record(4, length=9))


def test_an_exception_keeps_the_records_before_it(tmp_path):
    with pytest.raises(ZeroDivisionError), FeatureStoreWriter(tmp_path, DESCRIPTION) as writer:
        writer.write(record(0))
        raise ZeroDivisionError
    assert FeatureStore(tmp_path).ids == ("é0",)


def test_another_target_is_refused(tmp_path):
    write(tmp_path, [0])
    FeatureStore(tmp_path).require(identity="target-a", taps=(9, 4), template="chat()")
    for wrong in ({"identity": "target-b"}, {"taps": (4, 8)}, {"template": "chat(enable_thinking=True)"}):
        with pytest.raises(InputError, match=r"instead of|without"):
            FeatureStore(tmp_path).require(**wrong)
    with pytest.raises(InputError, match="new directory"):
        FeatureStoreWriter(tmp_path, dataclasses.replace(DESCRIPTION, identity="target-b"))


def test_damage_is_refused(tmp_path):
    write(tmp_path, range(10), shard_bytes=1500)
    path = tmp_path / "shard-00001.array_record"
    whole = path.read_bytes()

    path.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=r"shard-00001.*as the manifest says"):
        FeatureStore(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match="0 bytes"):
        FeatureStore(tmp_path)

    first_id = json.loads((tmp_path / "shard-00001.index.json").read_text())["ids"][0]
    position = whole.index(first_id.encode()) + 200  # the same size, one bit flipped inside a record
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    with pytest.raises(InputError, match="damaged"):
        list(FeatureStore(tmp_path))
    with pytest.raises(InputError, match="complete feature store"):
        FeatureStore(tmp_path / "absent")


def test_wrong_records_are_refused(tmp_path):
    good = record(0)
    with FeatureStoreWriter(tmp_path, DESCRIPTION) as writer:
        writer.write(good)
        with pytest.raises(InputError, match="twice"):
            writer.write(good)
        with pytest.raises(InputError, match="width"):
            writer.write(dataclasses.replace(record(1), features_TCD_np=good.features_TCD_np[:, :2]))
        with pytest.raises(InputError, match="same length"):
            writer.write(dataclasses.replace(record(1), logz_T_np=good.logz_T_np[:3]))
    assert FeatureStore(tmp_path).ids == ("é0",)


def test_batches_carry_the_features_of_their_rows(tmp_path):
    write(tmp_path, range(4))
    config = DataConfig(batch_size=2, max_length=7, num_anchors=3)
    iterator = training_batches(FeatureStore(tmp_path, taps=(9, 4)), config=config)
    assert iterator.truncated_examples == 1
    originals = {record(n, length=5 + n).example.tokens_np[0]: record(n, length=5 + n) for n in range(4)}
    for batch in (next(iterator), next(iterator)):
        assert batch["features_BTCD"].shape == (2, 7, 2, WIDTH)
        assert batch["hidden_BTD"].dtype == ml_dtypes.bfloat16
        for row, tokens_T in enumerate(batch["tokens_BT"]):
            original = originals[tokens_T[0]]
            T = min(7, len(original.example.tokens_np))
            expected = original.features_TCD_np[:T, [2, 1]]
            assert batch["features_BTCD"][row, :T].tobytes() == expected.tobytes()
            assert batch["hidden_BTD"][row, :T].tobytes() == original.hidden_TD_np[:T].tobytes()
            assert batch["logz_BT"][row, :T].tobytes() == original.logz_T_np[:T].tobytes()
            assert not batch["features_BTCD"][row, T:].any()
