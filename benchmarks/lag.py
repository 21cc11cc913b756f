"""What the scheduler's lag costs: recorded rounds replayed on measured times, steady and bursty arrivals.

    dspark evaluate --suites mt-bench gsm8k humaneval --data-dir DIR --temperatures 1 --output rounds.json
    dspark profile --slots 32 --output costs.json
    python benchmarks/lag.py --rounds rounds.rounds.jsonl --costs costs.json --json lag.json

A simulation (`evaluation/lag_study.py`): what it compares are lags with one another, not engines. Lag 0 takes
the budget from the present round's survivals, which no lossless engine may do: it bounds what a smaller lag
could gain. Every row is the mean over seeds of arrivals, with the smallest and the largest.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from dspark_jax.core.files import atomic_write
from dspark_jax.evaluation.calibration_report import full_block_rounds
from dspark_jax.evaluation.diagnostics import halves
from dspark_jax.evaluation.lag_study import bursty_arrivals_s, poisson_arrivals_s, replays, simulate
from dspark_jax.evaluation.provenance import plain_settings, provenance
from dspark_jax.evaluation.rounds_log import read_rounds
from dspark_jax.speculation.calibration import fit_scaling
from dspark_jax.speculation.cost import CostTable

ARRIVALS = {"steady": poisson_arrivals_s, "bursty": bursty_arrivals_s}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lag:
    """What to simulate."""

    rounds: Path
    """Rounds of an evaluation with whole blocks (NAME.rounds.jsonl)."""
    costs: Path
    """Cost table of `dspark profile` for as many slots."""
    temperature: float = 1.0
    """Which of the recorded temperatures."""
    lags: tuple[int, ...] = (0, 1, 2, 4, 8)
    """Rounds between a survival and its use."""
    arrivals_per_s: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """Mean rates."""
    seconds: float = 600.0
    """Simulated time in which requests arrive."""
    slots: int = 32
    """Requests decoded at the same time."""
    context: int = 256
    """Tokens of context at which rounds are priced."""
    seeds: int = 5
    """Sets of arrivals."""
    json: Path | None = None
    """Also write the figures here."""


def read_costs(path: Path) -> CostTable:
    """A cost table as `dspark profile` writes it, whatever it was measured on."""
    content = json.loads(path.read_text())
    return CostTable(
        **{name: tuple(content[name]) for name in ("request_buckets", "row_buckets", "context_buckets")},
        verify_ms_np=np.array(
            [[[np.inf if t is None else t for t in row] for row in rows] for rows in content["verify_ms"]]
        ),
        draft_ms_np=np.array(content["draft_ms"]),
        fingerprint=content["fingerprint"],
    )


def main(config: Lag) -> None:
    """Simulates every lag on the same arrivals, reports."""
    _, answers = read_rounds(config.rounds)
    records = [answer.rounds for answer in answers if answer.temperature == config.temperature]
    # Temperatures from one half of the prompts, replays from the other.
    fit, replayed = halves(records)
    to_fit = full_block_rounds(fit)
    recorded = replays(replayed, fit_scaling(to_fit.logits_np, to_fit.survived_np))
    table = read_costs(config.costs)
    rows = []
    cases = [(kind, rate, lag) for kind in ARRIVALS for rate in config.arrivals_per_s for lag in config.lags]
    for kind, rate, lag in tqdm(cases, unit="case"):
        runs = [
            simulate(
                recorded,
                ARRIVALS[kind](rate, config.seconds, seed),
                table,
                lag=lag,
                slots=config.slots,
                context=config.context,
                seed=seed,
            )
            for seed in range(config.seeds)
        ]
        speeds = [run.tokens_per_s for run in runs]
        rows.append(
            {
                "scheduler": f"{kind}, lag {lag}",
                "arrivals_per_s": rate,
                "tokens_per_s": float(np.mean(speeds)),
                "tokens_per_s_per_request": float(np.mean([run.tokens_per_s_per_request for run in runs])),
                "slowest": min(speeds),
                "fastest": max(speeds),
                "budget": float(np.mean([run.budget for run in runs])),
                "concurrency_in_rounds": float(np.mean([run.concurrency for run in runs])),
            }
        )
    print(
        f"\n{'':18s}{'arrivals/s':>11s}{'tokens/s':>10s}{'of a request':>14s}{'budget':>8s}{'requests':>10s}"
    )
    for row in rows:
        print(
            f"{row['scheduler']:18s}{row['arrivals_per_s']:11.2f}{row['tokens_per_s']:10.1f}"
            f"{row['tokens_per_s_per_request']:14.2f}{row['budget']:8.1f}{row['concurrency_in_rounds']:10.1f}"
        )
    if config.json:
        text = "A simulation: recorded rounds replayed on measured times. Lag 0 is a bound and not lossless."
        report = {
            "kind": "load",
            "text": text,
            **provenance(),
            "config": plain_settings(config),
            "rows": rows,
        }
        with atomic_write(config.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main(tyro.cli(Lag, description=__doc__))
