"""What the public reference (DeepSpec) computes for a tiny Eagle3, we compute: loss, gradients, decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_jax.checkpoints.drafter import drafter_slots, load_drafter
from dspark_jax.evaluation.golden import verify

FIXTURE = Path(__file__).parents[1] / "golden" / "eagle3"
CASE = Path(__file__).parents[3] / "shared" / "golden" / "eagle3"


def test_the_fixture():
    compared = verify(FIXTURE)

    assert {item.field for item in compared} > {"loss", "grad/norm.weight"}
    assert not [item for item in compared if not item.passed]


@pytest.mark.skipif(
    not CASE.is_dir(), reason="the recorded reference, ../shared/golden, is not on this machine"
)
def test_everything_that_was_recorded():
    """Loss and every gradient through the trainer's own loss; accepted lengths round by round, and texts."""
    compared = verify(CASE)

    gradients = {f"grad/{name}" for name in drafter_slots(load_drafter(CASE / "drafter").drafter)}
    prompts = {f"prompt{number}/{what}" for number in range(3) for what in ("output", "lengths")}
    assert {item.field for item in compared} == {"loss"} | gradients | prompts
    assert not [item for item in compared if not item.passed]
