"""The figures at the end of a job, against ones worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.engine.requests import Request
from dspark_jax.serving.summary import Summary, Tally


def finished(tokens: int, *rounds: tuple[int, int]) -> Request:
    """A request with these (accepted, verified) draft tokens in its rounds."""
    request = Request(id="a", prompt_tokens=[1], max_new_tokens=1)
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


@pytest.fixture
def summary() -> Summary:
    summary = Summary()
    summary.add(finished(6, (2, 2), (0, 2)), "math")
    summary.add(finished(4, (1, 2), (0, 2)), "a rather long domain")
    summary.add(finished(5, (2, 2)), None)
    return summary


def test_the_report(summary):
    report = summary.report(block_len=2, refused=3, load_s=1.25, compile_s=2.5, decode_s=0.5)

    assert report == (
        "requests         3 answered, 3 refused\n"
        "tokens           15\n"
        "seconds          0.50, after 1.2 to load and 2.5 to compile\n"
        "tokens/s         30.0\n"
        "accepted length  2.00 in 5 rounds\n"
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
    plain.add(finished(3, (0, 0), (0, 0)), None)

    report = plain.report(block_len=0, refused=0, load_s=0, compile_s=0, decode_s=1)

    assert "position" not in report and "domain" not in report
    assert "accepted length  1.00 in 2 rounds" in report


def test_nothing_at_all():
    report = Summary().report(block_len=2, refused=0, load_s=0, compile_s=0, decode_s=1)

    assert "0 answered" in report and "position" not in report
