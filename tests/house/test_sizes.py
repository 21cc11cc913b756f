"""Files stay small, names say something, and nothing of one machine gets into the repository."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Named one by one: a checkout may also hold virtual environments, runs and caches.
FOLDERS = (".ci", "assets", "benchmarks", "configs", "docs", "dspark_jax", "examples", "tests")
TOP_LEVEL = {"", ".md", ".py", ".toml", ".yaml"}  # not .jsonl: serve.py is often told to write there
TEXT = TOP_LEVEL | {".cfg", ".css", ".html", ".js", ".json", ".jsonl", ".sh", ".txt", ".yml"}
KILOBYTE = 1024


def repository_files() -> Iterator[Path]:
    """Every file of the checkout that belongs to the project, committed or not."""
    # In a worktree .git is a file, and holds a path.
    yield from (
        path for path in ROOT.iterdir() if path.suffix in TOP_LEVEL and path.is_file() and path.name != ".git"
    )
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if "__pycache__" not in path.parts and path.is_file():
                yield path


def python_files(*, folder: str = "") -> list[Path]:
    root = ROOT / folder
    return sorted(path for path in repository_files() if path.suffix == ".py" and root in path.parents)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_of_the_package_are_small():
    # Package markers are left out: they are nearly empty and would hide large files from the median.
    modules = [path for path in python_files(folder="dspark_jax") if path.name != "__init__.py"]
    sizes = {path: path.stat().st_size for path in modules}
    large = sorted(relative(path) for path, size in sizes.items() if size >= 16 * KILOBYTE)
    too_large = sorted(relative(path) for path, size in sizes.items() if size > 30 * KILOBYTE)

    assert not too_large, f"over 30 KB: {too_large}"
    assert len(large) <= len(sizes) / 10, f"one in ten may reach 16 KB, these do: {large}"
    assert statistics.median(sizes.values()) < 6 * KILOBYTE


def test_no_module_is_named_after_nothing():
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}

    assert not [relative(path) for path in python_files() if {path.stem, path.parent.name} & vague]


@pytest.mark.parametrize("name", ["train.py", "serve.py"])
def test_front_doors_are_short(name):
    assert len((ROOT / name).read_text().splitlines()) < 60


def imported_packages(path: Path) -> set[str]:
    """Top-level names that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_torch_is_imported_only_for_comparison():
    allowed = (ROOT / "tests" / "parity", ROOT / "benchmarks")
    others = [path for path in python_files() if not set(allowed) & set(path.parents)]

    assert not [relative(path) for path in others if "torch" in imported_packages(path)]


def test_no_path_of_one_machine():
    absolute = re.compile(r"(?<![\w.:~/$}*-])/(?:work|opt|tmp|home|root|mnt|Users)/[\w.-]")
    found = []
    for path in repository_files():
        if path.suffix in TEXT:
            lines = path.read_text("utf-8", errors="replace").splitlines()
            for number, line in enumerate(lines, start=1):
                if absolute.search(line):
                    found.append(f"{relative(path)}:{number}: {line.strip()[:120]}")

    assert not found, "\n".join(found)
