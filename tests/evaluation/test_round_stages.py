"""The stages of a round, run one by one, are the round; every one of them is timed."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.state import Weights
from dspark_jax.evaluation.round_stages import RoundStages, take_round_apart
from dspark_jax.testing.tiny import tiny_drafter, tiny_target

PROMPT = [3, 1, 4, 1, 5]
CONFIG = EngineConfig(max_context=48, smallest_prefill=8, page_len=16)


@pytest.fixture(scope="module")
def models():
    target = tiny_target(num_hidden_layers=1)
    draft = tiny_drafter(target, num_layers=1, taps=(0,), block_len=2)
    return target, draft, Weights(target=target.params, drafter=draft.params, shared=draft.shared)


@pytest.fixture(scope="module")
def stages(models):
    target, draft, weights = models
    return RoundStages(target.config, draft.drafter, weights, CONFIG)


def test_staged_rounds_are_fused_rounds(stages):
    staged, fused = stages.start(PROMPT), stages.start(PROMPT)
    for _ in range(3):
        staged = stages.staged_round(staged)
        fused = stages.fused_round(fused)

    assert int(staged.positions_B[0]) >= len(PROMPT) + 3
    np.testing.assert_array_equal(staged.anchors_B, fused.anchors_B)
    np.testing.assert_array_equal(staged.positions_B, fused.positions_B)
    for a, b in zip(jax.tree.leaves(staged.cache), jax.tree.leaves(fused.cache), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for a, b in zip(jax.tree.leaves(staged.context), jax.tree.leaves(fused.context), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_whole_round_is_accounted_for(models, stages):
    target, draft, weights = models
    engine = Engine(target=target.config, drafter=draft.drafter, weights=weights, config=CONFIG)

    times_ms = take_round_apart(stages, engine, [PROMPT, PROMPT[::-1]], num_rounds=7, max_new_tokens=20)

    parts = ("draft backbone", "head and sampling", "target verification", "accept", "commit")
    assert sum(times_ms[part] for part in parts) == pytest.approx(times_ms["sum of stages"])
    assert times_ms["sum of stages"] + times_ms["remainder"] == pytest.approx(times_ms["fused round"])
    assert times_ms["fused round"] + times_ms["host"] == pytest.approx(times_ms["engine step"])
    assert {len(times) for times in stages.times_ms.values()} == {7}
    assert not engine.has_work
