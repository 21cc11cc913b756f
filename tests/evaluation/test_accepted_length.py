"""Accepted length against figures worked out by hand; the bootstrap is repeatable and covers the truth."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.engine.requests import Request, Status
from dspark_jax.evaluation.accepted_length import (
    PromptRounds,
    accepted_length,
    resampled_accepted_lengths,
    summarise,
)
from dspark_jax.evaluation.runner import rounds_of

G = 3


def record(name: str, accepted: list[int], domain: str = "math") -> PromptRounds:
    accepted_np = np.array(accepted, np.int64)
    return PromptRounds(
        id=name,
        domain=domain,
        new_tokens=int((accepted_np + 1).sum()) + 1,
        committed_np=accepted_np + 1,
        accepted_np=accepted_np,
        verified_np=np.full(len(accepted), G, np.int64),
        confidence_np=np.zeros((len(accepted), G), np.float32),
    )


def test_accepted_length_counts_rounds_not_prompts():
    # 3 + 1 + 4 tokens in three rounds and 2 in one: 10 / 4, while the mean of the prompts' means is 2.33.
    assert accepted_length([record("a", [2, 0, 3]), record("b", [1])]) == 2.5


def test_positions_by_hand():
    acceptance = summarise([record("a", [2, 0, 3]), record("b", [1])], G)
    positions = acceptance.domains["math"].positions

    np.testing.assert_allclose(positions.survival_np, [3 / 4, 2 / 4, 1 / 4])
    np.testing.assert_allclose(positions.conditional_np, [3 / 4, 2 / 3, 1 / 2])
    np.testing.assert_array_equal(positions.conditional_rounds_np, [4, 3, 2])


def test_every_domain_counts_the_same_in_the_macro_average():
    many = [record(f"m{i}", [3, 3]) for i in range(9)]
    acceptance = summarise([*many, record("c0", [0, 0], "chat"), record("c1", [0], "chat")], G)

    assert acceptance.macro.value == (4.0 + 1.0) / 2
    # No prompt differs from another of its domain, so drawing them again changes nothing.
    assert (acceptance.macro.low, acceptance.macro.high) == (2.5, 2.5)
    assert list(acceptance.domains) == ["chat", "math"]
    assert acceptance.domains["math"].prompts == 9
    assert acceptance.domains["math"].rounds == 18


def test_bootstrap_belongs_to_the_seed_and_the_domain():
    draw = np.random.default_rng(0)
    records = [record(f"p{i:02d}", draw.integers(0, G + 1, size=8).tolist()) for i in range(20)]
    others = [record(f"q{i}", [i % 3], "chat") for i in range(5)]

    alone = summarise(records, G).domains["math"].accepted_length
    shuffled = summarise([*others, *records[::-1]], G).domains["math"].accepted_length
    other_seed = summarise(records, G, seed=1).domains["math"].accepted_length

    assert alone == shuffled
    assert alone.value == other_seed.value
    assert alone.low != other_seed.low
    assert alone.low < alone.value < alone.high


def test_bootstrap_spread_is_the_standard_error():
    # With as many rounds in every prompt the estimate is a mean, whose standard error is known.
    draw = np.random.default_rng(1)
    records = [record(f"p{i}", draw.integers(0, G + 1, size=10).tolist()) for i in range(50)]
    means = [accepted_length([each]) for each in records]

    lengths = resampled_accepted_lengths(records, seed=[0], resamples=4000)

    assert lengths.std() == pytest.approx(np.std(means) / np.sqrt(50), rel=0.05)
    assert lengths.mean() == pytest.approx(np.mean(means), abs=0.01)


def test_one_prompt_has_a_value_and_no_interval():
    acceptance = summarise([record("a", [1, 2])], G)

    assert acceptance.macro.value == 2.5
    assert np.isnan(acceptance.macro.low)
    assert acceptance.macro.as_json() == {"value": 2.5, "low": None, "high": None}


def test_prompts_without_rounds_are_counted_and_change_nothing():
    records = [record("a", [1, 2]), record("b", [3])]
    with_empty = summarise([*records, record("c", [])], G).domains["math"]

    assert with_empty.prompts == 3
    assert with_empty.accepted_length == summarise(records, G).domains["math"].accepted_length


def test_json_is_strict():
    # No round of "chat" accepts anything, so nothing is known about its later positions.
    acceptance = summarise([record("a", [0], "chat"), record("b", [])], G)
    text = json.dumps(
        {name: domain.as_json() for name, domain in acceptance.domains.items()}, allow_nan=False
    )

    assert json.loads(text)["chat"]["conditional"] == [0.0, None, None]
    assert json.loads(text)["math"]["accepted_length"]["value"] is None


def test_nothing_to_summarise_is_refused():
    with pytest.raises(InputError, match="no prompts"):
        summarise([], G)


def finished(rounds: list[list[int]], accepted: list[int], *, max_new_tokens: int = 100) -> Request:
    """A request that emitted 5, then the committed tokens of `rounds`; 9 is the stop token."""
    request = Request(id="r", prompt_tokens=[1], max_new_tokens=max_new_tokens, stop_ids=frozenset({9}))
    request.move_to(Status.PREFILLING)
    request.move_to(Status.DECODING)
    request.emit([5])
    for tokens, count in zip(rounds, accepted, strict=True):
        request.accepted_per_round.append(count)
        request.verified_per_round.append(G)
        request.emit(tokens)
    assert request.status is Status.FINISHED
    return request


def test_nothing_counts_behind_an_accepted_stop_token():
    rounds = rounds_of(finished([[1, 2], [9, 3, 4, 4]], [1, 3]), "math")

    np.testing.assert_array_equal(rounds.committed_np, [2, 1])
    np.testing.assert_array_equal(rounds.accepted_np, [1, 1])
    np.testing.assert_array_equal(rounds.verified_np, [3, 1])
    assert rounds.new_tokens == 4


def test_a_stop_token_of_the_target_ends_a_whole_round():
    rounds = rounds_of(finished([[1, 2], [3, 9]], [1, 1]), "math")

    np.testing.assert_array_equal(rounds.committed_np, [2, 2])
    np.testing.assert_array_equal(rounds.verified_np, [3, 3])


def test_the_token_limit_shortens_no_round():
    rounds = rounds_of(finished([[1, 2, 3, 4]], [3], max_new_tokens=3), "math")

    np.testing.assert_array_equal(rounds.committed_np, [4])
    assert rounds.new_tokens == 3


def test_an_answer_of_one_token_has_no_rounds():
    request = Request(id="r", prompt_tokens=[1], max_new_tokens=5, stop_ids=frozenset({9}))
    request.move_to(Status.PREFILLING)
    request.move_to(Status.DECODING)
    request.emit([9])

    assert len(rounds_of(request, "math").committed_np) == 0
