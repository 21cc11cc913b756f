"""One training sequence with the target's features, and its form on disk.

Layout (little-endian), so that reading is a `frombuffer` without parsing or copying:

    header    <4sHHIII: magic, bytes of id, bytes of domain, T, C, D
    id        UTF-8
    domain    UTF-8
    tokens    int32 [T]
    logz      float32 [T]
    features  bfloat16 [T, C, D]
    hidden    bfloat16 [T, D]
    loss_mask uint8 [T]
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable

import ml_dtypes
import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.data.sources import Example

_HEADER = struct.Struct("<4sHHIII")
_MAGIC = b"DSFR"
_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureRecord:
    """One training sequence with what the frozen target computed on it."""

    example: Example
    features_TCD_np: np.ndarray
    """bfloat16 [T, C, D]: raw outputs of the tapped layers."""
    hidden_TD_np: np.ndarray
    """bfloat16 [T, D]: the last hidden state after the final norm."""
    logz_T_np: np.ndarray | None
    """float32 [T]: logsumexp of the target's logits over its full vocabulary; None where it is not stored."""


def pack_record(record: FeatureRecord) -> bytes:
    """Serialises one record; see the layout at the top of this file."""
    example = record.example
    T, C, D = record.features_TCD_np.shape
    assert record.logz_T_np is not None, "our own store holds the normalisers"
    others = (example.tokens_np, example.loss_mask_np, record.hidden_TD_np, record.logz_T_np)
    shapes = tuple(array.shape for array in others)
    if shapes != ((T,), (T,), (T, D), (T,)):
        raise InputError(
            given=f"{example.id!r}: tokens, loss mask, hidden, logz of shapes {shapes}",
            expected=f"[{T}], [{T}], [{T}, {D}], [{T}], to agree with the features",
            fix="cut every array of a record at the same length",
        )
    id_utf8, domain_utf8 = example.id.encode(), example.domain.encode()
    return b"".join(
        (
            _HEADER.pack(_MAGIC, len(id_utf8), len(domain_utf8), T, C, D),
            id_utf8,
            domain_utf8,
            np.asarray(example.tokens_np, "<i4").tobytes(),
            np.asarray(record.logz_T_np, "<f4").tobytes(),
            np.asarray(record.features_TCD_np, _BF16).tobytes(),
            np.asarray(record.hidden_TD_np, _BF16).tobytes(),
            np.asarray(example.loss_mask_np, np.bool_).tobytes(),
        )
    )


def unpack_record(payload: bytes) -> FeatureRecord:
    """Views one serialised record as read-only arrays that share the payload's memory."""
    magic, id_bytes, domain_bytes, T, C, D = _HEADER.unpack_from(payload)
    if magic != _MAGIC or len(payload) != _record_bytes(id_bytes + domain_bytes, T, C, D):
        raise ValueError("not a feature record")
    offset = _HEADER.size

    def take(dtype, *shape: int) -> np.ndarray:
        nonlocal offset
        array = np.frombuffer(payload, dtype, int(np.prod(shape)), offset).reshape(shape)
        offset += array.nbytes
        return array

    record_id = take(np.uint8, id_bytes).tobytes().decode()
    domain = take(np.uint8, domain_bytes).tobytes().decode()
    tokens_np, logz_T_np = take("<i4", T), take("<f4", T)
    features_TCD_np, hidden_TD_np = take(_BF16, T, C, D), take(_BF16, T, D)
    example = Example(id=record_id, domain=domain, tokens_np=tokens_np, loss_mask_np=take(np.bool_, T))
    return FeatureRecord(example, features_TCD_np, hidden_TD_np, logz_T_np)


def dry_run_bytes(examples: Iterable[Example], num_taps: int, width: int) -> int:
    """Bytes of the records that these examples would need, before anything is computed."""
    return sum(
        _record_bytes(len((example.id + example.domain).encode()), len(example.tokens_np), num_taps, width)
        for example in examples
    )


def _record_bytes(name_bytes: int, T: int, C: int, D: int) -> int:
    return _HEADER.size + name_bytes + T * (4 + 4 + 1 + 2 * (C + 1) * D)
