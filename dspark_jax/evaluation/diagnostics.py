"""What the recorded rounds of an evaluation say beyond acceptance, computed without any model.

All of it rests on full-block rounds: there the outcome of every position is known, so a shorter verification
can be read off exactly.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.accepted_length import PromptRounds, accepted_length
from dspark_jax.evaluation.calibration_report import (
    MIN_COUNT_SHOWN,
    FullBlockRounds,
    calibration_figures,
    full_block_rounds,
)
from dspark_jax.evaluation.prompts import prompt_hash
from dspark_jax.speculation import calibration
from dspark_jax.speculation.verify_length import ConfidenceThreshold, verify_lengths

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
CONTEXT_BINS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Edges, in tokens."""
MIN_ROUNDS = 50
"""Context bins and domains with fewer rounds are left out: their shares are noise."""
HALVES_SALT = "dspark-calibrate"


def halves(records: Sequence[PromptRounds]) -> tuple[list[PromptRounds], list[PromptRounds]]:
    """(to fit, to check), divided by prompt: rounds of one answer resemble one another."""
    parts: tuple[list[PromptRounds], list[PromptRounds]] = ([], [])
    for record in records:
        parts[prompt_hash(record.id, HALVES_SALT) % 2].append(record)
    return parts


def threshold_sweep(
    rounds: FullBlockRounds, scaling_np: np.ndarray, thresholds: Sequence[float] = THRESHOLDS
) -> list[dict[str, float | None]]:
    """What verifying up to the first confidence below a threshold would have done, per round.

    Args:
      rounds: full-block rounds.
      scaling_np: [2, G], of the confidence logits.
      thresholds: to try; 0 verifies everything.

    Returns:
      For each threshold: draft tokens accepted and rejected, their sum the tokens verified, the share of
      verified tokens that was accepted, and the accepted length.
    """
    accepted_N = rounds.survived_np.sum(1)
    scaled_NG = jnp.asarray(calibration.scaled(rounds.logits_np, scaling_np), jnp.float32)
    rows = []
    for threshold in thresholds:
        policy = ConfidenceThreshold(threshold=threshold)  # the engine's own rule
        lengths_N = np.asarray(verify_lengths(policy, scaled_NG, scaled_NG.shape[1]))
        accepted = float(np.minimum(accepted_N, lengths_N).mean())
        verified = float(lengths_N.mean())
        rows.append(
            {
                "threshold": threshold,
                "accepted": accepted,
                "rejected": verified - accepted,
                "acceptance": accepted / verified if verified else None,
                "accepted_length": 1 + accepted,
            }
        )
    return rows


def reliability_points(rounds: FullBlockRounds, scaling_np: np.ndarray) -> list[list[list[float]]]:
    """The points of a reliability diagram at each position: [predicted, observed, rounds] of filled bins."""
    predicted_NG = calibration.predicted(rounds.logits_np, scaling_np)
    positions = []
    for predicted_N, survived_N in zip(predicted_NG.T, rounds.survived_np.T, strict=True):
        diagram = calibration.reliability(predicted_N, survived_N)
        shown = diagram.count_np >= MIN_COUNT_SHOWN
        columns = (diagram.predicted_np, diagram.observed_np, diagram.count_np)
        positions.append(np.stack(columns, 1)[shown].tolist())
    return positions


def calibration_shift(records: Sequence[PromptRounds]) -> dict[str, dict[str, float]]:
    """ECE, mean over positions, of a scaling fitted on one domain and measured on another.

    Fitting uses one half of a domain's prompts and measuring the other, so that the diagonal is honest too.

    Returns:
      Fitted on ("nothing": the raw head; "all": the first halves of all domains) -> measured on -> ECE.
    """
    fits: dict[str, FullBlockRounds] = {}
    checks: dict[str, FullBlockRounds] = {}
    for domain in sorted({record.domain for record in records}):
        parts = halves([record for record in records if record.domain == domain])
        try:
            to_fit, to_check = map(full_block_rounds, parts)
        except InputError:
            continue
        if min(len(to_fit.logits_np), len(to_check.logits_np)) >= MIN_ROUNDS:
            fits[domain], checks[domain] = to_fit, to_check
    if not fits:
        return {}
    block_len = next(iter(fits.values())).logits_np.shape[1]
    whole = FullBlockRounds(
        logits_np=np.concatenate([rounds.logits_np for rounds in fits.values()]),
        survived_np=np.concatenate([rounds.survived_np for rounds in fits.values()]),
    )
    scalings = {"nothing": calibration.unscaled(block_len)}
    for name, rounds in {"all": whole, **fits}.items():
        scalings[name] = calibration.fit_scaling(rounds.logits_np, rounds.survived_np)
    return {
        name: {domain: calibration_figures(rounds, scaling_np).mean_ece for domain, rounds in checks.items()}
        for name, scaling_np in scalings.items()
    }


