"""`dspark compare`: train drafters on one budget, evaluate them alike, and set them side by side."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

from dspark_jax.commands.evaluate import Evaluate
from dspark_jax.commands.evaluate import run as evaluate
from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write
from dspark_jax.evaluation.comparison import comparison_table, paired_difference, training_budget
from dspark_jax.evaluation.held_out import HeldOutRun
from dspark_jax.evaluation.provenance import plain_settings, provenance
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.loop import train


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(HeldOutRun):
    """Train and evaluate every row on the same budget; repeating the command continues where it stopped.

    The target and the drafters come from the recipes; --target and --drafter are not used.
    """

    rows: tuple[str, ...] = ("methods",)
    """Rows of the recipe file, or its groups: methods, depth, block-length. The first is compared with."""
    recipe: Path = Path("configs/comparison.py")
    """File with ROWS, GROUPS and get_config(target, row)."""
    recipe_target: str = "smollm2_135m"
    """Target by its name in the recipes."""
    output: Path = Path("runs/compare/comparison.json")
    """Result file (JSON); results of the rows are written beside it."""
    runs: Path = Path("runs/compare")
    """Directory of the training runs, one for each row."""
    responses: tuple[Path, ...] = ()
    """The target's responses to train on; by default those of the recipe."""
    feature_store: Path | None = None
    """Store of `dspark cache-features` with all taps of the recipes."""
    steps: int | None = None
    """Optimiser steps of every row; None: those of the recipe."""
    temperatures: tuple[float, ...] = (1.0, 0.0)
    """Sampling temperatures of the evaluation."""
    repeats: int = 1
    """Answers to every prompt at temperatures above 0."""


def run(config: Compare) -> None:
    """Trains, evaluates, prints the table so far after every row, and writes the comparison."""
    recipes = runpy.run_path(str(config.recipe))
    names = _names(config, recipes)
    training = {
        name: _training(config, recipes["get_config"](config.recipe_target, name), name) for name in names
    }
    rows: list[dict[str, Any]] = []
    for name in names:
        print(f"\n{name}", flush=True)
        drafter = train(training[name])
        if drafter is None:
            return  # SIGTERM; the run is saved, and the same command goes on from it
        result = evaluate(_evaluation(config, training[name], name, drafter))
        rows.append(_row(name, training[name], result, rows))
        print(comparison_table(rows), flush=True)
        report = {
            "kind": "comparison",
            "name": config.output.stem,
            **provenance(),
            "config": plain_settings(config),
            "rows": rows,
        }
        with atomic_write(config.output, "w") as file:
            json.dump(report, file, indent=2, allow_nan=False)


def _names(config: Compare, recipes: dict[str, Any]) -> list[str]:
    names = [name for row in config.rows for name in recipes["GROUPS"].get(row, (row,))]
    unknown = [name for name in names if name not in recipes["ROWS"]]
    if unknown or not names:
        raise InputError(
            given=f"rows {unknown or config.rows}",
            expected=f"some of {[*recipes['GROUPS'], *recipes['ROWS']]}",
            fix="correct the names, or add the row to the recipe file",
        )
    return list(dict.fromkeys(names))


def _training(config: Compare, recipe: TrainConfig, name: str) -> TrainConfig:
    return dataclasses.replace(
        recipe,
        run_name=name,
        runs=config.runs,
        responses=config.responses or recipe.responses,
        feature_store=config.feature_store,
        steps=config.steps or recipe.steps,
    )


def _evaluation(config: Compare, training: TrainConfig, name: str, drafter: Path) -> Evaluate:
    same = {field.name: getattr(config, field.name) for field in dataclasses.fields(HeldOutRun)}
    return Evaluate(
        **{**same, "target": training.target, "drafter": str(drafter)},
        name=name,
        output=config.output.with_name(f"{config.output.stem}-{name}.json"),
        temperatures=config.temperatures,
        repeats=config.repeats,
    )


def _row(
    name: str, training: TrainConfig, result: dict[str, Any], before: list[dict[str, Any]]
) -> dict[str, Any]:
    first = before[0]["results"] if before else result["results"]
    return {
        "name": name,
        "block_len": result["block_len"],
        "training": training_budget(training.run_dir),
        "results": [
            {
                **{field: of[field] for field in ("temperature", "tokens_per_s", "groups", "all", "domains")},
                "macro": of["macro"]["accepted_length"],
                "difference": paired_difference(of, baseline).as_json(),
            }
            for of, baseline in zip(result["results"], first, strict=True)
        ],
    }
