"""Every compiled program is declared; after the warm-up nothing compiles."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.speculation.sampling import Draw
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength, FullBlock


@contextlib.contextmanager
def compilations(caplog) -> Iterator[list[str]]:
    """Names of the programs that are compiled inside."""
    names: list[str] = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield names
        messages = [record.getMessage() for record in caplog.records]
        names += [message.split()[1] for message in messages if message.startswith("Compiling ")]


@pytest.mark.parametrize("name", ["markov", None])
def test_after_the_warm_up_nothing_compiles(tiny, caplog, name):
    engine = tiny.engine(name, slots=3)
    with compilations(caplog) as warm_up:
        engine.warm_up()
    assert any("round" in program for program in warm_up), "the log says what compiles"
    compile_s = engine.compile_s

    rng = np.random.default_rng(0)
    requests = [
        Request(
            id=str(number),
            prompt_tokens=rng.integers(0, tiny.vocab_size, rng.integers(1, 40)).tolist(),
            max_new_tokens=int(rng.integers(4, 24)),
            min_new_tokens=int(rng.choice([0, 3])),
            logprobs=rng.choice([None, 2]),
            stop_ids=frozenset(rng.integers(0, tiny.vocab_size, 1).tolist()),
            sampling=SamplingOptions(
                temperature=float(rng.choice([0, 0.7, 1])),
                top_k=int(rng.choice([0, 3])),
                top_p=float(rng.choice([0.8, 1])),
                seed=int(rng.integers(2**32)),
            ),
        )
        for number in range(60)
    ]
    with compilations(caplog) as later:
        for number, request in enumerate(engine.run(requests[:50])):
            assert request.emitted
            if number == 20:
                late = requests[50]
                engine.submit(late)
                engine.cancel(late)

    assert later == []
    assert engine.compile_s == compile_s > 0


def test_what_was_not_warmed_compiles_when_it_is_needed(tiny):
    engine = tiny.engine("markov")
    engine.warm_up((), draws=[Draw.GREEDY])
    warm_s = engine.compile_s

    assert tiny.answers(engine, tiny.requests()) == tiny.plain
    assert engine.compile_s > warm_s


def test_warming_up_again_costs_nothing(tiny):
    engine = tiny.engine(None)
    engine.warm_up((16,), draws=[Draw.GREEDY])
    compile_s = engine.compile_s
    engine.warm_up((16,), draws=[Draw.GREEDY])

    assert engine.compile_s == compile_s


def test_declared_shapes():
    config = EngineConfig(max_context=300, smallest_prefill=64)
    assert config.prefill_buckets == (64, 128, 256, 512)
    assert config.verify_buckets(7) == (7,)
    assert EngineConfig(policy=FullBlock()).verify_buckets(5) == (5,)
    assert EngineConfig(policy=FixedLength(length=2)).verify_buckets(5) == (2,)
    for block_len, expected in ((1, (0, 1)), (4, (0, 1, 2, 4)), (7, (0, 1, 2, 4, 7))):
        assert EngineConfig(policy=ConfidenceThreshold(threshold=0.5)).verify_buckets(block_len) == expected
