"""Options of a request through the whole engine: exact under speculation, per request in a mixed batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.special import log_softmax

from dspark_jax.core.errors import InputError
from dspark_jax.engine.requests import FinishReason, Request, SamplingOptions
from dspark_jax.speculation.sampling import Draw
from dspark_jax.testing.statistics import chi_square_p_value

pytestmark = pytest.mark.usefixtures("quick_compiles")
FALSE_ALARM_RATE = 1e-4
NUM_STOPS = 4


def mixed(tiny) -> list[Request]:
    """Every option somewhere, beside requests without any."""
    requests = tiny.requests(max_new_tokens=20)
    for number, request in enumerate(requests):
        request.stop_ids = frozenset({number % tiny.vocab_size, 3, 5})
        request.min_new_tokens = (0, 7, 2, 0, 12, 5)[number]
        request.logprobs = (None, 2, None, 0, None, 4)[number]
    requests[2].sampling = SamplingOptions(temperature=1.3, top_p=0.9, seed=4)
    return requests


@pytest.fixture(scope="module")
def answered(tiny) -> tuple[list[Request], list[Request]]:
    """(speculative in a batch, plain one by one)."""
    drafted, plain = mixed(tiny), mixed(tiny)
    list(tiny.engine("markov", slots=4).run(drafted))
    list(tiny.engine(None).run(plain))
    return drafted, plain


def test_the_same_as_plain_decoding(answered):
    for drafted, plain in zip(*answered, strict=True):
        if drafted.sampling.temperature == 0:
            assert drafted.emitted == plain.emitted
            assert drafted.finish_reason is plain.finish_reason


def test_no_stop_before_min_new_tokens(tiny, answered):
    for request in itertools.chain(*answered):
        assert not set(request.emitted[: request.min_new_tokens]) & request.stop_ids
        assert len(request.emitted) > request.min_new_tokens
    unmasked = tiny.plain
    would_have_stopped = [
        request
        for request in answered[0]
        if set(unmasked[request.id][: request.min_new_tokens]) & request.stop_ids
    ]
    assert len(would_have_stopped) >= 2  # otherwise the test would show little


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_device_goes_on_until_min_new_tokens(tiny, temperature):
    """It ends a request at any of its stop ids: before min_new_tokens none may come up, preempted or not."""
    requests = tiny.requests(max_new_tokens=30, temperature=temperature)
    for number, request in enumerate(requests):
        request.stop_ids = frozenset(range(6, 6 + NUM_STOPS)) if number % 2 else frozenset(range(0, 12, 3))
        request.min_new_tokens = (20, 7, 11, 1, 30, 17)[number]
    engine = tiny.engine("markov", slots=3, num_stops=NUM_STOPS)
    for request in requests:
        engine.submit(request)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps % 7 == 0 and (decoding := engine._decoding()):
            engine._preempt(decoding[0])
        active_B = np.asarray(engine._state.active_B)
        for seat in engine._decoding():
            request = seat.request
            emitted_at_most = seat.position + 1 - len(request.prompt_tokens)
            may_have_ended = emitted_at_most > request.min_new_tokens or emitted_at_most >= 30
            assert active_B[seat.slot] or may_have_ended
        assert steps < 500  # who ends on the device alone would be waited for

    assert all(len(request.emitted) >= request.min_new_tokens for request in requests)
    assert sum(request.finish_reason is FinishReason.STOP for request in requests) >= 4
    assert sum(request.preemptions for request in requests) >= 2


def test_logprobs_are_the_targets_own(tiny, answered):
    for drafted, plain in zip(*answered, strict=True):
        for request in (drafted, plain):
            if request.logprobs is None:
                assert request.emitted_logprobs == []
                continue
            text = np.zeros((1, 64), int)
            sequence = request.prompt_tokens + request.emitted
            text[0, : len(sequence)] = sequence
            rows_TV = log_softmax(np.asarray(tiny.forward(text).logits_BTV[0], np.float64), axis=-1)
            rows_TV = rows_TV[len(request.prompt_tokens) - 1 :]
            assert len(request.emitted_logprobs) == len(request.emitted)
            for row_V, token, found in zip(rows_TV, request.emitted, request.emitted_logprobs, strict=False):
                assert found.logprob == pytest.approx(row_V[token], abs=1e-4)
                likeliest = np.sort(row_V)[::-1][: request.logprobs]
                assert [logprob for _, logprob in found.top] == pytest.approx(likeliest.tolist(), abs=1e-4)
                assert all(row_V[id_] == pytest.approx(logprob, abs=1e-4) for id_, logprob in found.top)


def test_a_stop_check_sees_every_token_and_ends_exactly(tiny):
    seen: dict[str, list[int]] = {}
    requests = tiny.requests()
    for number, request in enumerate(requests):
        told = seen.setdefault(request.id, [])
        limit = (1, 2, 3, 5, 8, 13)[number]
        request.stop_check = lambda token, told=told, limit=limit: told.append(token) or len(told) >= limit

    answers = tiny.answers(tiny.engine("markov", slots=4), requests)
    for number, request in enumerate(requests):
        limit = (1, 2, 3, 5, 8, 13)[number]
        assert answers[request.id] == seen[request.id] == tiny.plain[request.id][:limit]
        assert request.finish_reason is FinishReason.STOP


def test_three_tokens_follow_the_law_with_a_mask(toy):
    """The third token may be the stop token, the first two may not: inside one block."""
    prompt, stop, count = [1, 4, 0], 2, 1500
    engine = toy.engine("markov", slots=20, max_context=16)
    requests = [
        Request(
            id=f"{seed}",
            prompt_tokens=list(prompt),
            max_new_tokens=3,
            min_new_tokens=2,
            stop_ids=frozenset({stop}),
            sampling=SamplingOptions(temperature=1.0, seed=7, sample=seed),
        )
        for seed in range(count)
    ]
    V = toy.vocab_size
    counts_VVV = np.zeros((V, V, V), int)
    for request in engine.run(requests):
        counts_VVV[tuple(request.emitted)] += 1

    law_VVV = np.zeros((V, V, V))
    for first, second in itertools.product(range(V), repeat=2):
        logits_TV = np.asarray(
            toy.forward(np.array([[*prompt, first, second]])).logits_BTV[0, 2:], np.float64
        )
        logits_TV[:2, stop] = -np.inf
        p_TV = np.exp(log_softmax(logits_TV, axis=-1))
        law_VVV[first, second] = p_TV[0, first] * p_TV[1, second] * p_TV[2]
    assert chi_square_p_value(counts_VVV.ravel(), law_VVV.ravel()) > FALSE_ALARM_RATE


def test_samples_of_one_prompt_differ(toy):
    engine = toy.engine("markov", slots=20, max_context=16)
    requests = toy.requests((3,) * 8, temperature=1.0, max_new_tokens=8)
    for sample, request in enumerate(requests):
        request.prompt_tokens = [1, 4, 0]
        request.sampling = SamplingOptions(temperature=1.0, seed=9, sample=sample)

    assert len({tuple(tokens) for tokens in toy.answers(engine, requests).values()}) > 5


class TestRequests:
    @pytest.mark.parametrize(
        ("fields", "what"),
        [
            ({"min_new_tokens": -1}, "min_new_tokens=-1; expected: 0 to"),
            ({"min_new_tokens": 9}, "min_new_tokens=9; expected: 0 to max_new_tokens=8"),
            ({"logprobs": -1}, "logprobs=-1"),
            ({"logprobs": 21}, "logprobs=21"),
            ({"min_new_tokens": 1, "stop_ids": frozenset(range(17))}, "17 stop ids"),
        ],
        ids=str,
    )
    def test_impossible(self, fields, what):
        with pytest.raises(InputError, match=what):
            Request(id="a", prompt_tokens=[1], max_new_tokens=8, **fields)

    def test_a_program_does_no_more_than_it_is_asked_for(self):
        def draw(**fields):
            return Request(
                id="a",
                prompt_tokens=[1],
                max_new_tokens=8,
                sampling=SamplingOptions(temperature=0.0),
                **fields,
            ).draw

        assert draw() == Draw.GREEDY
        assert draw(min_new_tokens=2) == Draw.GREEDY  # nothing is forbidden
        assert draw(min_new_tokens=2, stop_ids=frozenset({1}), emitted=[5]) == Draw.MASKED
        assert draw(min_new_tokens=2, stop_ids=frozenset({1}), emitted=[5, 6]) == Draw.GREEDY
        assert draw(logprobs=0) == Draw.LOGPROBS

    def test_a_stop_id_outside_the_vocabulary(self, tiny):
        engine = tiny.engine("markov", slots=4)
        (request,) = tiny.requests((3,), stop_ids=frozenset({tiny.vocab_size}))
        with pytest.raises(InputError, match="a stop id outside the vocabulary"):
            engine.check(request)
