"""The `dspark` command: a table of sub-commands, each a dataclass of flags and a `run` beside it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

import tyro

from dspark_jax.core.errors import InputError
from dspark_jax.core.user_cache import keep_compiled_programs

EXIT_REFUSED = 2
# name -> (module, class of its flags, one line of help)
COMMANDS = {
    "regenerate": (
        "regenerate",
        "Regenerate",
        "let the target answer prompts: the data that drafters learn from",
    ),
    "cache-features": (
        "cache_features",
        "CacheFeatures",
        "store the target's features for several epochs of training",
    ),
    "evaluate": (
        "evaluate",
        "Evaluate",
        "measure accepted length and acceptance per position on held-out prompts",
    ),
    "diagnose": (
        "diagnose",
        "Diagnose",
        "thresholds, calibration under shift and context length, from an evaluation",
    ),
    "report": ("report", "Report", "one HTML file with tables and figures of any results, runs side by side"),
    "compare": ("compare", "Compare", "train drafters on one budget, evaluate them alike, compare them"),
    "calibrate": ("calibrate", "Calibrate", "make predicted survival come true, and see how far it is off"),
    "profile": ("profile", "Profile", "measure what a round costs on this machine: the scheduler's prices"),
    "convert": ("convert", "Convert", "write a drafter in the format of another project, or in ours"),
    "verify-golden": (
        "verify_golden",
        "VerifyGolden",
        "compare recorded values of another implementation with ours",
    ),
    "plan": ("plan", "Plan", "compile a training run for a TPU pod without one: does it fit, what bounds it"),
    "plan-serving": (
        "plan_serving",
        "PlanServing",
        "compile the engine's programs for a TPU slice without one: do they fit",
    ),
    "plot-training": ("plot_training", "PlotTraining", "draw the course of training runs as a PNG"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one sub-command; `dspark <command> --help` documents its flags."""
    argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if not argv or argv[0] not in COMMANDS:
        print("usage: dspark <command> [flags]\n", file=sys.stderr)
        for name, (_, _, summary) in COMMANDS.items():
            print(f"  {name:16s}{summary}", file=sys.stderr)
        sys.exit(0 if argv in (["--help"], ["-h"]) else 2)
    module_name, flags, _ = COMMANDS[argv[0]]
    module = importlib.import_module(f"dspark_jax.commands.{module_name}")
    config = tyro.cli(getattr(module, flags), args=argv[1:], prog=f"dspark {argv[0]}")
    run_or_explain(module.run, config)


def run_or_explain(function, *args) -> None:
    """Calls a front door; bad input becomes a message and exit code 2, not a traceback."""
    keep_compiled_programs()
    try:
        function(*args)
    except InputError as error:
        explain(error)
        sys.exit(EXIT_REFUSED)


def explain(error: InputError) -> None:
    """Prints what is wrong, for a person."""
    print(f"error\n  given:     {error.given}", file=sys.stderr)
    print(f"  expected:  {error.expected}\n  to fix it: {error.fix}", file=sys.stderr)
