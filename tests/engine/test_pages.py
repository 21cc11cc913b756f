"""Pages are counted: none leaks, none is written by two, and equal prompts share theirs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.core.errors import InputError
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.pages import PagePool, find_prefix, remember_prompt
from dspark_jax.engine.requests import Status

PAGE = 4

# A prompt comes (its length, which of two texts, where it turns away from it), or a request leaves.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 3 * PAGE + 1), st.integers(0, 1), st.integers(0, 3 * PAGE)),
        st.integers(0, 10),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(events=EVENTS)
def test_nothing_leaks_and_what_is_shared_is_right(events):
    """A model of the device: what every page holds, written as the engine would write it."""
    pool, content = PagePool(12), np.zeros((12, PAGE), int)
    held: list[list[int]] = []
    for event in events:
        if isinstance(event, int):
            if held:
                pool.give_back(held.pop(event % len(held)))
            continue
        length, text, turn = event
        tokens = [1 + text if position < turn else 7 for position in range(length)]
        prefix = find_prefix(pool, tokens, PAGE)
        shared = [*prefix.pages, *([] if prefix.copied is None else [prefix.copied])]
        for page in shared:
            pool.share(page)
        own = pool.take(length // PAGE + 1 - len(prefix.pages))
        if own is None:
            pool.give_back(shared)
            continue
        assert all(pool.holders(page) == 1 for page in own), "nobody else may see what is written"
        if prefix.copied is not None:
            content[own[0]] = content[prefix.copied]
            pool.give_back([prefix.copied])
        pages = [*prefix.pages, *own]
        for position in range(prefix.num_tokens, length):
            content[pages[position // PAGE], position % PAGE] = tokens[position]
        found = [content[pages[position // PAGE], position % PAGE] for position in range(length)]
        assert found == tokens
        assert prefix.num_tokens < length
        remember_prompt(pool, tokens, pages, PAGE)
        content[pages[length // PAGE], length % PAGE] = -1  # the answer begins
        held.append(pages)
        assert pool.num_held == len({page for pages in held for page in pages})
    for pages in held:
        pool.give_back(pages)
    assert (pool.num_held, pool.num_free) == (0, 12)


def test_pages_are_given_back_once():
    pool = PagePool(2)
    pages = pool.take(2)
    assert pages is not None and pool.take(1) is None
    pool.give_back(pages)
    with pytest.raises(RuntimeError, match="given back twice"):
        pool.give_back(pages[:1])
    assert pool.peak == 2


def test_a_pool_too_small_for_one_request_is_refused():
    with pytest.raises(InputError, match="at least 9"):
        EngineConfig(max_context=128, page_len=16, num_pages=8).total_pages(block_len=3)


@pytest.mark.parametrize("name", ["markov", "eagle3", "mtp", None])
def test_equal_prompts_share_pages_and_change_nothing(tiny, name):
    """Whole pages are shared, a page that both write to is copied; the drafter's context goes along."""

    def requests(lengths):
        many = tiny.requests(lengths, max_new_tokens=20)
        for request in many[1:]:
            request.prompt_tokens = many[0].prompt_tokens[: len(request.prompt_tokens)]
        return many

    lengths = (23, 23, 23, 18, 9, 23)
    engine = tiny.engine(name, slots=2, page_len=8)
    apart = tiny.engine(name, slots=2, page_len=8, share_prefixes=False)
    alone, together = requests(lengths), requests(lengths)

    assert tiny.answers(apart, alone) == tiny.answers(engine, together)
    # Three more times the 22 tokens before the last, two pages of the 18, one of the 9 (positions 0 .. 7).
    assert engine.counters["shared_tokens"] == (0 if name == "mtp" else 3 * 22 + 16 + 8)
    for one, other in zip(alone, together, strict=True):  # the drafter saw the same
        assert one.accepted_per_round == other.accepted_per_round
    assert engine.pages.num_held == apart.pages.num_held == 0


def test_preempted_requests_come_back(tiny):
    """Too few pages for all: the youngest give theirs back, and their answers are the same in the end."""
    engine = tiny.engine("markov", slots=4, max_context=48, page_len=8, num_pages=9)
    requests = tiny.requests()

    assert tiny.answers(engine, requests) == tiny.plain
    assert engine.counters["preemptions"] == sum(request.preemptions for request in requests) > 0
    assert engine.pages.peak <= 9 and engine.pages.num_held == 0
    assert {request.status for request in requests} == {Status.FINISHED}


def test_nothing_late_reaches_the_next_request_in_a_slot(tiny):
    """A round is on its way for a request that is cancelled; its seat's next owner sees nothing of it."""
    engine = tiny.engine("markov", slots=1)
    first, second = tiny.requests((3, 9))
    engine.submit(first)
    engine.step()
    engine.step()
    emitted = list(first.emitted)
    engine.submit(second)
    engine.cancel(first)
    while engine.has_work:
        engine.step()

    assert first.emitted == emitted
    assert second.emitted == tiny.plain["r1"]
