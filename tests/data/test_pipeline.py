"""Batches: every record once per epoch, fresh anchors, exact resume, the same for any number of processes."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.core.errors import InputError
from dspark_jax.data.pipeline import DataConfig, training_batches
from dspark_jax.data.sources import Example

CONFIG = DataConfig(batch_size=4, max_length=24, num_anchors=5, seed=3, prefetch_batches=3)


def example(number: int, length: int = 20) -> Example:
    """A sequence that starts with its number, so that a batch row tells which record it is."""
    tokens_np = np.full(length, 100 + number, np.int32)
    tokens_np[0] = number
    return Example(
        id=f"e{number}",
        domain="test",
        tokens_np=tokens_np,
        loss_mask_np=np.arange(length) >= min(4, length - 2),
    )


EXAMPLES = [example(number) for number in range(12)]
HALVES = (range(0, 2), range(2, 4))


def take(iterator, count: int) -> list[dict[str, np.ndarray]]:
    return [next(iterator) for _ in range(count)]


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        assert our_batch.keys() == their_batch.keys()
        for name in our_batch:
            np.testing.assert_array_equal(our_batch[name], their_batch[name])


def test_every_epoch_has_every_record_once_in_a_new_order_with_new_anchors():
    iterator = training_batches(EXAMPLES, config=CONFIG)
    first, second = take(iterator, 3), take(iterator, 3)
    orders = [np.concatenate([batch["tokens_BT"][:, 0] for batch in epoch]) for epoch in (first, second)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    assert not np.array_equal(*orders)

    anchors = [
        {int(tokens_T[0]): anchors_A for batch in epoch for tokens_T, anchors_A in rows(batch)}
        for epoch in (first, second)
    ]
    changed = [not np.array_equal(anchors[0][number], anchors[1][number]) for number in range(12)]
    assert sum(changed) >= 10


def test_balanced_domains_get_equal_parts_and_resume_exactly():
    examples = [
        dataclasses.replace(item, domain="big" if item.tokens_np[0] > 1 else "small") for item in EXAMPLES
    ]
    config = dataclasses.replace(CONFIG, balance_domains=True)
    batches = take(training_batches(examples, config=config), 15)
    numbers = np.concatenate([batch["tokens_BT"][:, 0] for batch in batches])
    # 60 rows: 30 of the ten records of one domain, three epochs, and 30 of the two records of the other.
    assert [int((numbers == number).sum()) for number in range(12)] == [15, 15, *[3] * 10]

    iterator = training_batches(examples, config=config)
    take(iterator, 7)
    resumed = training_batches(examples, config=config)
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    assert_same(take(resumed, 8), batches[7:])


def rows(batch):
    return zip(batch["tokens_BT"], batch["anchors_BA"], strict=True)


def test_epochs_join_within_a_batch_and_drop_nothing():
    batches = take(training_batches(EXAMPLES[:7], config=CONFIG), 7)
    seen = np.concatenate([batch["tokens_BT"][:, 0] for batch in batches])
    for epoch in range(4):
        assert sorted(seen[7 * epoch : 7 * (epoch + 1)]) == list(range(7))


def test_shapes_padding_and_truncation(caplog):
    iterator = training_batches(
        [example(0, 10), example(1, 24), example(2, 40), example(3, 3)], config=CONFIG
    )
    assert iterator.truncated_examples == 1
    assert "1 of 4 sequences" in caplog.text
    batch = next(iterator)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "tokens_BT": ((4, 24), "int32"),
        "loss_mask_BT": ((4, 24), "bool"),
        "anchors_BA": ((4, 5), "int32"),
        "keep_BA": ((4, 5), "bool"),
    }
    by_number = {int(tokens_T[0]): row for row, tokens_T in enumerate(batch["tokens_BT"])}
    short = by_number[0]
    assert not batch["tokens_BT"][short, 10:].any() and not batch["loss_mask_BT"][short, 10:].any()
    assert batch["anchors_BA"][short].max() <= 8
    assert batch["anchors_BA"][by_number[2]].max() <= 22  # its successor is still inside the cut sequence
    assert batch["keep_BA"][by_number[3]].tolist() == [True, False, False, False, False]


@settings(max_examples=8)
@given(done=st.integers(0, 9), threads=st.integers(1, 3), seed=st.integers(0, 2**31 - 1))
def test_resume_continues_exactly(done, threads, seed):
    config = dataclasses.replace(CONFIG, seed=seed)
    iterator = training_batches(EXAMPLES[:7], config=config)
    take(iterator, done)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = take(iterator, 6)

    resumed = training_batches(EXAMPLES[:7], config=dataclasses.replace(config, read_threads=threads))
    take(resumed, 2)  # whatever it did before
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert_same(take(resumed, 6), expected)


def test_resume_refuses_other_records_or_another_order():
    state = training_batches(EXAMPLES, config=CONFIG).get_state()
    for source, changes in [(EXAMPLES[1:], {}), (EXAMPLES, {"seed": 4}), (EXAMPLES, {"batch_size": 2})]:
        with pytest.raises(InputError, match="other records, seed"):
            training_batches(source, config=dataclasses.replace(CONFIG, **changes)).set_state(state)


def test_processes_divide_the_same_batches_also_after_a_resume():
    def halves_of(count: int) -> list:
        halves = [training_batches(EXAMPLES[:7], config=CONFIG, local_rows=rows) for rows in HALVES]
        for half in halves:
            half.set_state(state)
        return [take(half, count) for half in halves]

    whole = training_batches(EXAMPLES[:7], config=CONFIG)
    state = whole.get_state()
    batches = take(whole, 3)
    parts = halves_of(3)
    state = whole.get_state()  # one process saved, two go on
    batches += take(whole, 3)
    parts = [first + second for first, second in zip(parts, halves_of(3), strict=True)]
    for part, rows in zip(parts, HALVES, strict=True):
        assert_same(
            part, [{name: x[rows.start : rows.stop] for name, x in batch.items()} for batch in batches]
        )


def test_the_records_of_a_whole_batch_are_known_to_whoever_reads_a_part():
    half = training_batches(EXAMPLES[:7], config=CONFIG, local_rows=HALVES[1])
    for batch in take(training_batches(EXAMPLES[:7], config=CONFIG), 6):
        next(half)
        assert half.ids() == [f"e{first}" for first in batch["tokens_BT"][:, 0]]


def test_unusable_requests_are_refused():
    with pytest.raises(InputError, match="no records"):
        training_batches([], config=CONFIG)
    with pytest.raises(InputError, match="num_anchors=0"):
        dataclasses.replace(CONFIG, num_anchors=0)
