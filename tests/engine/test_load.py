"""What the engine is given besides weights: a policy that suits the drafter, and its calibration."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from dspark_jax.checkpoints.calibration import Calibration, CalibrationIdentity
from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.engine import load
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.load import LoadedEngine
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.speculation.schedule import Lagged
from dspark_jax.speculation.verify_length import FixedLength, FullBlock
from dspark_jax.testing.directory import save_tiny_target
from dspark_jax.testing.loaded import as_loaded_drafter, as_loaded_target
from dspark_jax.testing.tiny import tiny_target

GREEDY = SamplingOptions(temperature=0.0)
TEMPERATURES, SHIFTS = (1.5, 0.5, 2.0), (0.0, -1.0, 0.5)


@pytest.fixture
def loaded(tiny, tmp_path) -> LoadedEngine:
    target = as_loaded_target(tiny.target)
    return LoadedEngine(
        engine=tiny.engine("markov", Lagged()),
        target=target,
        chat=ChatTemplate(tokenizer=target.tokenizer),
        drafter_path=tmp_path,
        drafter_identity="this drafter",
    )


def calibration(loaded: LoadedEngine, **changes) -> Calibration:
    same = {
        "target": loaded.target.identity,
        "drafter": "this drafter",
        "template": loaded.chat.name,
        "sampling": "greedy",
        "numerics": "float32 on cpu",
    }
    return Calibration(
        identity=CalibrationIdentity(**(same | changes)), temperatures=TEMPERATURES, shifts=SHIFTS
    )


def scaling(loaded: LoadedEngine) -> list[list[float]]:
    return loaded.engine._planner.scaling([], 1)[0].tolist()


class TestCalibration:
    def test_what_lies_beside_the_drafter_and_fits_is_taken(self, loaded, tmp_path, caplog):
        calibration(loaded, sampling="temperature 1").save(tmp_path / "calibration-1.json")
        calibration(loaded).save(tmp_path / "calibration-greedy.json")
        loaded.calibrate(GREEDY)

        assert scaling(loaded) == [list(TEMPERATURES), list(SHIFTS)] and not caplog.records

    def test_none_is_said_loudly(self, loaded, tmp_path, caplog):
        calibration(loaded, drafter="another").save(tmp_path / "calibration.json")
        loaded.calibrate(GREEDY)

        assert scaling(loaded) == [[1.0] * 3, [0.0] * 3]
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "NO CALIBRATION for greedy" in record.getMessage()

    def test_a_given_file_must_fit(self, loaded, tmp_path):
        calibration(loaded, drafter="another").save(tmp_path / "given.json")
        with pytest.raises(InputError, match="'another' instead of 'this drafter'"):
            loaded.calibrate(GREEDY, tmp_path / "given.json")

    def test_nobody_listens(self, loaded, tiny, caplog):
        dataclasses.replace(loaded, engine=tiny.engine("markov", FullBlock())).calibrate(GREEDY)
        assert not caplog.records


def test_devices_that_do_not_divide_the_heads_are_refused_before_anything_is_read(monkeypatch, tmp_path):
    directory = save_tiny_target(tiny_target(vocab_size=300), tmp_path / "target")
    monkeypatch.setattr(load, "load_target", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(InputError, match="tensor=8 for a target with 4 heads"):
        load.load_engine(target=str(directory), drafter="none", config=EngineConfig(tensor=8))


def test_ways_of_drawing_have_names():
    assert GREEDY.law == SamplingOptions(temperature=0.0, top_k=5, seed=3).law == "greedy"
    assert SamplingOptions(temperature=0.7, top_p=0.9, seed=1, sample=2).law == "temperature 0.7, top_p 0.9"


def test_the_default_scheduler_needs_a_confidence_head(tiny):
    def policy(name, policy):
        draft = None if name is None else as_loaded_drafter(tiny.drafter(name))
        return load._with_a_policy_for(draft, EngineConfig(policy=policy)).policy

    assert policy("markov", Lagged()) == Lagged()
    assert policy("eagle3", Lagged()) == policy(None, Lagged()) == FullBlock()
    assert policy(None, FixedLength(length=0)) == FixedLength(length=0)
