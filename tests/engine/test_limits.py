"""Where answers end, and what a request may go through."""

from __future__ import annotations

import itertools

import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.requests import TRANSITIONS, FinishReason, Request, SamplingOptions, Status
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength


@pytest.fixture(scope="module")
def engine(tiny):
    """Two slots, full blocks; every test leaves it idle."""
    return tiny.engine("markov", slots=2)


def test_max_new_tokens_is_exact(tiny, engine):
    for limit in range(1, 12):
        requests = tiny.requests(max_new_tokens=limit)

        assert tiny.answers(engine, requests) == {id: tokens[:limit] for id, tokens in tiny.plain.items()}
        assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}


def test_a_stop_token_ends_the_answer_exactly_there(tiny, engine):
    """Whether it was drafted, in any place of an accepted prefix, or is the target's own."""
    for stop in range(tiny.vocab_size):
        requests = tiny.requests(stop_ids=frozenset({stop}))
        answers = tiny.answers(engine, requests)
        for request in requests:
            plain = tiny.plain[request.id]
            end = plain.index(stop) + 1 if stop in plain else len(plain)
            assert answers[request.id] == plain[:end]
            assert request.finish_reason is (FinishReason.STOP if stop in plain else FinishReason.LENGTH)
            assert request.status is Status.FINISHED


def test_stops_fall_inside_accepted_prefixes(tiny, engine):
    """The test above shows what it says only if this happens in it."""
    cut = 0
    for stop in range(tiny.vocab_size):
        for request in engine.run(tiny.requests(stop_ids=frozenset({stop}))):
            committed = 1 + sum(accepted + 1 for accepted in request.accepted_per_round)
            cut += request.finish_reason is FinishReason.STOP and committed > len(request.emitted)
    assert cut > 3


def test_the_last_block_reaches_past_max_context(tiny):
    """Answers that end exactly where the context does; the last blocks are drafted and verified beyond."""

    def requests():
        full = tiny.requests((1, 8, 9, 16, 23))
        for request in full:
            request.max_new_tokens = 24 - len(request.prompt_tokens)
        return full

    answers = tiny.answers(tiny.engine("markov", slots=2, max_context=24), requests())

    assert answers == tiny.answers(tiny.engine(None), requests())


def test_a_request_that_cannot_fit_is_refused(tiny, engine):
    (request,) = tiny.requests((40,), max_new_tokens=25)
    with pytest.raises(InputError, match=r"40 prompt tokens and max_new_tokens=25.*at most 64"):
        engine.submit(request)
    request.prompt_tokens[3] = tiny.vocab_size
    request.max_new_tokens = 2
    with pytest.raises(InputError, match="outside the vocabulary"):
        engine.submit(request)
    assert not engine.has_work


def test_requests_are_taken_only_as_slots_free_up(tiny, engine):
    taken = []

    def source():
        for request in tiny.requests():
            taken.append(request)
            yield request

    finished = 0
    for _ in engine.run(source()):
        finished += 1
        assert len(taken) <= finished + 2
    assert finished == 6


class TestCancel:
    def test_queued_and_decoding(self, tiny, engine):
        first, second, queued, last = tiny.requests((3, 9, 1, 14))
        for request in (first, second, queued, last):
            engine.submit(request)
        engine.step()
        emitted = list(second.emitted)

        engine.cancel(second)
        engine.cancel(queued)
        while engine.has_work:
            engine.step()

        assert (second.status, second.emitted) == (Status.CANCELLED, emitted)
        assert (queued.status, queued.emitted) == (Status.CANCELLED, [])
        for request in (first, last):  # the last one sits where the second one sat
            assert request.emitted == tiny.plain[request.id]

    def test_finished(self, tiny, engine):
        (request,) = engine.run(tiny.requests((3,)))
        with pytest.raises(RuntimeError, match="finished -> cancelled"):
            engine.cancel(request)


class TestRequest:
    @pytest.mark.parametrize(("before", "after"), list(itertools.product(Status, Status)))
    def test_moves(self, before, after):
        request = Request(id="a", prompt_tokens=[1], max_new_tokens=1, _status=before)
        if after in TRANSITIONS[before]:
            request.move_to(after)
            assert request.status is after
        else:
            with pytest.raises(RuntimeError, match=f"{before.value} -> {after.value}"):
                request.move_to(after)
            assert request.status is before

    def test_every_status_can_be_reached_and_left(self):
        assert set(TRANSITIONS) == set(Status)
        assert set.union(*map(set, TRANSITIONS.values())) == set(Status) - {Status.QUEUED}

    def test_nothing_is_emitted_while_queued_or_after_the_end(self):
        request = Request(id="a", prompt_tokens=[1], max_new_tokens=1)
        with pytest.raises(RuntimeError, match="queued -> finished"):
            request.emit([7])

    def test_equal_requests_are_not_the_same(self):
        first, second = (Request(id="a", prompt_tokens=[1], max_new_tokens=1) for _ in range(2))
        assert first != second and len({first, second}) == 2

    @pytest.mark.parametrize(
        "bad",
        [
            {"temperature": -0.1},
            {"temperature": float("nan")},
            {"temperature": float("inf")},
            {"top_k": -1},
            {"top_k": 2**31},
            {"top_p": 0.0},
            {"top_p": 1.1},
            {"min_p": 1.0},
            {"seed": -1},
            {"seed": 2**32},
        ],
        ids=str,
    )
    def test_impossible_options(self, bad):
        (name,) = bad
        with pytest.raises(InputError, match=name):
            SamplingOptions(**bad)

    def test_impossible_requests(self):
        with pytest.raises(InputError, match="without tokens"):
            Request(id="a", prompt_tokens=[], max_new_tokens=1)
        with pytest.raises(InputError, match="max_new_tokens=0"):
            Request(id="a", prompt_tokens=[1], max_new_tokens=0)


class TestConfiguration:
    def test_a_length_that_is_never_drafted(self, tiny):
        with pytest.raises(InputError, match="at most the 3 tokens"):
            tiny.engine("markov", FixedLength(length=4))
        with pytest.raises(InputError, match="at most the 0 tokens"):
            tiny.engine(None, FixedLength(length=1))

    def test_a_threshold_without_a_confidence_head(self, tiny):
        with pytest.raises(InputError, match="confidence head"):
            tiny.engine(None, ConfidenceThreshold(threshold=0.5))

    def test_a_context_that_the_target_does_not_have(self, tiny):
        with pytest.raises(InputError, match="at most 128"):
            tiny.engine("markov", max_context=129)

    @pytest.mark.parametrize("name", ["slots", "max_context", "smallest_prefill"])
    def test_nothing(self, name):
        with pytest.raises(InputError, match=f"{name}=0"):
            EngineConfig(**{name: 0})
