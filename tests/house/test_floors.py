"""The floors of docs/architecture.md hold for every import of the package."""

from __future__ import annotations

from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[2]


def test_every_import_goes_down(monkeypatch, capfd):
    monkeypatch.chdir(ROOT)  # import-linter finds the package from the working directory

    status = lint_imports(config_filename="pyproject.toml", no_cache=True)

    assert status == 0, capfd.readouterr().out
