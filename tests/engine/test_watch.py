"""The engine watches its predictions: wrong ones are mended or not used, and no token changes by it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from scipy.special import log_softmax

from dspark_jax.engine.engine import Engine
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.speculation import watch
from dspark_jax.speculation.calibration import expected_calibration_error, predicted, unscaled
from dspark_jax.speculation.schedule import Algorithm1, Lagged
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FullBlock
from dspark_jax.speculation.watch import Change, Watch
from dspark_jax.testing.statistics import chi_square_p_value

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = Watch(window=128, probe_every=2, starved_after=64)
LENGTHS = (3, 9, 1, 14, 6, 8, 5, 11)


def requests_of(tiny, round_number: int, domain: str | None = None) -> list[Request]:
    """Eight greedy ones, every time others."""
    rng = np.random.default_rng(round_number)
    return [
        Request(
            id=f"{domain}-{round_number}-{number}",
            prompt_tokens=rng.integers(0, tiny.vocab_size, length).tolist(),
            max_new_tokens=40,
            sampling=SamplingOptions(temperature=0.0),
            domain=domain,
        )
        for number, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def plain_engine(tiny) -> Engine:
    return tiny.engine(None, slots=4)


def check_against_plain(tiny, plain_engine: Engine, done: list[Request], rounds: range) -> None:
    """What was answered in these rounds of `requests_of` is what plain decoding answers."""
    domains = dict.fromkeys(request.domain for request in done)
    again = [r for domain in domains for number in rounds for r in requests_of(tiny, number, domain)]
    assert {request.id: request.emitted for request in done} == tiny.answers(plain_engine, again)


def error_of(requests: list[Request], scaling_np: np.ndarray) -> float:
    """ECE of what was verified."""
    logits_np = np.concatenate([request.confidence_per_round for request in requests])
    verified_np = np.concatenate([request.verified_per_round for request in requests])
    accepted_np = np.concatenate([request.accepted_per_round for request in requests])
    rounds = watch.Rounds(logits_np=logits_np, verified_np=verified_np, accepted_np=accepted_np)
    a_np, seen_np = predicted(logits_np, scaling_np), rounds.seen_np
    return expected_calibration_error(a_np[seen_np], rounds.survived_np[seen_np])


@pytest.mark.parametrize(("policy", "slots"), [(Lagged(), 4), (Algorithm1(), 1)], ids=str)
def test_a_scaling_that_is_far_too_hopeful_is_mended(tiny, plain_engine, policy, slots):
    hopeful_np = np.array([[1.0] * 3, [4.0] * 3])
    engine = tiny.engine("markov", policy, slots=slots, watch=SMALL)
    engine.calibrate(hopeful_np)
    done = list(engine.run(itertools.chain.from_iterable(requests_of(tiny, n) for n in range(3))))

    assert engine.counters["refits"] >= 1
    mended_np = engine._planner.scaling([None], 1)[0]
    assert error_of(done, mended_np) < error_of(done, hopeful_np) / 2
    check_against_plain(tiny, plain_engine, done, range(3))


def test_a_domain_falls_back_and_comes_back(tiny, plain_engine, monkeypatch, caplog):
    """Only where the fit itself fails: a fit that works mends whatever does not change all the time."""
    right = watch.refit

    hopeful_np = np.array([[1.0] * 3, [6.0] * 3])

    def fails(rounds, scaling_np):
        is_odd = np.array_equal(scaling_np, hopeful_np)
        return hopeful_np if is_odd else right(rounds, scaling_np)

    engine = tiny.engine("markov", Lagged(), slots=4, watch=SMALL)
    costs_ms_np = engine.cost_table().verify_ms_np
    # Verification is free: who is trusted verifies in every round.
    free_ms_np = np.where(np.isfinite(costs_ms_np), 10.0, np.inf)
    engine._table = dataclasses.replace(engine.cost_table(), verify_ms_np=free_ms_np)
    done, number = [], 0

    def answer_more() -> None:
        nonlocal number
        pairs = zip(requests_of(tiny, number, "odd"), requests_of(tiny, number, "even"), strict=True)
        done.extend(engine.run(itertools.chain(*pairs)))
        number += 1

    answer_more()
    engine._planner._watch._of("odd").scaling_np = hopeful_np
    with monkeypatch.context() as patch:
        patch.setattr(watch, "refit", fails)
        while not engine.counters["calibration_fallbacks"]:
            answer_more()
            assert number < 12
        assert "domain 'odd'" in caplog.text and "plain decoding" in caplog.text
        before = len(done)
        answer_more()
    verified = {
        domain: np.concatenate([r.verified_per_round for r in done[before:] if r.domain == domain])
        for domain in ("odd", "even")
    }
    # Seldom enough to be cheap, often enough to find out.
    assert 0 < (verified["odd"] > 0).mean() < 0.5 < (verified["even"] > 0).mean()

    while not engine.counters["calibration_recoveries"]:
        answer_more()
        assert number < 24
    assert engine.counters["calibration_fallbacks"] == 1
    check_against_plain(tiny, plain_engine, done, range(number))


@pytest.mark.parametrize(
    ("policy", "watched"),
    [
        (FullBlock(), False),
        (ConfidenceThreshold(threshold=0.3), False),
        (Lagged(), True),
        (Algorithm1(), True),
    ],
    ids=str,
)
def test_predictions_are_watched_where_lengths_depend_on_them(tiny, policy, watched):
    counted = set(tiny.engine("markov", policy).counters)
    assert counted == ({change.value for change in Change} if watched else set())
    assert not tiny.engine("markov", policy, watch=None).counters


def test_tokens_follow_the_targets_law_while_scalings_change(toy):
    """Refits look at finished rounds only."""
    prompt, count = [1, 4, 0], 1000
    eager = Watch(window=16, margin=1e-3, false_alarm_rate=0.99, probe_every=1, starved_after=2)
    engine = toy.engine("markov", Lagged(), slots=4, max_context=16, watch=eager)
    requests = [
        Request(
            id=f"{seed}",
            prompt_tokens=list(prompt),
            max_new_tokens=3,
            sampling=SamplingOptions(temperature=1.0, seed=11, sample=seed),
            domain="ab"[seed % 2],
        )
        for seed in range(count)
    ]
    V = toy.vocab_size
    counts_VVV = np.zeros((V, V, V), int)
    for request in engine.run(requests):
        counts_VVV[tuple(request.emitted)] += 1

    law_VVV = np.zeros((V, V, V))
    for first, second in itertools.product(range(V), repeat=2):
        tokens_1T = np.array([[*prompt, first, second]])
        p_TV = np.exp(log_softmax(np.asarray(toy.forward(tokens_1T).logits_BTV[0, 2:], np.float64), axis=-1))
        law_VVV[first, second] = p_TV[0, first] * p_TV[1, second] * p_TV[2]
    assert engine.counters["refits"] > 3
    assert not np.array_equal(engine._planner.scaling(["a"], 1)[0], unscaled(toy.block_len))
    assert chi_square_p_value(counts_VVV.ravel(), law_VVV.ravel()) > 1e-4
