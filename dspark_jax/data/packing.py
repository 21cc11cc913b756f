"""Several documents in one row: rows of a fixed number of tokens and draft blocks, with little padding.

A row is full when its tokens are or its blocks are. Nothing of a document tells how far it got packed but
`starts_BT`, the place in the row where the document of each token starts: positions, attention and blocks
follow from it, and none of them crosses into a neighbour.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from dspark_jax.data.feature_record import FeatureRecord
from dspark_jax.data.sources import Example


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    """A sequence of one epoch.

    Attributes:
      record: its tokens, perhaps with the target's features.
      anchors_np: int32, where its blocks start, ascending.
    """

    record: Example | FeatureRecord
    anchors_np: np.ndarray

    @property
    def example(self) -> Example:
        """Its tokens and loss mask."""
        return self.record.example if isinstance(self.record, FeatureRecord) else self.record

    def arrays(self, length: int) -> Iterator[tuple[str, np.ndarray]]:
        """(name in the batch, array [T, ...]) of its first `length` tokens."""
        yield "tokens_BT", self.example.tokens_np[:length]
        yield "loss_mask_BT", self.example.loss_mask_np[:length]
        if isinstance(self.record, FeatureRecord):
            yield "features_BTCD", self.record.features_TCD_np[:length]
            yield "hidden_BTD", self.record.hidden_TD_np[:length]
            if self.record.logz_T_np is not None:
                yield "logz_BT", self.record.logz_T_np[:length]


def first_fit(
    documents: grain.IterDataset, *, length: int, num_anchors: int, open_rows: int
) -> grain.IterDataset:
    """Documents -> rows, lists of documents that fit into `length` tokens and `num_anchors` blocks together.

    Each document goes into the first of `open_rows` rows with room for it; when none has, all of them are
    given out and new ones are begun.
    """

    def sizes(document: Document) -> dict:
        tokens = min(len(document.example.tokens_np), length)
        return {
            "tokens": np.zeros(tokens, bool),
            "anchors": np.zeros(len(document.anchors_np), bool),
            "document": document,
        }

    rows = grain.experimental.FirstFitPackIterDataset(
        documents.map(sizes),
        length_struct={"tokens": length, "anchors": num_anchors},
        num_packing_bins=open_rows,
        shuffle_bins=False,
        meta_features=["document"],
    )
    return rows.map(lambda row: list(row["document"]))


def collate(
    rows: Sequence[Sequence[Document]], *, length: int, num_anchors: int, packed: bool
) -> dict[str, np.ndarray]:
    """Rows of documents as arrays [B, length, ...] and anchors [B, num_anchors], padded with 0 and false.

    `starts_BT` is there when rows may hold several documents; each token of the padding is a document alone.
    """
    B = len(rows)
    batch = {
        name: np.zeros((B, length, *array.shape[1:]), array.dtype)
        for name, array in rows[0][0].arrays(length)
    }
    batch["anchors_BA"] = np.zeros((B, num_anchors), np.int32)
    batch["keep_BA"] = np.zeros((B, num_anchors), bool)
    if packed:
        batch["starts_BT"] = np.tile(np.arange(length, dtype=np.int32), (B, 1))
    for b, row in enumerate(rows):
        start = done = 0
        for document in row:
            end = min(start + len(document.example.tokens_np), length)
            blocks = slice(done, done + len(document.anchors_np))
            for name, array in document.arrays(end - start):
                batch[name][b, start:end] = array
            batch["anchors_BA"][b, blocks] = start + document.anchors_np
            batch["keep_BA"][b, blocks] = True
            if packed:
                batch["starts_BT"][b, start:end] = start
            start, done = end, blocks.stop
    return batch
