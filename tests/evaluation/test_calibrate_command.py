"""`dspark calibrate` end to end on tiny models, and the files that it writes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax.checkpoints.calibration import Calibration, CalibrationIdentity, load_calibration
from dspark_jax.commands import calibrate
from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.accepted_length import PromptRounds
from dspark_jax.evaluation.calibration_report import full_block_rounds

G = 2
IDENTITY = CalibrationIdentity(target="t", drafter="d", template="c", sampling="s", numerics="n")
CALIBRATION = Calibration(
    identity=IDENTITY, temperatures=(1.5, 0.5), shifts=(0.1, -1.0), evidence={"rounds": 3}
)


@pytest.mark.usefixtures("tiny_engine")
def test_the_command_fits_reports_draws_and_writes(prompt_files, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    config = calibrate.Calibrate(
        prompts=prompt_files,
        output=tmp_path / "out" / "calibration.json",
        plot=tmp_path / "reliability.png",
        num_prompts_per_domain=3,
        max_new_tokens=12,
        max_prompt_tokens=64,
        slots=2,
    )
    calibrate.run(config)

    content = json.loads(config.output.read_text())
    found = load_calibration(config.output, CalibrationIdentity(**content["identity"]), block_len=G)
    assert found.identity.target == "tiny" and found.identity.sampling == "temperature 1"
    shown = capsys.readouterr().out
    for T, shift, position in zip(found.temperatures, found.shifts, (1, 2), strict=True):
        assert f"{position:8d}  {T:5.2f}  {shift:5.2f}" in shown
    rounds = found.evidence["rounds"]
    assert rounds["fitted"] > 0 and rounds["checked"] > 0
    assert config.plot.read_bytes().startswith(b"\x89PNG")


def test_one_prompt_cannot_fit_and_check(prompt_files, tmp_path):
    with pytest.raises(InputError, match="half of the prompts"):
        calibrate.Calibrate(prompts=prompt_files, output=tmp_path / "c.json", num_prompts_per_domain=1)


def test_rounds_that_were_cut_do_not_count():
    record = PromptRounds(
        id="a",
        domain="d",
        new_tokens=6,
        committed_np=np.array([3, 1, 2]),
        accepted_np=np.array([2, 0, 1]),
        verified_np=np.array([2, 2, 1]),
        confidence_np=np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32),
    )
    rounds = full_block_rounds([record])
    assert rounds.logits_np.tolist() == [[1, 2], [3, 4]]
    assert rounds.survived_np.tolist() == [[True, True], [False, False]]
    with pytest.raises(InputError, match="whole block"):
        full_block_rounds([])


def test_a_file_comes_back(tmp_path):
    CALIBRATION.save(tmp_path / "c.json")
    assert load_calibration(tmp_path / "c.json", IDENTITY, block_len=G) == CALIBRATION


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CalibrationIdentity)])
def test_a_file_of_something_else_is_refused_by_name(tmp_path, field):
    CALIBRATION.save(tmp_path / "c.json")
    with pytest.raises(InputError, match=f"{field} .* instead of 'other'"):
        load_calibration(tmp_path / "c.json", dataclasses.replace(IDENTITY, **{field: "other"}), block_len=G)


@pytest.mark.parametrize(
    "change",
    [{"temperatures": [1.0]}, {"temperatures": [1.0, 0.0]}, {"shifts": [0.0, float("inf")]}, {"version": 99}],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, change):
    CALIBRATION.save(tmp_path / "c.json")
    content = json.loads((tmp_path / "c.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps(content | change))
    with pytest.raises(InputError, match="calibrate again"):
        load_calibration(tmp_path / "c.json", IDENTITY, block_len=G)


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(InputError, match="a calibration file"):
        load_calibration(tmp_path / "c.json", IDENTITY, block_len=G)
