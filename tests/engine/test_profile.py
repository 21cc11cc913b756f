"""Measured tables cover every declared shape, are stored, and are never taken for another engine's."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.engine import profile
from dspark_jax.engine.planning import Planner
from dspark_jax.evaluation.cost_plot import cost_table, plot_costs
from dspark_jax.speculation.schedule import Lagged

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def programs(tiny):
    return tiny.engine("markov", Lagged(), slots=2).programs


@pytest.fixture(scope="module")
def table(programs):
    return profile.measure_costs(programs)


def test_every_declared_shape_has_a_time(table, programs):
    assert table.request_buckets == (1, 2)
    assert table.context_buckets == (64,)
    declared = [table.verify_curve(requests, 64)[0].tolist() for requests in (1, 2)]
    assert declared == [[1, 2, 3, 4], [2, 3, 4, 6, 8]]
    for requests in (1, 2):
        assert (np.diff(table.verify_curve(requests, 64)[1]) >= 0).all()
    assert table.fingerprint == profile.fingerprint(programs)


def test_contexts_between_the_measured_ones_are_interpolated(programs, monkeypatch):
    monkeypatch.setattr(profile, "context_buckets", lambda max_context: (16, 32, 64))
    monkeypatch.setattr(profile.Bench, "once_ms", lambda self, shape: float(shape.context))
    table = profile.measure_costs(programs)
    np.testing.assert_allclose(table.draft_ms_np, [[16, 32, 64]] * 2)
    assert profile.context_buckets(1) == (16, 32, 64)


def test_doubtful_times_are_measured_again(programs, monkeypatch):
    calls = {}

    def once_ms(self, shape):
        calls[shape] = calls.get(shape, 0) + 1
        # One program looks slow at first, as if something had disturbed it.
        disturbed = shape.rows == 2 and shape.requests == 1 and calls[shape] <= 1 + profile.REPEATS
        return 50.0 if disturbed else 1.0 + (shape.rows or 0)

    monkeypatch.setattr(profile.Bench, "once_ms", once_ms)
    table = profile.measure_costs(programs)
    assert table.verify_ms(1, 2, 64) == 3.0


def test_a_table_comes_back_and_another_engines_is_refused(table, tmp_path):
    path = tmp_path / "costs.json"
    profile.save_costs(table, path)
    again = profile.load_costs(path, table.fingerprint)
    np.testing.assert_array_equal(again.verify_ms_np, table.verify_ms_np)
    assert dataclasses.replace(again, verify_ms_np=table.verify_ms_np).request_buckets == (1, 2)
    with pytest.raises(InputError, match="measure again"):
        profile.load_costs(path, "other")
    path.write_text(json.dumps({"version": 1}))
    with pytest.raises(InputError, match="a cost table"):
        profile.load_costs(path, table.fingerprint)


def test_a_stored_table_is_found_again(programs, table, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "default_directory", lambda: tmp_path)
    asked = []

    def measure():
        asked.append(1)
        return table

    first = profile.costs_of(programs, None, measure)
    second = profile.costs_of(programs, None, measure)
    assert asked == [1]
    np.testing.assert_array_equal(first.draft_ms_np, second.draft_ms_np)


def test_a_table_can_be_read_and_seen(table, tmp_path):
    assert "2 verify    8" in cost_table(table)
    plot_costs(table, tmp_path / "costs.png")
    assert (tmp_path / "costs.png").stat().st_size > 1000


def test_lagged_drafts_only_where_it_pays(tiny):
    """Free verification: everything is verified; verification that costs its tokens: nothing, but probes."""
    config = tiny.engine("markov", Lagged(probe_every=4), slots=2).config
    table = tiny.table(Lagged(), 2, 64)

    def plans(verify_ms_np):
        priced = dataclasses.replace(table, verify_ms_np=verify_ms_np)
        planner = Planner(config, 3, lambda: priced)
        drafted = []
        for _ in range(12):
            plan = planner.plan([0, 1], np.ones(2, bool), 10, [None, None])
            planner.note([0, 1], plan.drafted_np, np.full((2, 3), 0.1))
            drafted.append((bool(plan.drafted_np.any()), plan.budget))
        return drafted

    declared = np.isfinite(table.verify_ms_np)
    free = plans(np.where(declared, 10.0, np.inf))
    assert all(drafts and budget == 6 for drafts, budget in free)
    rows_np = np.asarray(table.row_buckets, float)[None, :, None]
    dear = plans(np.where(declared, 10.0 * rows_np**2, np.inf))
    drafting = [drafts for drafts, _ in dear]
    assert not all(drafting) and any(drafting[4:])
