"""The cost table prices padded shapes and refuses what is not a measurement."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.speculation.cost import CostTable, implausible, monotone

TABLE = CostTable(
    request_buckets=(1, 4),
    row_buckets=(1, 4, 16),
    context_buckets=(128, 512),
    verify_ms_np=np.array([[[1, 2], [3, 4], [5, 6]], [[np.inf, np.inf], [7, 8], [9, 10]]], float),
    draft_ms_np=np.array([[0.5, 0.6], [0.7, 0.8]]),
    fingerprint="test",
)


def test_the_padded_shape_is_priced():
    assert TABLE.verify_ms(1, 1, 100) == 1
    assert TABLE.verify_ms(1, 2, 128) == TABLE.verify_ms(1, 4, 1) == 3
    assert TABLE.verify_ms(2, 5, 129) == 10
    assert TABLE.draft_ms(3, 500) == 0.8
    assert TABLE.draft_ms(0, 500) == 0
    rows, ms = TABLE.verify_curve(2, 500)
    assert (rows.tolist(), ms.tolist()) == ([4, 16], [8, 10])
    assert TABLE.fixed_round_ms(3, 2, 100) == 9 + 0.7
    assert TABLE.fixed_round_ms(3, 0, 100) == 7


def test_what_no_bucket_holds_is_refused():
    with pytest.raises(InputError, match="largest declared bucket"):
        TABLE.verify_ms(1, 17, 100)
    with pytest.raises(InputError, match="largest declared bucket"):
        TABLE.draft_ms(5, 100)


@pytest.mark.parametrize(
    "change",
    [
        {"verify_ms_np": TABLE.verify_ms_np[:, :2]},
        {"verify_ms_np": TABLE.verify_ms_np - 1},
        {"verify_ms_np": np.where(TABLE.verify_ms_np == 5, np.inf, TABLE.verify_ms_np)},
        {"draft_ms_np": TABLE.draft_ms_np * np.nan},
    ],
    ids=["shape", "zero", "missing", "nan"],
)
def test_no_measurement_no_table(change):
    with pytest.raises(InputError, match="measure the table again"):
        dataclasses.replace(TABLE, **change)


def test_more_rows_never_cost_less():
    np.testing.assert_allclose(monotone([10, 12, 11, 20]), [10, 11.5, 11.5, 20])
    assert implausible([10, 30, 11, 20]).tolist() == [False, True, True, False]
    assert not implausible([10, 10.2, 10.1, 20]).any()
