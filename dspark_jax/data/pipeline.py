"""From records to fixed-shape training batches, in an order that can be resumed exactly."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.data.anchors import sample_anchors
from dspark_jax.data.deepspec_cache import DeepSpecCache
from dspark_jax.data.feature_record import FeatureRecord
from dspark_jax.data.feature_store import FeatureStore
from dspark_jax.data.packing import Document, collate, first_fit
from dspark_jax.data.sources import Example

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Shapes and order of the training batches."""

    batch_size: int
    """Rows per optimiser step, over all processes together."""
    max_length: int
    """Tokens per row: shorter sequences are padded on the right, longer ones are cut."""
    num_anchors: int
    """Draft blocks per sequence (A)."""
    row_anchors: int | None = None
    """Pack whole sequences into rows of at most `max_length` tokens and this many draft blocks; None: one
    sequence per row."""
    balance_domains: bool = False
    """Draw equally many sequences from every domain; the smaller domains then repeat more often."""
    seed: int = 0
    """Decides the order of every epoch and the anchors of every record in it."""
    prefetch_batches: int = 4
    """Batches prepared ahead by threads (of packed rows: documents for one); has no influence on content."""
    read_threads: int = 2

    def __post_init__(self):
        for name in ("batch_size", "max_length", "num_anchors", "prefetch_batches", "read_threads"):
            if getattr(self, name) < 1:
                raise InputError(
                    given=f"{name}={getattr(self, name)}", expected="at least 1", fix=f"raise {name}"
                )
        if self.row_anchors is not None and self.row_anchors < self.num_anchors:
            raise InputError(
                given=f"row_anchors={self.row_anchors} with num_anchors={self.num_anchors}",
                expected="a row with room for the blocks of one sequence",
                fix="raise row_anchors or lower num_anchors",
            )


class BatchIterator:
    """An endless iterator of host batches; `get_state` and `set_state` resume it between any two batches.

    The state counts global batches, so a run may resume on another number of processes.
    """

    def __init__(self, batches: grain.IterDataset, *, fingerprint: str, truncated_examples: int):
        self._iterator = iter(batches)
        self._fingerprint = fingerprint
        self.truncated_examples = truncated_examples
        """How many records are longer than `max_length` and lose their end."""
        self.ids: Callable[[], list[str]] = list
        """Ids of the records in the batch returned last, on all processes together."""

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch, self.ids = next(self._iterator)
        return batch

    def get_state(self) -> dict:
        """What is needed to continue after the batch returned last; plain JSON."""
        return {**self._iterator.get_state(), "fingerprint": self._fingerprint}

    def set_state(self, state: dict) -> None:
        """Continues from `state`; refuses one that belongs to other records or another config."""
        if state["fingerprint"] != self._fingerprint:
            raise InputError(
                given="a data state saved with other records, seed, batch size, length or anchors",
                expected="the records and the data config of the interrupted run",
                fix="restore them, or start a new run from the saved parameters",
            )
        self._iterator.set_state({name: value for name, value in state.items() if name != "fingerprint"})


def training_batches(
    source: Sequence[Example] | FeatureStore | DeepSpecCache,
    *,
    config: DataConfig,
    local_rows: range | None = None,
) -> BatchIterator:
    """Shuffled epochs without end, with fresh anchors in each.

    Every epoch (of a domain, if they are balanced) visits every record once; batches run across the border of
    two epochs and drop nothing.
    Batch n over all processes holds the same records and anchors in the same rows, however they divide it.

    Args:
      source: examples in memory, or a feature store.
      config: shapes and seed.
      local_rows: rows of every batch that this process reads; all of them by default.

    Returns:
      An iterator of dicts with tokens_BT int32, loss_mask_BT bool, anchors_BA int32 (ascending, padded with
      0) and keep_BA bool; of packed rows also starts_BT int32 (`packing.py`); from a feature store also
      features_BTCD and hidden_BTD (bfloat16), from one of our own also logz_BT (float32). B counts this
      process's rows and T is `max_length`. Padding is 0 and false.
    """
    if len(source) == 0:
        raise InputError(
            given="no records", expected="at least one", fix="check the paths and the held-out fraction"
        )

    def with_anchors(record: Example | FeatureRecord, rng: np.random.Generator) -> Document:
        example = record.example if isinstance(record, FeatureRecord) else record
        loss_mask_T = example.loss_mask_np[: config.max_length]
        positions_A, keep_A = sample_anchors(rng, loss_mask_T, config.num_anchors)
        return Document(record, positions_A[keep_A])

    index = _index(source)
    # Anchors before the division among processes: their random stream then follows the global row number.
    documents = _endless(source, index.domains, config).random_map(with_anchors)
    divide = _packed if config.row_anchors is not None else _one_per_row
    batches = divide(documents, config, range(config.batch_size) if local_rows is None else local_rows)

    truncated = int(np.sum(np.asarray(index.lengths_tokens) > config.max_length))
    if truncated:
        _log.warning(
            "%d of %d sequences are longer than %d tokens and are cut",
            truncated,
            len(source),
            config.max_length,
        )
    return BatchIterator(batches, fingerprint=_fingerprint(index.ids, config), truncated_examples=truncated)


