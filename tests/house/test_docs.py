"""What the documents name exists: files, and dotted names inside the package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path):
    text = document.read_text()
    named = re.findall(r"`((?:tests|benchmarks|configs|examples|assets)/[\w./-]+)`", text)
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in linked if not (document.parent / link).exists()]
    assert not missing


def test_named_code_exists():
    table = (ROOT / "docs" / "paper_to_code.md").read_text()
    section = table.split("## Not here yet")[0]
    names = [name for name in re.findall(r"`((?:[a-z_]+\.)+[A-Za-z_]+)`", section)]
    assert len(names) > 15
    for name in names:
        parts = name.split(".")
        module = next(
            importlib.import_module("dspark_jax." + ".".join(parts[:n]))
            for n in range(len(parts), 0, -1)
            if (ROOT / "dspark_jax" / Path(*parts[:n])).with_suffix(".py").exists()
            or (ROOT / "dspark_jax" / Path(*parts[:n])).is_dir()
        )
        value = module
        for part in parts[module.__name__.count(".") :]:
            value = getattr(value, part)
