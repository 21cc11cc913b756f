"""docs/tutorial.md runs as it stands."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path

import jax
import pytest

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.drafter_formats import register_head
from dspark_jax.commands import cli
from dspark_jax.core.errors import InputError
from dspark_jax.drafters.config import Markov
from dspark_jax.drafters.heads import MarkovHead
from dspark_jax.training import loop

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
LONGEST_HEAD = 40


@pytest.mark.usefixtures("quick_compiles")
def test_the_tutorial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # As on a machine of its own, not on the eight devices of the tests.
    one_device = functools.partial(loop.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(loop, "make_mesh", one_device)
    (tmp_path / "results").mkdir()
    for language, code in re.findall(
        r"^```(\w+)\n(.*?)^```$", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE
    ):
        if code.startswith("# rows.py"):
            definition = code.split("class TwoBack(")[1].split("HEADS =")[0]
            assert len(definition.splitlines()) < LONGEST_HEAD
            Path("rows.py").write_text(code)
        elif language == "python":
            exec(compile(code, TUTORIAL.name, "exec"), {})
        else:
            for line in code.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "dspark"
                cli.main(arguments)

    rows = {row["name"]: row for row in json.loads(Path("results/heads.json").read_text())["rows"]}
    assert list(rows) == ["markov", "two-back"]
    assert {row["training"]["steps"] for row in rows.values()} == {60}
    [mine] = rows["two-back"]["results"]
    assert 1 < mine["macro"]["value"] <= 5 and mine["difference"]["low"] is not None
    # What was evaluated came back from a checkpoint that names the new head and holds its parameter.
    head = load_drafter(tmp_path / "runs" / "compare" / "two-back" / "drafter")
    assert head.params["head"]["mix_kernel"].shape == (16, 16)
    assert "two-back" in Path("heads.html").read_text()
    assert "two-back" in capsys.readouterr().out


def test_the_names_of_other_heads_are_taken():
    with pytest.raises(InputError, match="gated"):
        register_head("gated", Markov, MarkovHead)
