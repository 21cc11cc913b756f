"""Configurations: what is refused, what the recipes resolve to, and how flags reach them."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path

import pytest

import train as front_door
from dspark_jax.core.errors import InputError
from dspark_jax.drafters.config import Gated, Markov
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.families import decoder_config_from_hf
from dspark_jax.training.config import DrafterRecipe, LossConfig, OptimizerConfig, as_json

ROOT = Path(__file__).resolve().parents[2]


def hf_config(
    model_type: str, vocab_size: int, layers: int, width: int, mlp: int, heads: int, kv_heads: int, **rest
):
    """The fields of a published config.json that a recipe depends on."""
    return {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **rest,
    }


TARGETS = {
    "smollm2_135m": hf_config("llama", 49152, 30, 576, 1536, 9, 3),
    "qwen3_4b": hf_config("qwen3", 151936, 36, 2560, 9728, 32, 8, head_dim=128),
    "qwen3_8b": hf_config("qwen3", 151936, 36, 4096, 12288, 32, 8, head_dim=128),
    "qwen3_14b": hf_config("qwen3", 151936, 40, 5120, 17408, 40, 8, head_dim=128),
}


def decoder(name: str) -> DecoderConfig:
    return decoder_config_from_hf(TARGETS[name])


def get_config(name: str):
    return runpy.run_path(str(ROOT / "configs" / "dspark.py"))["get_config"](name)


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.py")), ids=lambda path: path.stem)
def test_every_recipe_states_its_claim(path):
    module = runpy.run_path(str(path))
    for field in ("Reproduces:", "Command:", "Hardware:", "Duration:", "Expected figure:", "Last run:"):
        assert field in module["__doc__"]
    with pytest.raises(InputError, match="one of"):
        module["get_config"]("gpt_5")


@pytest.mark.parametrize("name", TARGETS)
def test_every_recipe_resolves(name):
    config = get_config(name)
    drafter = config.drafter.resolve(decoder(name))
    assert drafter.block == decoder(name).block
    assert drafter.target_vocab_size == TARGETS[name]["vocab_size"]
    assert drafter.vocab_size == (config.drafter.draft_vocab_size or drafter.target_vocab_size)
    assert not config.run_dir.is_absolute() and not any(path.is_absolute() for path in config.responses)


def test_the_papers_numbers():
    config = get_config("qwen3_14b")
    assert config.optimizer == OptimizerConfig(learning_rate=6e-4, warmup_share=0.04, clip_norm=1.0)
    assert config.loss == LossConfig(ce=0.1, tv=0.9, confidence=1.0, decay_len=4.0)
    assert (config.data.batch_size, config.data.max_length, config.data.num_anchors) == (512, 4096, 512)
    assert config.drafter.head == Markov(rank=256) and config.drafter.block_len == 7
    assert config.drafter.mask_token == 151669 and config.drafter.taps == (1, 10, 19, 28, 37)
    assert config.steps * config.data.batch_size >= 10 * 1_400_000


def test_flags_override_a_recipe(monkeypatch, capsys):
    configs = []
    monkeypatch.setattr(front_door, "train", configs.append)
    recipe = [str(ROOT / "configs" / "dspark.py"), "--target", "smollm2_135m"]
    front_door.main([*recipe, "--steps", "7", "--data.batch-size", "4", "--drafter.taps", "2", "9"])
    assert configs[0].steps == 7 and configs[0].data.batch_size == 4 and configs[0].drafter.taps == (2, 9)
    front_door.main(recipe)
    assert configs[1] == get_config("smollm2_135m")
    with pytest.raises(SystemExit):
        front_door.main([*recipe, "--stepz", "7"])
    with pytest.raises(SystemExit):
        front_door.main([*recipe, "--microbatches", "5"])
    assert "equal parts" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        front_door.main([*recipe[:2], "gpt_5"])
    assert "--target gpt_5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: OptimizerConfig(learning_rate=0.0), "learning_rate=0.0"),
        (lambda: OptimizerConfig(warmup_share=1.0), "warmup_share=1.0"),
        (lambda: LossConfig(tv=-1.0), "tv=-1.0"),
        (lambda: LossConfig(chunk=0), "chunk=0"),
        (lambda: dataclasses.replace(get_config("qwen3_4b"), dtype="float16"), "float16"),
        (lambda: dataclasses.replace(get_config("qwen3_4b"), steps=0), "steps=0"),
        (lambda: dataclasses.replace(get_config("qwen3_4b"), microbatches=3), "equal parts"),
        (lambda: DrafterRecipe(taps=(1, 36), mask_token=3).resolve(decoder("qwen3_4b")), "36"),
        (lambda: DrafterRecipe(taps=(), mask_token=3).resolve(decoder("qwen3_4b")), "taps"),
        (
            lambda: DrafterRecipe(taps=(1,), mask_token=3, warm_start_sequences=4).resolve(
                decoder("qwen3_4b")
            ),
            "head norms",
        ),
    ],
)
def test_impossible_settings_are_refused(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_json_tells_variants_apart():
    assert as_json(DrafterRecipe(taps=(1,), mask_token=3, head=Gated(rank=4)))["head"] == {
        "type": "Gated",
        "rank": 4,
    }
