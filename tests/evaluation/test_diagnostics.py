"""Diagnostics against figures worked out by hand, and the errors of probabilities against scikit-learn."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dspark_jax.commands import diagnose as command
from dspark_jax.core.errors import InputError
from dspark_jax.data.sources import Prompt
from dspark_jax.evaluation.accepted_length import PromptRounds
from dspark_jax.evaluation.calibration_report import FullBlockRounds, calibration_figures
from dspark_jax.evaluation.diagnostics import (
    acceptance_by_context,
    calibration_shift,
    diagnose,
    reliability_points,
    threshold_sweep,
)
from dspark_jax.evaluation.rounds_log import Answer, RoundsLog, prompts_digest
from dspark_jax.speculation import calibration

G = 2


def record(name: str, accepted, logits, *, domain: str = "math", prompt_tokens: int = 0) -> PromptRounds:
    accepted_np = np.array(accepted, np.int64)
    return PromptRounds(
        id=name,
        domain=domain,
        new_tokens=int((accepted_np + 1).sum()) + 1,
        committed_np=accepted_np + 1,
        accepted_np=accepted_np,
        verified_np=np.full(len(accepted_np), G, np.int64),
        confidence_np=np.array(logits, np.float32),
        prompt_tokens=prompt_tokens,
    )


def many(domain: str, temperature: float, prompts: int = 16) -> list[PromptRounds]:
    """Answers whose true acceptance is sigmoid(logit / temperature)."""
    rng = np.random.default_rng(3)
    records = []
    for i in range(prompts):
        logits_NG = rng.normal(0, 4, (40, G))
        passed_NG = rng.random((40, G)) < 1 / (1 + np.exp(-logits_NG / temperature))
        accepted = np.cumprod(passed_NG, axis=1).sum(1)
        records.append(record(f"{domain}{i}", accepted, logits_NG, domain=domain, prompt_tokens=10))
    return records


def test_threshold_sweep_by_hand():
    # Confidences 0.88, 0.5 | 0.27, 0.95 | 0.88, 0.12; accepted 2, 0, 1.
    rounds = FullBlockRounds(
        logits_np=np.array([[2.0, 0.0], [-1.0, 3.0], [2.0, -2.0]]),
        survived_np=np.array([[True, True], [False, False], [True, False]]),
    )
    everything, some, strict = threshold_sweep(rounds, calibration.unscaled(G), (0.0, 0.4, 0.99))

    assert everything == pytest.approx(
        {"threshold": 0, "accepted": 1, "rejected": 1, "acceptance": 0.5, "accepted_length": 2}
    )
    # Verified 2, 0, 1 (the second round stops at its first token, however sure it is of the next).
    assert some == pytest.approx(
        {"threshold": 0.4, "accepted": 1, "rejected": 0, "acceptance": 1, "accepted_length": 2}
    )
    assert strict["acceptance"] is None and strict["accepted_length"] == 1


def test_context_starts_at_the_prompt_and_grows_by_what_is_committed():
    # Rounds start at 60, 61, 62, ...: four below 64, the rest above.
    [first, second] = acceptance_by_context(
        [record(f"p{i}", [0] * 4 + [1] * 5, np.zeros((9, G)), prompt_tokens=60) for i in range(20)]
    )
    assert (first["from_tokens"], first["below_tokens"], first["rounds"]) == (0, 64, 80)
    assert first["accepted_length"] == 1 and second["accepted_length"] == 2
    assert second["rounds"] == 100


def test_a_calibration_fits_its_own_domain_best():
    shift = calibration_shift([*many("math", 0.5), *many("chat", 8.0)])

    assert list(shift) == ["nothing", "all", "chat", "math"]
    for domain in ("math", "chat"):
        assert min(shift, key=lambda fitted: shift[fitted][domain]) == domain


def test_domains_without_enough_rounds_are_left_out():
    assert calibration_shift([record("a", [1, 0], np.ones((2, G)))]) == {}


def test_scaling_repairs_what_was_wrong_with_the_logits():
    found = diagnose(many("math", 2.0, prompts=40))
    assert found.fitted is not None
    assert np.mean(found.figures["scaled"]["ece"]) < np.mean(found.figures["raw"]["ece"])
    assert found.rounds[0] + found.rounds[1] == 40 * 40
    assert list(found.thresholds) == ["all", "math"]


def test_without_a_confidence_head_the_context_remains():
    found = diagnose([record("a", [1] * 200, np.zeros(0))])
    assert found.fitted is None and found.accepted_length == 2 and len(found.context) >= 1
    with pytest.raises(InputError, match="no answers"):
        diagnose([])


def test_errors_agree_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    sklearn_calibration = pytest.importorskip("sklearn.calibration")
    records = many("math", 2.0)
    rounds = FullBlockRounds(
        logits_np=np.concatenate([r.confidence_np for r in records]).astype(np.float64),
        survived_np=calibration.survived(np.concatenate([r.accepted_np for r in records]), G),
    )
    figures = calibration_figures(rounds, calibration.unscaled(G))
    predicted_NG = calibration.predicted(rounds.logits_np, calibration.unscaled(G))
    points = reliability_points(rounds, calibration.unscaled(G))
    for k in range(G):
        probs, happened = predicted_NG[:, k], rounds.survived_np[:, k]
        assert figures.auroc_np[k] == pytest.approx(metrics.roc_auc_score(happened, probs))
        assert figures.brier_np[k] == pytest.approx(metrics.brier_score_loss(happened, probs))
        observed, predicted = sklearn_calibration.calibration_curve(happened, probs, n_bins=calibration.BINS)
        counts = np.histogram(probs, bins=np.linspace(0, 1, calibration.BINS + 1))[0]
        counts = counts[counts > 0]
        ece = np.sum(counts * np.abs(observed - predicted)) / counts.sum()
        assert figures.ece_np[k] == pytest.approx(ece)
        shown = counts >= 10
        np.testing.assert_allclose(points[k], np.stack([predicted, observed, counts], 1)[shown], rtol=1e-9)


def test_the_command_reads_rounds_and_writes_a_result(tmp_path, capsys):
    log = RoundsLog(tmp_path / "run.rounds.jsonl", {"drafter": "d"})
    for rounds in [*many("math", 2.0), *many("chat", 2.0)]:
        log.append(Answer(rounds=rounds, temperature=1.0, seconds=0.1))
    log.close()
    config = command.Diagnose(rounds=tmp_path / "run.rounds.jsonl", output=tmp_path / "d.json")
    command.run(config)

    content = json.loads(config.output.read_text())
    assert (content["kind"], content["name"]) == ("diagnostics", "run")
    assert content["results"][0]["temperature"] == 1.0
    shown = capsys.readouterr().out
    assert "threshold" in shown and "fitted on" in shown and "context tokens" in shown


def test_prompts_are_told_apart_by_what_they_say():
    prompts = [
        Prompt(id="a", domain="d", source="s", text="one"),
        Prompt(id="b", domain="d", source="s", text="x"),
    ]
    other = [prompts[0], Prompt(id="b", domain="d", source="s", text="y")]
    assert prompts_digest(prompts) == prompts_digest(prompts[::-1]) != prompts_digest(other)
