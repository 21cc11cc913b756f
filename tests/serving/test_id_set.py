"""The compact set of ids against a plain one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.serving.id_set import IdSet


@settings(max_examples=30)
@given(st.lists(st.sampled_from([f"{n}" for n in range(20)])))
def test_like_a_set(texts):
    plain, compact = set(), IdSet()
    for text in texts:
        assert (text in compact) == (text in plain)
        assert compact.add(text) == (text not in plain)
        plain.add(text)
    assert len(compact) == len(plain)


def test_growing():
    compact = IdSet()
    for number in range(20_000):
        assert compact.add(f"p{number}")
    assert len(compact) == 20_000
    assert all(f"p{number}" in compact for number in range(20_000))
    assert not any(f"q{number}" in compact for number in range(1000))
    assert compact._table.itemsize * len(compact._table) < 27 * 20_000
