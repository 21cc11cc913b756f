"""What a decoding round costs on this machine: measured times of compiled shapes, and nothing in between.

A round pays for the shape that really runs, padding included, so every question is answered for the declared
bucket at or above it (spec section 8: price the PADDED bucket, the draft, and the context length).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import isotonic_regression

from dspark_jax.core.buckets import bucket_for
from dspark_jax.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CostTable:
    """Measured times of the compiled rounds of one engine.

    Raises:
      InputError: buckets and times that do not fit, or times that are not positive numbers.
    """

    request_buckets: tuple[int, ...]
    """R: requests in a step, ascending."""
    row_buckets: tuple[int, ...]
    """M: target rows in a step, ascending."""
    context_buckets: tuple[int, ...]
    """S: longest context in a step, in tokens, ascending."""
    verify_ms_np: np.ndarray
    """float64 [R, M, S]: verification with everything behind the draft; infinite where no program exists."""
    draft_ms_np: np.ndarray
    """float64 [R, S]: drafting one block for each of R requests."""
    fingerprint: str
    """Of the engine that was measured: models, dtypes, device, shapes, versions."""

    def __post_init__(self):
        shape = tuple(map(len, (self.request_buckets, self.row_buckets, self.context_buckets)))
        shapes = (self.verify_ms_np.shape, self.draft_ms_np.shape)
        if shapes != (shape, (shape[0], shape[2])):
            raise InputError(
                given=f"times of shapes {shapes}",
                expected=f"{shape} and {(shape[0], shape[2])}, as the buckets say",
                fix="measure the table again",
            )
        finite_np = np.isfinite(self.verify_ms_np)
        # Plain decoding, one row for each request, can always be chosen; a shape is priced for every context.
        plain = all(finite_np[r, self._row_index(n)].all() for r, n in enumerate(self.request_buckets))
        whole = (finite_np.any(2) == finite_np.all(2)).all() and (self.verify_ms_np > 0).all()
        if not (plain and whole and (np.isfinite(self.draft_ms_np) & (self.draft_ms_np > 0)).all()):
            raise InputError(
                given="a cost table with times that are missing, zero or negative",
                expected="a positive number of ms for every declared shape",
                fix="measure the table again",
            )

    def verify_ms(self, requests: int, rows: int, context: int) -> float:
        """ms of a verification step of `rows` target rows for `requests` requests.

        Raises:
          InputError: more than the largest declared bucket.
        """
        rows_np, ms_np = self.verify_curve(requests, context)
        return float(ms_np[rows_np.tolist().index(bucket_for(rows, rows_np.tolist()))])

    def verify_curve(self, requests: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        """(target rows [n], ms [n]) of every declared step that has a row for each of `requests` requests."""
        r, s = self._indices(requests, context)
        rows_np = np.asarray(self.row_buckets)
        declared = np.isfinite(self.verify_ms_np[r, :, s]) & (rows_np >= requests)
        return rows_np[declared], self.verify_ms_np[r, declared, s]

    def draft_ms(self, requests: int, context: int) -> float:
        """ms of drafting for `requests` requests; nothing for none."""
        if requests == 0:
            return 0.0
        r, s = self._indices(requests, context)
        return float(self.draft_ms_np[r, s])

    def fixed_round_ms(self, requests: int, length: int, context: int) -> float:
        """ms of a round that drafts for everyone and verifies `length` tokens of each."""
        draft_ms = self.draft_ms(requests, context) if length else 0.0
        return self.verify_ms(requests, requests * (1 + length), context) + draft_ms

    def _indices(self, requests: int, context: int) -> tuple[int, int]:
        axes = ((requests, self.request_buckets), (context, self.context_buckets))
        r, s = (buckets.index(bucket_for(size, buckets)) for size, buckets in axes)
        return r, s

    def _row_index(self, rows: int) -> int:
        return self.row_buckets.index(bucket_for(rows, self.row_buckets))


def monotone(times_ms: Sequence[float] | np.ndarray) -> np.ndarray:
    """The closest times (least squares) that never fall as the step grows: more rows cannot cost less.

    Args:
      times_ms: [M], medians at ascending sizes.
    """
    return np.asarray(isotonic_regression(np.asarray(times_ms, np.float64)).x)


def implausible(times_ms: Sequence[float] | np.ndarray, *, tolerance: float = 0.05) -> np.ndarray:
    """Which of these times deserve a second measurement: those that a monotone curve does not fit.

    Args:
      times_ms: [M], medians at ascending sizes.
      tolerance: relative distance from the monotone curve that noise explains.

    Returns:
      bool [M].
    """
    times_np = np.asarray(times_ms, np.float64)
    return np.abs(times_np - monotone(times_np)) > tolerance * times_np