def acceptance_by_context(records: Sequence[PromptRounds]) -> list[dict[str, float | int]]:
    """Accepted length of rounds by the length of the context that they started from, in tokens."""
    starts, committed = [], []
    for record in records:
        # The prefill brings the first token of an answer, the anchor of the first round.
        before_np = np.cumsum(record.committed_np) - record.committed_np
        starts.append(record.prompt_tokens + before_np)
        committed.append(record.committed_np)
    starts_np, committed_np = np.concatenate(starts), np.concatenate(committed)
    rows: list[dict[str, float | int]] = []
    for low, high in itertools.pairwise(CONTEXT_BINS):
        inside = (starts_np >= low) & (starts_np < high)
        if inside.sum() >= MIN_ROUNDS:
            spread = committed_np[inside].std() / inside.sum() ** 0.5
            rows.append(
                {
                    "from_tokens": low,
                    "below_tokens": high,
                    "rounds": int(inside.sum()),
                    "accepted_length": float(committed_np[inside].mean()),
                    "standard_error": float(spread),
                }
            )
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All diagnostics of one run at one temperature.

    Attributes:
      fitted: temperatures and shifts [2][G], fitted on half of the prompts; None without a confidence head.
      rounds: (fitted, checked) full-block rounds.
      figures: "raw" and "scaled" -> ECE, AUROC and Brier per position, on the other half.
      reliability: "raw" and "scaled" -> points per position.
      thresholds: domain -> rows of the sweep, "all" first, under the fitted scaling.
      shift: fitted on -> measured on -> mean ECE.
      context: accepted length by context length.
      accepted_length: over all rounds.
    """

    fitted: list[list[float]] | None
    rounds: tuple[int, int]
    figures: Mapping[str, Any]
    reliability: Mapping[str, Any]
    thresholds: Mapping[str, Any]
    shift: Mapping[str, Any]
    context: Sequence[Any]
    accepted_length: float


def diagnose(records: Sequence[PromptRounds]) -> Diagnosis:
    """Everything that the rounds can say.

    Raises:
      InputError: no answers.
    """
    if not records:
        raise InputError(
            given="no answers", expected="recorded rounds", fix="let `dspark evaluate` finish some"
        )
    context, tau = acceptance_by_context(records), accepted_length(records)
    try:
        to_fit, to_check = map(full_block_rounds, halves(records))
    except InputError:  # DFlash and its like have no confidence
        empty: dict[str, Any] = {"figures": {}, "reliability": {}, "thresholds": {}, "shift": {}}
        return Diagnosis(fitted=None, rounds=(0, 0), context=context, accepted_length=tau, **empty)
    fitted_np = calibration.fit_scaling(to_fit.logits_np, to_fit.survived_np)
    sets = {"raw": calibration.unscaled(fitted_np.shape[1]), "scaled": fitted_np}
    sweeps = {"all": threshold_sweep(full_block_rounds(records), fitted_np)}
    for domain in sorted({record.domain for record in records}):
        of_domain = [record for record in records if record.domain == domain]
        sweeps[domain] = threshold_sweep(full_block_rounds(of_domain), fitted_np)
    return Diagnosis(
        fitted=fitted_np.tolist(),
        rounds=(len(to_fit.logits_np), len(to_check.logits_np)),
        figures={
            name: calibration_figures(to_check, scaling_np).as_json() for name, scaling_np in sets.items()
        },
        reliability={name: reliability_points(to_check, scaling_np) for name, scaling_np in sets.items()},
        thresholds=sweeps,
        shift=calibration_shift(records),
        context=context,
        accepted_length=tau,
    )
