"""The commands as a user meets them: usage, flags, and messages instead of tracebacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dspark_jax.commands import cli
from dspark_jax.core.errors import InputError

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


def refuse(*_):
    raise InputError(given="a door that is shut", expected="an open one", fix="try the window")


class TestDspark:
    def test_without_a_command(self):
        done = run("-m", "dspark_jax")

        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("usage: dspark <command>")
        assert all(name in done.stderr for name in cli.COMMANDS)

    @pytest.mark.parametrize(("argv", "code"), [([], 2), (["no-such"], 2), (["--help"], 0), (["-h"], 0)])
    def test_usage(self, argv, code, capsys):
        with pytest.raises(SystemExit) as exit_:
            cli.main(argv)

        assert exit_.value.code == code
        assert "regenerate" in capsys.readouterr().err

    @pytest.mark.parametrize("name", cli.COMMANDS)
    def test_every_command_documents_its_flags(self, name, capsys):
        with pytest.raises(SystemExit) as exit_:
            cli.main([name, "--help"])

        assert exit_.value.code == 0
        assert f"usage: dspark {name}" in capsys.readouterr().out

    def test_an_unknown_flag(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["regenerate", "--prompts", "a", "--output", "b", "--temprature", "1"])

        assert exit_.value.code == 2
        assert "temprature" in capsys.readouterr().err


class TestRunOrExplain:
    def test_bad_input_becomes_a_message(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            cli.run_or_explain(refuse)

        assert exit_.value.code == 2
        message = capsys.readouterr().err
        for part in ("a door that is shut", "an open one", "try the window"):
            assert part in message

    def test_other_errors_keep_their_traceback(self):
        with pytest.raises(ZeroDivisionError):
            cli.run_or_explain(lambda: 1 / 0)


class TestServe:
    def test_help(self):
        done = run("serve.py", "--help")

        assert done.returncode == 0, done.stderr
        for flag in ("--input", "--output", "--drafter", "--temperature", "--confidence-threshold"):
            assert flag in done.stdout

    @pytest.mark.parametrize(
        "flags",
        [
            ["--input", "no/such/file.jsonl"],
            ["--input", "README.md", "--max-new-tokens", "0"],
        ],
        ids=" ".join,
    )
    def test_bad_input_becomes_a_message(self, tmp_path, flags):
        done = run("serve.py", "--output", str(tmp_path / "out.jsonl"), *flags)

        assert done.returncode == 2
        assert "given:" in done.stderr and "expected:" in done.stderr
        assert "Traceback" not in done.stderr
