"""Training view and decoding view are one network: what was learnt by heart is drafted without a miss."""

from __future__ import annotations

import itertools
import json

import pytest

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.targets import load_target
from dspark_jax.data.pipeline import DataConfig
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import make_engine
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.training import loop
from dspark_jax.training.config import LossConfig, MeshConfig, OptimizerConfig
from dspark_jax.training.recipes import DrafterRecipe, DSparkRecipe, Eagle3Recipe, MTPRecipe

G, ROUNDS = 4, 6
PROMPT = [11, 7, 29, 3, 18]
NEW_TOKENS = 1 + ROUNDS * (G + 1)  # the prefill's token, then full rounds to the very end


def decode(engine) -> Request:
    greedy = SamplingOptions(temperature=0.0)
    request = Request(id="one", prompt_tokens=PROMPT, max_new_tokens=NEW_TOKENS, sampling=greedy)
    return next(iter(engine.run([request])))


RECIPES = {
    "dflash": DSparkRecipe(
        taps=(-1, 1), mask_token=39, num_layers=1, block_len=G, head=None, confidence=None
    ),
    "eagle3": Eagle3Recipe(taps=(-1, 1), block_len=G),
    "mtp": MTPRecipe(block_len=G),
}


@pytest.fixture
def train_on_its_own_words(make_config, on_devices, tmp_path):
    """Greedy words of a target -> (the drafter that learnt them, last metrics)."""

    def run(recipe: DrafterRecipe, response: list[int]):
        record = {"id": "one", "domain": "test", "prompt_ids": PROMPT, "response_ids": response}
        (tmp_path / "one.jsonl").write_text(json.dumps(record) + "\n")
        rows = []
        on_devices(1)
        config = make_config(
            tmp_path / "run",
            drafter=recipe,
            responses=(tmp_path / "one.jsonl",),
            data=DataConfig(batch_size=1, max_length=len(PROMPT) + NEW_TOKENS, num_anchors=NEW_TOKENS),
            steps=200,
            optimizer=OptimizerConfig(learning_rate=2e-2),
            loss=LossConfig(ce=1.0, tv=0.0, decay_len=100.0),
            mesh=MeshConfig(),
            log_every_steps=50,
            save_every_steps=1000,
        )
        exported = loop.train(config, on_log=lambda step, row: rows.append(row))
        return load_drafter(exported), rows[-1]

    return run


@pytest.mark.parametrize("name", RECIPES)
def test_a_record_learnt_by_heart_is_accepted_whole_in_every_round(
    target_directory, train_on_its_own_words, name
):
    target = load_target(target_directory)
    engine = EngineConfig(max_context=64, smallest_prefill=8)
    plain = decode(make_engine(target, None, engine))
    # The same token is followed by different ones: the drafter has to read the context at the right place.
    followers = {token: set() for token in plain.emitted}
    for token, follower in itertools.pairwise(plain.emitted):
        followers[token].add(follower)
    assert sum(len(after) > 1 for after in followers.values()) >= 4

    drafter, metrics = train_on_its_own_words(RECIPES[name], plain.emitted)
    assert metrics["ce"] < 0.05, metrics
    speculative = decode(make_engine(target, drafter, engine))
    assert speculative.emitted == plain.emitted
    assert speculative.accepted_per_round == [G] * ROUNDS
