"""A tiny target as a Hugging Face directory, responses for it, and the configuration of a short run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.pipeline import DataConfig
from dspark_jax.data.sources import is_held_out
from dspark_jax.drafters.config import Markov
from dspark_jax.testing.directory import save_tiny_target
from dspark_jax.testing.tiny import TARGETS, tiny_target
from dspark_jax.training import loop
from dspark_jax.training.config import LossConfig, MeshConfig, TrainConfig
from dspark_jax.training.recipes import DSparkRecipe

VOCAB_SIZE, MASK_TOKEN = 40, 39


def save_responses(path: Path, *, seed: int, count: int, max_response: int = 26) -> Path:
    """Random prompts and responses, none of them held out."""
    rng = np.random.default_rng(seed)
    ids = (f"r{number}" for number in range(10 * count))
    rows = []
    for record_id in [record_id for record_id in ids if not is_held_out(record_id)][:count]:
        prompt, response = int(rng.integers(2, 6)), int(rng.integers(16, max_response))
        # Low ids are more frequent, so that a reduced draft vocabulary leaves something out.
        tokens = np.minimum(rng.geometric(0.08, prompt + response), MASK_TOKEN - 1).tolist()
        row = {
            "prompt_ids": tokens[:prompt],
            "response_ids": tokens[prompt:],
            "finish": "length",
            "template": "chat()",
        }
        rows.append({"id": record_id, "domain": "test", "source": "test", **row})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module", autouse=True)
def always_quick_compiles(quick_compiles) -> None:
    """All tests here compile programs and run them a few times."""


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory) -> Path:
    """A tiny Llama with its own LM head, on disk."""
    fields = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "tie_word_embeddings": False}
    target = tiny_target(seed=14, **fields, pad_token_id=0, eos_token_id=2)
    return save_tiny_target(target, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def experts_directory(tmp_path_factory) -> Path:
    """A tiny Qwen3-MoE, on disk."""
    fields = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "eos_token_id": 2}
    target = tiny_target(seed=15, **TARGETS["qwen3-moe"], **fields)
    return save_tiny_target(target, tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="session")
def responses(tmp_path_factory) -> Path:
    """Twenty responses."""
    return save_responses(tmp_path_factory.mktemp("responses") / "responses.jsonl", seed=0, count=20)


@pytest.fixture(scope="session")
def write_responses() -> Callable[..., Path]:
    """Writes other responses: (path, seed=, count=) -> path."""
    return save_responses


@pytest.fixture(scope="session")
def make_config(target_directory, responses) -> Callable[..., TrainConfig]:
    """A run of 8 steps on a mesh of 2 x 2 x 2 devices; fields can be replaced."""

    def make(run_dir: Path, **changes) -> TrainConfig:
        fields = {
            "run_name": run_dir.name,
            "runs": run_dir.parent,
            "target": str(target_directory),
            "drafter": DSparkRecipe(
                taps=(-1, 1),
                mask_token=MASK_TOKEN,
                num_layers=1,
                block_len=3,
                head=Markov(rank=4),
                draft_vocab_size=24,
            ),
            "responses": (responses,),
            "data": DataConfig(
                batch_size=8, max_length=30, num_anchors=4, prefetch_batches=1, read_threads=1
            ),
            "steps": 8,
            "loss": LossConfig(chunk=8),
            "mesh": MeshConfig(data=2, fsdp=2, tensor=2),
            "dtype": "float32",
            "log_every_steps": 1,
            "save_every_steps": 3,
        }
        return TrainConfig(**{**fields, **changes})

    return make


@pytest.fixture
def on_devices(monkeypatch) -> Callable[[int], None]:
    """Lets `train` see fewer devices than the tests do."""

    def use(count: int) -> None:
        monkeypatch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:count]))

    return use
