"""The table of docs/plan.md: `python benchmarks/plan_tables.py --results DIR`.

Compiles the paper's training step for whole TPU pods, one case after the other, each in a process of its own
(minutes and a few GB each; nothing is run). What --results holds already is not compiled again, so it can be
stopped and repeated; delete the directory when the step has changed.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write

GIB = 2**30
BEGIN, END = "<!-- table: benchmarks/plan_tables.py -->", "<!-- end of table -->"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table: the paper's DSpark run for a target on a topology."""

    target: str
    topology: str
    flags: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """`dspark plan` with its flags."""
        names = ["--recipe", "configs/dspark.py", "--target", self.target, "--topology", self.topology]
        return ["plan", *names, *self.flags]

    @property
    def name(self) -> str:
        """A file name that tells cases apart."""
        return "-".join([self.target, self.topology.replace(":", "-"), *self.flags]).replace("--", "")


def flags(*, fsdp: int = 1, expert: int = 1, microbatches: int) -> tuple[str, ...]:
    """The mesh and how the batch of 512 is divided."""
    experts = f"--mesh.expert {expert} " if expert > 1 else ""
    return tuple(f"--mesh.fsdp {fsdp} {experts}--microbatches {microbatches}".split())


CASES = (
    Case(target="qwen3_4b", topology="v5e:4x4", flags=flags(fsdp=16, microbatches=32)),
    Case(target="qwen3_4b", topology="v5p:2x2x2", flags=flags(fsdp=8, microbatches=32)),
    Case(target="qwen3_14b", topology="v5p:4x4x4", flags=flags(fsdp=64, microbatches=4)),
    Case(target="gemma4_12b", topology="v6e:4x4", flags=flags(fsdp=16, microbatches=32)),
    Case(target="qwen3_30b_a3b", topology="v5p:2x2x2", flags=flags(expert=8, microbatches=64)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanTables:
    """Compile the cases and write the table into a document."""

    results: Path
    """Directory of one JSON file per compiled case."""
    output: Path = Path("docs/plan.md")
    """Document; the part between the two marks is replaced."""
    cases: tuple[int, ...] = tuple(range(len(CASES)))
    """Which of the cases to compile if they are missing, from 0; the table has all that are there."""


def main(config: PlanTables) -> None:
    """Compiles what is missing, and writes what is there."""
    text = config.output.read_text("utf-8")
    if BEGIN not in text or END not in text:
        raise InputError(
            given=f"{config.output} without a place for the table",
            expected=f"{BEGIN} and {END}",
            fix="write the two marks where the table belongs",
        )
    config.results.mkdir(parents=True, exist_ok=True)
    for number in tqdm(config.cases, unit="case"):
        case = CASES[number]
        path = config.results / f"{case.name}.json"
        if not path.exists():
            subprocess.run(
                [sys.executable, "-m", "dspark_jax", *case.command, "--json", str(path)], check=True
            )
        found = {case: config.results / f"{case.name}.json" for case in CASES}
        rows = {case: json.loads(path.read_text()) for case, path in found.items() if path.exists()}
        begin, end = text.index(BEGIN), text.index(END)
        with atomic_write(config.output, "w") as file:
            file.write(f"{text[:begin]}{BEGIN}\n\n{table(rows)}\n\n{text[end:]}")


def table(rows: dict[Case, dict[str, Any]]) -> str:
    """The cases as Markdown, and their commands."""
    heads = ("target", "topology", "mesh; microbatches", "per device", "frozen, trained, temporary", "PFLOP")
    heads += ("bound by", "tokens/s at 40 %")
    lines = [
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(_row(case, plan) for case, plan in rows.items()),
    ]
    commands = ["```", *("dspark " + " ".join(case.command) for case in rows), "```"]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))
    return "\n".join([*lines, "", *commands, "", f"Compiled with {versions} on {datetime.date.today()}."])


def _row(case: Case, plan: dict[str, Any]) -> str:
    mesh = {name: size for name, size in plan["config"]["mesh"].items() if size > 1}
    sizes = [plan["target_bytes"], plan["parameter_bytes"] + plan["optimizer_bytes"], plan["temporary_bytes"]]
    times = plan["roofline_s"]
    bound = max(times, key=times.__getitem__)
    cells = [
        case.target,
        f"{case.topology}, {plan['devices']} devices",
        f"{', '.join(f'{name} {size}' for name, size in mesh.items())}; {plan['microbatches']}",
        _gib(plan["total_bytes"]) if plan["fits"] else f"does not fit: {plan['refusal']}",
        ", ".join(map(_gib, sizes)),
        f"{plan['flops'] / 1e15:.1f}",
        f"{bound}, {times[bound]:.1f} s" if plan["fits"] else "",
        f"{0.4 * plan['tokens'] / times[bound]:,.0f}" if plan["fits"] else "",
    ]
    return f"| {' | '.join(cells)} |"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIB:.2f} GiB"


if __name__ == "__main__":
    main(tyro.cli(PlanTables))
