"""Fixed shapes: every size that a compiled program sees is one of a declared list."""

from __future__ import annotations

from collections.abc import Sequence

from dspark_jax.core.errors import InputError


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`.

    Raises:
      InputError: no bucket is large enough.
    """
    for bucket in sorted(buckets):
        if size <= bucket:
            return bucket
    raise InputError(
        given=f"size {size}",
        expected=f"at most the largest declared bucket, {max(buckets)}",
        fix="shorten the input",
    )


def round_up(size: int, multiple: int) -> int:
    """The next multiple at or above `size`."""
    return -(-size // multiple) * multiple


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 2 smallest, 4 smallest, ... up to the first one at or above `largest`."""
    buckets = [smallest]
    while buckets[-1] < largest:
        buckets.append(2 * buckets[-1])
    return tuple(buckets)
