"""What the public reference (DeepSpec) computes on tiny models, we compute: training, gradients, decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_jax.checkpoints.drafter import drafter_slots, load_drafter
from dspark_jax.evaluation.golden import verify

FIXTURES = Path(__file__).parents[1] / "golden"
GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
CASES = (
    "dspark_vanilla_tied",
    "dspark_gated_untied",
    "dspark_rnn",
    "dspark_conf_without_markov",
    "dflash",
    "dspark_gemma4",
    "eagle3",
)
ROWS = {"eval_mask", "target_ids", "draft_logits", "accept_rate", "loss"}


def recorded(name: str) -> tuple[set[str], set[str]]:
    """What is compared of the training batch, and of decoding; of Eagle3 less was recorded."""
    prompt, told = ("prompt{}/", ("output", "lengths"))
    if name != "eagle3":
        prompt, told = ("prompt{}_th0.0/", ("output", "lengths", "rounds"))
    prompts = {prompt.format(number) + what for number in range(3) for what in told}
    return {"loss"} if name == "eagle3" else ROWS, prompts


@pytest.mark.parametrize("name", [path.name for path in FIXTURES.iterdir() if path.is_dir()])
def test_fixtures(name):
    compared = verify(FIXTURES / name)

    assert {item.field for item in compared} >= recorded(name)[0]
    assert not [item for item in compared if not item.passed]


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="the whole recorded reference, ../shared/golden, is not on this machine"
)
@pytest.mark.parametrize("name", CASES)
def test_everything_that_was_recorded(name):
    """Every row, loss term, gradient and round; of all parameters but those that are frozen."""
    compared = verify(GOLDEN / name)

    trained = {
        f"grad/{parameter}"
        for parameter in drafter_slots(load_drafter(GOLDEN / name / "drafter").drafter)
        if not parameter.endswith("layer_scalar")
    }
    assert {item.field for item in compared} >= trained.union(*recorded(name))
    assert not [item for item in compared if not item.passed]
