"""Random workloads: whatever happens around a request, its greedy answer is what plain decoding gives it."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.engine.engine import Engine
from dspark_jax.engine.requests import Mode, Request, SamplingOptions, Status
from dspark_jax.speculation.schedule import Algorithm1, Lagged
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength, FullBlock

pytestmark = pytest.mark.usefixtures("quick_compiles")

CASES = {
    "off": (FixedLength(length=0), 5),
    "fixed": (FixedLength(length=2), 2),
    "full": (FullBlock(), 1),
    "threshold": (ConfidenceThreshold(threshold=0.4), 7),
    "algorithm1": (Algorithm1(), 3),
    "lagged": (Lagged(probe_every=3), 32),
    "lagged-few": (Lagged(), 4),
}
REQUESTS_PER_CASE = 30
MAX_CONTEXT = 64


def random_requests(tiny, seed: int) -> list[Request]:
    """Greedy ones, and among them some that are not, as company."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(REQUESTS_PER_CASE):
        length = int(rng.integers(1, 40))
        greedy = rng.random() < 0.8
        requests.append(
            Request(
                id=f"{number}",
                prompt_tokens=rng.integers(0, tiny.vocab_size, length).tolist(),
                max_new_tokens=int(rng.integers(1, MAX_CONTEXT - length)),
                stop_ids=frozenset(rng.integers(0, tiny.vocab_size, rng.integers(0, 2)).tolist()),
                sampling=SamplingOptions(temperature=0.0 if greedy else 1.2, seed=number),
            )
        )
    return requests


@pytest.fixture(scope="module")
def plain_engine(tiny) -> Engine:
    return tiny.engine(None, max_context=MAX_CONTEXT)


@pytest.mark.parametrize("case", CASES)
def test_random_requests_equal_plain_decoding_one_by_one(tiny, plain_engine, case):
    policy, slots = CASES[case]
    # Pages for about half of the slots; beside that, requests are preempted at random.
    pages = max(5, 5 * slots // 2)
    engine = tiny.engine(
        "markov", policy, slots=slots, max_context=MAX_CONTEXT, num_pages=pages, prefill_tokens=32
    )
    seed = list(CASES).index(case)
    requests, waiting = random_requests(tiny, seed), random_requests(tiny, seed)
    rng = np.random.default_rng(100 + seed)
    arriving = list(requests)
    while arriving or engine.has_work:
        for _ in range(rng.integers(0, 4)):
            if arriving:
                engine.submit(arriving.pop())
        engine.step()
        if (decoding := engine._decoding()) and rng.random() < 0.1:
            engine._preempt(decoding[rng.integers(len(decoding))])
        alive = [r for r in requests if not r.ended and r not in arriving]
        if alive and rng.random() < 0.05:
            engine.cancel(alive[rng.integers(len(alive))])

    expected = tiny.answers(plain_engine, [r for r in waiting if r.sampling.temperature == 0])
    for request in requests:
        if request.sampling.temperature == 0:
            answer = expected[request.id]
            if request.status is Status.CANCELLED:
                answer = answer[: len(request.emitted)]
            assert request.emitted == answer, (request.id, request.status)
    assert sum(request.status is Status.FINISHED for request in requests) > REQUESTS_PER_CASE / 2
    assert engine.pages.num_held == 0
    assert engine.counters["preemptions"] > 0


def test_seeds_belong_to_requests(tiny):
    """Same seed, other batch mates, other slots: same tokens, where no budget is shared."""

    def requests():
        return tiny.requests(temperature=1.0)

    policy = ConfidenceThreshold(threshold=0.5)
    apart, together = tiny.engine("rnn", policy), tiny.engine("rnn", policy, slots=5)

    assert tiny.answers(apart, requests()) == tiny.answers(together, requests()[::-1])
    # A round in which nothing of a block is worth verifying says nothing against the next block.
    assert apart.counters["unusable_drafts"] == 0 < apart.budgets[0]


class TestFaults:
    """A broken drafter costs speed, never a token."""

    def test_a_drafter_that_gives_nan(self, tiny):
        engine = tiny.engine("markov", slots=2)
        weights = engine._programs._weights
        broken = weights.drafter | {
            "head": {**weights.drafter["head"], "w1": weights.drafter["head"]["w1"] * np.nan}
        }
        engine._programs._weights = weights.replace(drafter=broken)
        requests = tiny.requests(temperature=0.0)
        requests[1].sampling = SamplingOptions(temperature=1.0)

        answers = tiny.answers(engine, requests)

        assert all(answers[id] == tiny.plain[id] for id in answers if id != "r1")
        # Two rounds each: the second is on its way before the first is read.
        assert engine.counters["unusable_drafts"] == 2 * len(requests)
        assert {request.mode for request in requests} == {Mode.FALLBACK_AR}
        assert all(sum(request.verified_per_round) == 0 for request in requests)

    def test_a_drafter_that_raises(self, tiny, monkeypatch):
        engine = tiny.engine("markov", slots=2)
        right, calls = engine._programs.draft, iter(range(10**6))

        def sometimes(requests, draw):
            if next(calls) % 3 == 1:
                raise RuntimeError("injected")
            return right(requests, draw)

        monkeypatch.setattr(engine._programs, "draft", sometimes)
        requests = tiny.requests()

        assert tiny.answers(engine, requests) == tiny.plain
        assert engine.counters["drafter_raised"] > 3
        assert sum(map(sum, (request.accepted_per_round for request in requests))) > 0
