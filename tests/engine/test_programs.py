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
from dspark_jax.speculation.schedule import Lagged
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength, FullBlock

pytestmark = pytest.mark.usefixtures("quick_compiles")


@contextlib.contextmanager
def compilations(caplog) -> Iterator[list[str]]:
    """Names of the programs that are compiled inside."""
    names: list[str] = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield names
        messages = [record.getMessage() for record in caplog.records]
        names += [message.split()[1] for message in messages if message.startswith("Compiling ")]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("name", "policy"), [("markov", Lagged()), (None, FullBlock())], ids=["lagged", "plain"]
)
def test_after_the_warm_up_nothing_compiles(tiny, caplog, name, policy):
    engine = tiny.engine(name, policy, slots=3, num_pages=12, prefill_tokens=16)
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
        for number in range(300)
    ]
    with compilations(caplog) as later:
        for number, request in enumerate(engine.run(requests[1:])):
            assert request.emitted
            if number == 20:
                late = requests[0]
                engine.submit(late)
                engine.cancel(late)

    assert later == []
    assert engine.pages.num_held == 0
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
    assert EngineConfig(max_context=300, prefill_tokens=128).prefill_buckets == (64, 128)
    assert config.chunks(0, 70) == [(0, 70, 128)]
    assert EngineConfig(prefill_tokens=64, smallest_prefill=64).chunks(10, 90) == [(10, 64, 64), (74, 16, 64)]
    assert [EngineConfig(slots=n).request_buckets for n in (1, 4, 6, 64)] == [
        (1,),
        (1, 4),
        (1, 4, 6),
        (1, 4, 16, 64),
    ]


def test_declared_rows():
    def rows(policy, requests=4, block_len=7):
        return EngineConfig(policy=policy).row_buckets(requests, block_len)

    assert rows(FullBlock()) == (4, 32)
    assert rows(FixedLength(length=2)) == (4, 12)
    assert rows(FixedLength(length=0)) == (4,)
    assert rows(FullBlock(), block_len=0) == (4,)
    assert rows(Lagged()) == rows(ConfidenceThreshold(threshold=0.5)) == (4, 6, 8, 12, 16, 24, 32)
    assert rows(Lagged(), requests=1, block_len=3) == (1, 2, 3, 4)