def _one_per_row(documents: Any, config: DataConfig, own: range) -> grain.IterDataset:
    """Pairs of this process's rows of a batch, one document each, and a function to its ids."""

    def local_batch(number: int) -> tuple[dict[str, np.ndarray], Callable[[], list[str]]]:
        start = number * config.batch_size
        rows = [[documents[start + row]] for row in own]
        batch = collate(rows, length=config.max_length, num_anchors=config.num_anchors, packed=False)
        return batch, lambda: [documents[start + row].example.id for row in range(config.batch_size)]

    batches = grain.MapDataset.range(len(documents) // config.batch_size).map(local_batch)
    return batches.to_iter_dataset(
        grain.ReadOptions(num_threads=config.read_threads, prefetch_buffer_size=config.prefetch_batches)
    )


def _packed(documents: grain.MapDataset, config: DataConfig, own: range) -> grain.IterDataset:
    """The same of packed rows. All processes pack all documents: rows do not depend on them."""
    assert config.row_anchors is not None

    def collated(
        rows: Sequence[Sequence[Document]],
    ) -> tuple[dict[str, np.ndarray], Callable[[], list[str]]]:
        ids = [document.example.id for row in rows for document in row]
        mine = rows[own.start : own.stop]
        batch = collate(mine, length=config.max_length, num_anchors=config.row_anchors or 0, packed=True)
        return batch, lambda: ids

    rows = first_fit(
        documents.to_iter_dataset(
            grain.ReadOptions(num_threads=config.read_threads, prefetch_buffer_size=config.batch_size)
        ),
        length=config.max_length,
        num_anchors=config.row_anchors,
        open_rows=config.batch_size,
    )
    return rows.batch(config.batch_size, drop_remainder=True, batch_fn=collated)


class _Index(NamedTuple):
    """What is known of every record without reading its features."""

    ids: Sequence[str]
    domains: Sequence[str]
    lengths_tokens: Sequence[int] | np.ndarray


def _index(source: Sequence[Example] | FeatureStore | DeepSpecCache) -> _Index:
    if isinstance(source, FeatureStore | DeepSpecCache):
        return _Index(source.ids, source.domains, source.lengths_tokens_np)
    return _Index(*zip(*((item.id, item.domain, len(item.tokens_np)) for item in source), strict=True))


def _endless(source: Sequence, domains: Sequence[str], config: DataConfig) -> grain.MapDataset:
    """All records again and again, newly shuffled in every epoch."""
    if not config.balance_domains:
        return grain.MapDataset.source(source).seed(config.seed).shuffle().repeat()
    rows = {domain: np.flatnonzero(np.asarray(domains) == domain) for domain in sorted(set(domains))}
    return grain.MapDataset.mix(
        [
            grain.MapDataset.source(_Rows(source, rows_np)).seed(config.seed).shuffle().repeat()
            for rows_np in rows.values()
        ]
    ).seed(config.seed)


class _Rows(Sequence):
    """Some rows of a sequence."""

    def __init__(self, source: Sequence, rows_np: np.ndarray):
        self._source, self._rows_np = source, rows_np

    def __len__(self) -> int:
        return len(self._rows_np)

    def __getitem__(self, index):
        return self._source[int(self._rows_np[index])]


def _fingerprint(ids: Sequence[str], config: DataConfig) -> str:
    relevant = [config.batch_size, config.max_length, config.num_anchors, config.seed, config.balance_domains]
    if config.row_anchors is not None:
        relevant.append(config.row_anchors)
    return hashlib.sha256(json.dumps([relevant, list(ids)]).encode()).hexdigest()[:16]
