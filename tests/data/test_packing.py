"""Packed rows hold whole documents with their blocks, for any number of processes, and resume exactly."""

from __future__ import annotations

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.core.errors import InputError
from dspark_jax.data.feature_record import FeatureRecord
from dspark_jax.data.packing import Document, collate
from dspark_jax.data.pipeline import DataConfig, training_batches
from dspark_jax.data.sources import Example

CONFIG = DataConfig(batch_size=2, max_length=24, num_anchors=3, row_anchors=7, seed=3)


def example(number: int, length: int) -> Example:
    """A sequence that starts with its number."""
    tokens_np = np.full(length, 100 + number, np.int32)
    tokens_np[0] = number
    return Example(
        id=f"e{number}",
        domain="test",
        tokens_np=tokens_np,
        loss_mask_np=np.arange(length) >= min(2, length - 2),
    )


EXAMPLES = [example(number, length) for number, length in enumerate([4, 7, 5, 10, 30, 6, 9, 3, 12])]


def documents(batch: dict, row: int) -> list[tuple[int, slice]]:
    """(number, place) of every document of a row."""
    starts_T, found, at = batch["starts_BT"][row], [], 0
    while at < len(starts_T):
        end = at + int((starts_T == at).sum())
        if batch["tokens_BT"][row, at] < 100 and batch["tokens_BT"][row, at:end].max() >= 100:
            found.append((int(batch["tokens_BT"][row, at]), slice(at, end)))
        at = end
    return found


def test_rows_hold_whole_documents_with_their_blocks():
    batches = training_batches(EXAMPLES, config=CONFIG)
    seen: list[int] = []
    for _ in range(12):
        batch = next(batches)
        for b in range(CONFIG.batch_size):
            found = documents(batch, b)
            assert found, "an empty row"
            seen += [number for number, _ in found]
            for number, place in found:
                wanted = EXAMPLES[number]
                length = min(len(wanted.tokens_np), CONFIG.max_length)
                assert place.stop - place.start == length
                np.testing.assert_array_equal(batch["tokens_BT"][b, place], wanted.tokens_np[:length])
                np.testing.assert_array_equal(batch["loss_mask_BT"][b, place], wanted.loss_mask_np[:length])
            anchors_A, keep_A = batch["anchors_BA"][b], batch["keep_BA"][b]
            assert (np.diff(anchors_A[keep_A]) > 0).all() and not anchors_A[~keep_A].any()
            for anchor in anchors_A[keep_A]:
                start = batch["starts_BT"][b, anchor]
                assert batch["starts_BT"][b, anchor + 1] == start, (
                    "no block begins at a document's last token"
                )
                assert batch["loss_mask_BT"][b, anchor]
            blocks = [((anchors_A[keep_A] >= p.start) & (anchors_A[keep_A] < p.stop)).sum() for _, p in found]
            assert max(blocks) <= CONFIG.num_anchors and sum(blocks) == keep_A.sum() <= CONFIG.row_anchors
    for epoch in range(len(seen) // len(EXAMPLES) - 2):  # packing moves a document by less than a batch
        near = seen[epoch * len(EXAMPLES) : (epoch + 2) * len(EXAMPLES)]
        assert set(near) == set(range(len(EXAMPLES)))


@settings(max_examples=6)
@given(done=st.integers(0, 7), seed=st.integers(0, 2**31 - 1))
def test_resume_continues_exactly_also_with_other_processes(done, seed):
    config = dataclasses.replace(CONFIG, seed=seed)
    whole = training_batches(EXAMPLES, config=config)
    for _ in range(done):
        next(whole)
    state = json.loads(json.dumps(whole.get_state()))
    half = config.batch_size // 2
    shares = (range(half), range(half, 2 * half))
    parts = [training_batches(EXAMPLES, config=config, local_rows=rows) for rows in shares]
    for part in parts:
        next(part)  # whatever it did before
        part.set_state(state)
    for _ in range(4):
        batch, halves = next(whole), [next(part) for part in parts]
        for name, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in halves]), array)
        assert parts[0].ids() == parts[1].ids() == whole.ids()


def test_features_lie_where_their_tokens_do():
    def record(number: int, length: int) -> Document:
        features = np.full((length, 2, 3), number, ml_dtypes.bfloat16)
        normalisers = np.full(length, number, np.float32)
        return Document(
            FeatureRecord(example(number, length), features, features[:, 0], normalisers),
            np.arange(2, dtype=np.int32),
        )

    batch = collate([[record(1, 3), record(2, 4)], [record(3, 5)]], length=8, num_anchors=5, packed=True)
    assert batch["features_BTCD"].shape == (2, 8, 2, 3) and batch["features_BTCD"].dtype == ml_dtypes.bfloat16
    for name in ("features_BTCD", "hidden_BTD", "logz_BT"):
        flat_BT = batch[name].reshape(2, 8, -1)[..., 0]
        assert flat_BT.tolist() == [[1, 1, 1, 2, 2, 2, 2, 0], [3, 3, 3, 3, 3, 0, 0, 0]]
    assert batch["starts_BT"].tolist() == [[0, 0, 0, 3, 3, 3, 3, 7], [0, 0, 0, 0, 0, 5, 6, 7]]
    assert batch["anchors_BA"].tolist() == [[0, 1, 3, 4, 0], [0, 1, 0, 0, 0]]


def test_packed_and_unpacked_runs_do_not_continue_each_other():
    unpacked = dataclasses.replace(CONFIG, row_anchors=None)
    state = training_batches(EXAMPLES, config=unpacked).get_state()
    with pytest.raises(InputError, match="other records"):
        training_batches(EXAMPLES, config=CONFIG).set_state(state)
    with pytest.raises(InputError, match="row_anchors=2"):
        dataclasses.replace(CONFIG, row_anchors=2)
