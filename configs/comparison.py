"""Rows of the drafter comparison and of its sweeps: every method on the same responses, order and budget.

The budget is 200 steps of 8 sequences with 64 blocks each. The parallel drafters start from the same
regression where the target allows one (warm_start.py); Eagle3 and MTP have no such start. All read the same
taps: MTP, whose own choice would be the last layer alone, reads them too.

Reproduces: the comparison of the paper's Table 1 and the sweeps of its Figures, on one small budget.
Command: python train.py configs/comparison.py --target smollm2_135m --row dflash [--feature-store DIR]
    for one row; `dspark compare --rows methods` for all of them, with their evaluation.
Hardware: 2 CPU cores, with a feature store.
Duration: docs/results.md.
Expected figure: docs/results.md.
Last run: docs/results.md.
"""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

from dspark_jax.core.errors import InputError
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.paper import SMALL, paper_target

STEPS, BATCH_SIZE, NUM_ANCHORS = 200, 8, 64
WARM_START_SEQUENCES = 256

# row -> (file of the method, arguments of its get_config, changed fields of its drafter)
METHODS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "dspark-markov": ("dspark", {"head": "markov"}, {}),
    "dflash": ("dflash", {}, {}),
    "dspark-gated": ("dspark", {"head": "gated"}, {}),
    "dspark-rnn": ("dspark", {"head": "rnn"}, {}),
    "eagle3": ("eagle3", {}, {}),
    "mtp-1": ("mtp", {"k": "1"}, {}),
    "mtp-3": ("mtp", {"k": "3"}, {}),
}
DEPTHS = {f"layers-{depth}": ("dspark", {}, {"num_layers": depth}) for depth in (1, 2, 3)}
BLOCKS = {f"block-{length}": ("dspark", {}, {"block_len": length}) for length in (4, 7, 11, 15)}
ROWS = METHODS | DEPTHS | BLOCKS
GROUPS = {"methods": tuple(METHODS), "depth": tuple(DEPTHS), "block-length": tuple(BLOCKS)}
"""What `dspark compare --rows` takes beside single rows; the others are compared with the first."""


def get_config(target: str, row: str = "dspark-markov") -> TrainConfig:
    """The recipe of one row.

    Raises:
      InputError: no target or row has that name.
    """
    if row not in ROWS:
        raise InputError(given=f"--row {row}", expected=f"one of {list(ROWS)}", fix="choose one of them")
    chosen = paper_target(target)
    method, arguments, changes = ROWS[row]
    recipe = runpy.run_path(str(Path(__file__).with_name(f"{method}.py")))["get_config"]
    run: TrainConfig = recipe(target, **arguments)
    if method == "mtp":
        changes = {"taps": chosen.taps}
    elif method in ("dspark", "dflash") and target == SMALL:
        changes = {**changes, "warm_start_sequences": WARM_START_SEQUENCES}
    return dataclasses.replace(
        run,
        run_name=row,
        runs=Path("runs/compare"),
        drafter=dataclasses.replace(run.drafter, **changes),
        data=dataclasses.replace(
            run.data, batch_size=BATCH_SIZE, num_anchors=NUM_ANCHORS, balance_domains=True
        ),
        steps=STEPS,
        microbatches=1,
        log_every_steps=10,
        save_every_steps=50,
    )
