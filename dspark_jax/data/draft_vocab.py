"""The reduced draft vocabulary: the tokens that the target itself writes most often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_jax.data.sources import Example


def most_frequent_tokens(examples: Sequence[Example], size: int, *, vocab_size: int) -> np.ndarray:
    """The `size` most frequent supervised tokens, ascending ids int32 [size].

    Ties go to the lower id, so the same responses always give the same vocabulary. Lossless whatever it
    leaves out: the drafter proposes these ids only, and rejection sampling makes up for the rest.
    """
    counts_np = np.zeros(vocab_size, np.int64)
    for example in examples:
        counts_np += np.bincount(example.tokens_np[example.loss_mask_np], minlength=vocab_size)
    return np.sort(np.argsort(-counts_np, kind="stable")[:size]).astype(np.int32)
