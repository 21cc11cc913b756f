"""Several devices share every layer: the same tokens, and none waits for another inside a block."""

from __future__ import annotations

import re

import jax
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.engine.config import EngineConfig
from dspark_jax.speculation.sampling import Draw

pytestmark = pytest.mark.usefixtures("quick_compiles")

COLLECTIVE = re.compile(r"= \S+ (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)")


@pytest.mark.parametrize("name", ["markov", "gated", "eagle3", "mtp", "reduced"])
def test_greedy_answers_are_those_of_one_device(tiny, name):
    engine = tiny.engine(name, slots=3, tensor=2)
    assert tiny.answers(engine, tiny.requests()) == tiny.plain
    assert engine.pages.num_held == 0


@pytest.mark.parametrize("name", ["markov", "rnn"])
def test_draws_are_those_of_one_device(tiny, name):
    requests = [tiny.requests(temperature=1.0, max_new_tokens=16) for _ in range(2)]
    alone, shared = tiny.engine(name, slots=2), tiny.engine(name, slots=2, tensor=2)
    assert tiny.answers(alone, requests[0]) == tiny.answers(shared, requests[1])


@pytest.mark.parametrize("name", ["markov", "gated", "rnn"])
def test_no_device_waits_for_another_inside_the_block(tiny, name):
    engine = tiny.engine(name, slots=4, tensor=2)
    engine.programs.draft(4, Draw.FILTERED)
    text = engine.programs.compiled["draft", 4, Draw.FILTERED].as_text()
    loops, entry = text.split("ENTRY")
    assert COLLECTIVE.search(entry) and not COLLECTIVE.search(loops)


def test_pages_and_weights_are_divided(tiny):
    engine = tiny.engine("markov", tensor=2)
    state, weights = engine.programs.new_state(), engine.programs._weights
    pages = state.cache.keys_PKSH[0]
    assert pages.addressable_shards[0].data.shape[1] == pages.shape[1] // 2
    kernel = weights.target["layers_0"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2
    assert weights.drafter["head"]["w2"].is_fully_replicated


def test_what_cannot_be_divided_is_refused(tiny):
    with pytest.raises(InputError, match=r"tensor=8 for a target with 4 heads"):
        tiny.engine("markov", tensor=8)
    with pytest.raises(InputError, match=f"with {len(jax.devices())} devices"):
        EngineConfig(tensor=64).mesh()
