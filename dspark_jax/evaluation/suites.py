"""The nine benchmarks of the paper as prompt sets: how many prompts, in which domain, and where they are.

Only the prompts matter: answers are never graded, they are what acceptance is measured on.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.core.errors import InputError
from dspark_jax.data.rows import Row, load_with_datasets
from dspark_jax.data.sources import Prompt, read_prompts
from dspark_jax.evaluation.prompts import first_turns

_log = logging.getLogger(__name__)

PAPER_TEMPERATURE, PAPER_NEW_TOKENS = 1.0, 2048
"""How the paper decodes all of them, without thinking, the first turn only."""
GROUPS = ("math", "code", "chat")
"""Over which the paper averages."""
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TESTED = "Write a solution to the following problem and make sure that it passes the tests:\n"
PROGRAM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will "
    "generate a correct Python program that matches the specification and passes all tests. You will NOT "
    "return anything except for the program\n\n### Question:\n"
)
FORMAT = "\n\n### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n"
ANSWER = "### Answer: (use the provided format with backticks)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """One benchmark.

    Attributes:
      name: as the command line and results call it.
      group: the domain that the paper counts it to.
      limit: prompts that the paper takes at most.
      files: names that its file may have in a data directory, without ".jsonl".
      hub: arguments of `datasets.load_dataset`.
      prompt: a row of the hub -> what the user says.
    """

    name: str
    group: str
    limit: int
    files: tuple[str, ...]
    hub: Mapping[str, Any]
    prompt: Callable[[dict], str]


def _with_input(row: dict) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]


_SUITES = (
    Suite(
        name="gsm8k",
        group="math",
        limit=500,
        files=("gsm8k",),
        hub={"path": "openai/gsm8k", "name": "main", "split": "test"},
        prompt=lambda row: row["question"] + BOXED,
    ),
    Suite(
        name="math500",
        group="math",
        limit=500,
        files=("math500",),
        hub={"path": "HuggingFaceH4/MATH-500", "split": "test"},
        prompt=lambda row: row["problem"] + BOXED,
    ),
    Suite(
        name="aime25",
        group="math",
        limit=30,
        files=("aime25",),
        hub={"path": "math-ai/aime25", "split": "test"},
        prompt=lambda row: row["problem"] + BOXED,
    ),
    Suite(
        name="humaneval",
        group="code",
        limit=164,
        files=("humaneval",),
        hub={"path": "openai/openai_humaneval", "split": "test"},
        prompt=lambda row: f"{TESTED}```python\n{row['prompt']}\n```",
    ),
    Suite(
        name="mbpp",
        group="code",
        limit=256,
        files=("mbpp",),
        hub={"path": "google-research-datasets/mbpp", "name": "sanitized", "split": "test"},
        prompt=lambda row: row["prompt"],
    ),
    Suite(
        name="livecodebench",
        group="code",
        limit=500,
        files=("livecodebench",),
        hub={"path": "livecodebench/code_generation_lite", "split": "test"},
        prompt=lambda row: PROGRAM + row["question_content"] + FORMAT + ANSWER,
    ),
    Suite(
        name="mt-bench",
        group="chat",
        limit=80,
        files=("mt-bench",),
        hub={"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"},
        prompt=lambda row: row["prompt"][0],
    ),
    Suite(
        name="alpaca",
        group="chat",
        limit=500,
        files=("alpaca",),
        hub={"path": "tatsu-lab/alpaca", "split": "train"},
        prompt=_with_input,
    ),
    Suite(
        name="arena-hard",
        group="chat",
        limit=500,
        files=("arena-hard", "arena-hard-v2"),
        hub={"path": "lmarena-ai/arena-hard-auto", "name": "arena-hard-v2.0", "split": "train"},
        prompt=lambda row: row["prompt"],
    ),
)
SUITES: dict[str, Suite] = {suite.name: suite for suite in _SUITES}
ALL = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuitePrompts:
    """Prompts of the suites that were found.

    Attributes:
      prompts: of all suites; the suite is a prompt's domain.
      missing: suites that are not there, so that averages can say what they lack.
    """

    prompts: list[Prompt]
    missing: tuple[str, ...]


def read_suites(names: Sequence[str], data_dir: Path | None) -> SuitePrompts:
    """Reads suites from files of lines `{"turns": [...]}`, or from the hub without a directory.

    Args:
      names: suites, or "all".
      data_dir: where the files are. With "all", a suite that has no file there is left out and named.

    Raises:
      InputError: unknown names, a suite that was asked for by name and is not there, or none at all.
    """
    unknown = sorted(set(names) - set(SUITES) - {ALL})
    if unknown:
        raise InputError(
            given=f"suites {unknown}",
            expected=f"{ALL!r}, or some of {list(SUITES)}",
            fix="correct the names; files of your own go to --prompts",
        )
    suites = [suite for suite in _SUITES if ALL in names or suite.name in names]
    prompts: list[Prompt] = []
    missing: list[str] = []
    for suite in suites:
        rows = _from_hub(suite) if data_dir is None else _from_files(suite, data_dir)
        if rows is None:
            missing.append(suite.name)
        else:
            prompts += read_prompts(rows)
    if missing and (ALL not in names or not prompts):
        raise InputError(
            given=f"no file for {', '.join(missing)} in {data_dir}",
            expected='NAME.jsonl for each suite, with lines {"turns": [...]}',
            fix="add the files, choose other suites, or leave --data-dir out to read them from the hub",
        )
    if missing:
        _log.warning("no file for %s in %s: averages lack it", ", ".join(missing), data_dir)
    return SuitePrompts(prompts=prompts, missing=tuple(missing))


def suite_limits() -> dict[str, int]:
    """Domain -> prompts that the paper takes of it."""
    return {suite.name: suite.limit for suite in _SUITES}


def _from_files(suite: Suite, data_dir: Path) -> Iterator[Row] | None:
    paths = (data_dir / f"{name}{suffix}" for name in suite.files for suffix in (".jsonl", ".jsonl.gz"))
    found = next((path for path in paths if path.is_file()), None)
    return None if found is None else first_turns(found, suite.name)


def _from_hub(suite: Suite) -> Iterator[Row]:
    options = dict(suite.hub)
    for number, row in enumerate(load_with_datasets(options.pop("path"), **options), start=1):
        try:
            text = suite.prompt(row.fields or {})
        except (LookupError, TypeError) as error:
            yield Row(row.place, None, f"no prompt ({type(error).__name__}: {error})")
        else:
            fields = {"domain": suite.name, "source": suite.hub["path"], "prompt": text}
            yield Row(row.place, {"id": f"{suite.name}-{number}", **fields})
