"""Greedy speculative output is plain decoding, token by token, for every drafter, policy and batch."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.engine import programs
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.nn.kv_cache import KVCache
from dspark_jax.nn.paged_cache import Rows, write
from dspark_jax.speculation.schedule import Algorithm1, Lagged
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength, FullBlock

pytestmark = pytest.mark.usefixtures("quick_compiles")

G = 3
POLICIES = {
    **{f"fixed-{length}": FixedLength(length=length) for length in range(G + 1)},
    "full": FullBlock(),
    "threshold": ConfidenceThreshold(threshold=0.5),
    "algorithm1": Algorithm1(),
    "lagged": Lagged(),
}


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(tiny, policy, slots):
    engine = tiny.engine("markov", POLICIES[policy], slots=slots)
    requests = tiny.requests()

    assert tiny.answers(engine, requests) == tiny.plain
    if policy == "full":  # otherwise the test would show little
        assert {accepted for r in requests for accepted in r.accepted_per_round} == {0, 1, 2, 3}
    if policy == "threshold":
        assert {verified for r in requests for verified in r.verified_per_round} >= {0, 1, 3}


@pytest.mark.parametrize("name", ["gated", "rnn", "reduced", "dflash", "eagle3", "eagle3-reduced", "mtp"])
def test_every_drafter(tiny, name):
    requests = tiny.requests()

    assert tiny.answers(tiny.engine(name, slots=4), requests) == tiny.plain
    accepted = {accepted for r in requests for accepted in r.accepted_per_round}
    # Without a head, random layers predict little.
    assert accepted >= ({0, 1, 2, 3} if name in ("gated", "rnn", "reduced") else {0, 1})


def test_a_batch_of_plain_decoding(tiny):
    assert tiny.answers(tiny.engine(None, slots=4), tiny.requests()) == tiny.plain


def test_greedy_requests_among_sampled_ones(tiny):
    requests = tiny.requests()
    for request in requests[::2]:
        request.sampling = SamplingOptions(temperature=1.5, top_p=0.9, top_k=7, seed=5)

    answers = tiny.answers(tiny.engine("markov", slots=4), requests)

    for request in requests[1::2]:
        assert answers[request.id] == tiny.plain[request.id]


def test_batch_mates_change_nothing(tiny):
    """Seeded draws belong to the request, whoever sits beside it and in whichever slot."""
    engine = tiny.engine("rnn", slots=3)

    def requests():
        mixed = tiny.requests(temperature=1.0)
        mixed[1].sampling = dataclasses.replace(mixed[1].sampling, top_k=4)
        mixed[4].sampling = dataclasses.replace(mixed[4].sampling, temperature=0.7, min_p=0.05)
        return mixed

    together = tiny.answers(engine, requests())
    apart = {id: tokens for request in requests() for id, tokens in tiny.answers(engine, [request]).items()}
    reversed_order = tiny.answers(engine, requests()[::-1])
    other_seed = tiny.answers(engine, tiny.requests(temperature=1.0, seed=100))

    assert together == apart == reversed_order
    assert all(other_seed[id] != tokens for id, tokens in together.items())


# Each of these engines is broken on purpose; what catches it is the comparison of the tests above.


def without_the_anchors_keys(weights, state, output, verified, step, *, models, right=programs.commit):
    """Forgets the K/V row of the round's first token, the bonus of the round before."""
    table_RN, slots_R = step.paging.table_RN, step.paging.slots_R
    anchors = Rows(jnp.arange(len(slots_R)), state.positions_B[slots_R], jnp.zeros_like(slots_R))

    def forget(buffers):
        shapes = [(len(slots_R), *pages.shape[1::2]) for pages in buffers]
        rows = map(jnp.zeros, shapes)
        return tuple(write(pages, x, table_RN, anchors) for pages, x in zip(buffers, rows, strict=True))

    new = right(weights, state, output, verified, step, models=models)
    return new.replace(cache=KVCache(forget(new.cache.keys_PKSH), forget(new.cache.values_PKSH)))


def one_position_too_far(weights, state, output, verified, step, *, models, right=programs.commit):
    """Skips a position after every round."""
    new = right(weights, state, output, verified, step, models=models)
    return new.replace(positions_B=new.positions_B + 1)


@pytest.mark.parametrize("fault", [without_the_anchors_keys, one_position_too_far])
def test_a_broken_commit_is_caught(tiny, monkeypatch, fault):
    monkeypatch.setattr(programs, "commit", fault)

    answers = tiny.answers(tiny.engine("markov"), tiny.requests())

    wrong = [id for id in answers if answers[id] != tiny.plain[id]]
    assert len(wrong) >= len(answers) - 1
    assert all(np.array_equal(answers[id][:1], tiny.plain[id][:1]) for id in answers), "prefill is not broken"
