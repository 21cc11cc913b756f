"""The figures at the end of a job, against ones worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dspark_jax.engine.requests import Request, Status
from dspark_jax.serving.report import Report
from dspark_jax.serving.summary import Latencies, Summary, Tally


def finished(tokens: int, *rounds: tuple[int, int], domain: str | None = None) -> Request:
    """A request with these (accepted, verified) draft tokens in its rounds."""
    request = Request(id="a", prompt_tokens=[1], max_new_tokens=1, domain=domain, _status=Status.FINISHED)
    request.emitted = [0] * tokens
    for accepted, verified in rounds:
        request.accepted_per_round.append(accepted)
        request.verified_per_round.append(verified)
    return request


def test_a_tally_by_hand():
    tally = Tally()
    tally.add(finished(7, (2, 2), (0, 2), (1, 1)))
    tally.add(finished(3, (1, 2)))

    assert (tally.answers, tally.tokens, tally.rounds.total()) == (2, 10, 4)
    assert tally.accepted_length == 1 + (2 + 0 + 1 + 1) / 4
    positions = tally.positions(3)
    np.testing.assert_allclose(positions.survival_np, [3 / 4, 1 / 3, np.nan])
    np.testing.assert_allclose(positions.conditional_np, [3 / 4, 1 / 2, np.nan])


def test_no_round_no_accepted_length():
    tally = Tally()
    tally.add(finished(1))

    assert np.isnan(tally.accepted_length) and tally.tokens == 1


def report_of(summary: Summary, **changes) -> Report:
    facts = {
        "summary": summary,
        "block_len": 2,
        "answered_before": 0,
        "refused": 0,
        "load_s": 0.0,
        "compile_s": 0.0,
        "decode_s": 1.0,
        "counters": {},
        "stopped_by": None,
        "replaced_files": (),
    }
    return Report(**facts | changes)


@pytest.fixture
def summary() -> Summary:
    summary = Summary()
    summary.add(finished(6, (2, 2), (0, 2), domain="math"))
    summary.add(finished(4, (1, 2), (0, 2), domain="a rather long domain"))
    summary.add(finished(5, (2, 2)))
    return summary


def test_the_report(summary):
    summary.first_token_s.add(0.25)
    report = report_of(
        summary, refused=3, load_s=1.25, compile_s=2.5, decode_s=0.5, counters={"preemptions": 4, "other": 1}
    )

    assert report.as_text() == (
        "requests         3 answered, 3 refused\n"
        "tokens           15\n"
        "seconds          0.50, after 1.2 to load and 2.5 to compile\n"
        "tokens/s         30.0\n"
        "accepted length  2.00 in 5 rounds\n"
        "wasted           5 of 10 verified draft tokens\n"
        "first token      p50 250.0 ms, p99 250.0 ms\n"
        "preemptions      4\n"
        "\n"
        "domain                requests  tokens  accepted length\n"
        "all                          3      15             2.00\n"
        "a rather long domain         1       4             1.50\n"
        "math                         1       6             2.00\n"
        "\n"
        "accepted up to position      1      2\n"
        "all                      0.600  0.400\n"
        "a rather long domain     0.500  0.000\n"
        "math                     0.500  0.500\n"
        "\n"
        "accepted, if all before      1      2\n"
        "all                      0.600  0.667\n"
        "a rather long domain     0.500  0.000\n"
        "math                     0.500  1.000\n"
    )


def test_plain_decoding_has_no_positions(summary):
    plain = Summary()
    plain.add(finished(3, (0, 0), (0, 0)))

    report = report_of(plain, block_len=0).as_text()

    assert "position" not in report and "domain" not in report
    assert "accepted length  1.00 in 2 rounds" in report


def test_nothing_at_all():
    report = report_of(Summary()).as_text()

    assert "0 answered" in report and "position" not in report


def test_the_report_for_machines(summary):
    summary.budgets.update({3: 4, 6: 1})
    summary.failed = 1
    report = report_of(summary, refused=2, answered_before=7, counters={"preemptions": 4, "other": 1})
    found = json.loads(json.dumps(report.as_json(exit_code=1, job={"seed": 0}), allow_nan=False))

    assert found["requests"] == {"answered": 3, "answered_before": 7, "failed": 1, "refused": 2}
    assert (found["tokens"], found["rounds"], found["accepted_length"]) == (15, 5, 2.0)
    assert (found["verified_tokens"], found["wasted_verifications"]) == (10, 5)
    assert found["budget_histogram"] == {"3": 4, "6": 1}
    assert found["mode_shares"] == {"speculative": 1.0, "plain": 0.0}
    assert found["acceptance"]["math"]["conditional"] == [0.5, 1.0]
    assert found["acceptance"]["math"]["survival_rounds"] == [2, 2]
    assert (found["preemptions"], found["fallbacks"], found["engine"]) == (
        4,
        None,
        {"preemptions": 4, "other": 1},
    )
    assert found["first_token_s"] == {"p50": None, "p90": None, "p99": None}


def test_a_report_of_nothing_is_json_too():
    json.dumps(report_of(Summary()).as_json(exit_code=0, job={}), allow_nan=False)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_latencies(share):
    times_np = np.random.default_rng(0).lognormal(-4, 1, 2000)
    latencies = Latencies()
    for time_s in times_np:
        latencies.add(time_s)

    exact_s = np.quantile(times_np, share, method="inverted_cdf")
    assert latencies.quantile_s(share) == pytest.approx(exact_s, rel=0.011)
