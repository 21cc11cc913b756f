"""Targets whose layers are not a Llama's: windows and caches of two shapes, a soft cap, experts."""

from __future__ import annotations

import pytest

from dspark_jax.testing.tiny import TARGETS, tiny_target


@pytest.fixture(scope="module", params=["gemma4", "qwen3-moe"])
def family(request, tiny):
    """The tiny engines over a target of the same vocabulary."""
    engines = type(tiny)(tiny.vocab_size)
    engines.target = tiny_target(**TARGETS[request.param], vocab_size=tiny.vocab_size, seed=11)
    for i in range(engines.target.config.num_layers):  # else drafters hardly ever agree with it
        engines.target.params[f"layers_{i}"]["attention"]["o"]["kernel"] *= 0.3
    return engines


@pytest.mark.parametrize("tensor", [1, 2])
def test_greedy_output_is_plain_decoding(family, tensor):
    """Rejected rows must not overwrite what a window still sees.

    On two devices the single kv head of Gemma's full layers is whole on both.
    """
    requests = family.requests()

    answers = family.answers(family.engine("markov", slots=4, tensor=tensor), requests)

    assert answers == family.plain
    assert {accepted for r in requests for accepted in r.accepted_per_round} >= {1, 2, 3}
    assert len(set(family.target.config.layers)) == 2
