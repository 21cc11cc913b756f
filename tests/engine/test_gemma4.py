"""Layers of two kinds in one engine: windows shorter than the answers, caches of two shapes, a soft cap."""

from __future__ import annotations

import pytest

from dspark_jax.testing.tiny import TARGETS, tiny_target


@pytest.fixture(scope="module")
def gemma4(tiny):
    """The tiny engines over a Gemma 4 of the same vocabulary."""
    engines = type(tiny)(tiny.vocab_size)
    engines.target = tiny_target(**TARGETS["gemma4"], vocab_size=tiny.vocab_size, seed=11)
    return engines


def test_greedy_output_is_plain_decoding(gemma4):
    """Rejected rows must not overwrite what a window still sees."""
    requests = gemma4.requests()

    answers = gemma4.answers(gemma4.engine("markov", slots=4), requests)

    assert answers == gemma4.plain
    assert {accepted for r in requests for accepted in r.accepted_per_round} >= {1, 2, 3}
    assert len({(layer.num_kv_heads, layer.head_dim) for layer in gemma4.target.config.layers}) == 2
