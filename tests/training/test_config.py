"""Configurations: what is refused, what the recipes resolve to, and how flags reach them."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

import train as front_door
from dspark_jax.core.distributed import DistributedConfig
from dspark_jax.core.errors import InputError
from dspark_jax.drafters.config import RNN, Confidence, Gated, Markov
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.families import decoder_config_from_hf
from dspark_jax.training.config import LossConfig, OptimizerConfig, PerToken, as_json
from dspark_jax.training.recipes import DSparkRecipe, Eagle3Recipe, MTPRecipe

ROOT = Path(__file__).resolve().parents[2]


TARGETS = {path.stem: json.loads(path.read_text()) for path in ROOT.glob("configs/targets/*.json")} | {
    "smollm2_135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
}
"""Published config.json, as far as a recipe depends on it."""
METHODS = ("dspark", "dflash", "eagle3", "mtp")
PUBLISHED = {
    "qwen3_4b": ("Qwen/Qwen3-4B", (1, 9, 17, 25, 33), 151669),
    "qwen3_8b": ("Qwen/Qwen3-8B", (1, 9, 17, 25, 33), 151669),
    "qwen3_14b": ("Qwen/Qwen3-14B", (1, 10, 19, 28, 37), 151669),
    "qwen3_30b_a3b": ("Qwen/Qwen3-30B-A3B", (1, 12, 23, 34, 45), 151669),
    "gemma4_12b": ("google/gemma-4-12B-it", (5, 17, 29, 41, 46), 4),
}
"""The paper's targets and one with experts: name, tapped layers, mask token."""


def decoder(name: str) -> DecoderConfig:
    return decoder_config_from_hf(TARGETS[name])


def get_config(name: str, method: str = "dspark", **arguments: str):
    return runpy.run_path(str(ROOT / "configs" / f"{method}.py"))["get_config"](name, **arguments)


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.py")), ids=lambda path: path.stem)
def test_every_recipe_states_its_claim(path):
    module = runpy.run_path(str(path))
    for field in ("Reproduces:", "Command:", "Hardware:", "Duration:", "Expected figure:", "Last run:"):
        assert field in module["__doc__"]
    with pytest.raises(InputError, match="one of"):
        module["get_config"]("gpt_5")


def test_every_published_target_has_its_dimensions():
    assert PUBLISHED.keys() == TARGETS.keys() - {"smollm2_135m"}
    gemma = decoder("gemma4_12b")
    assert [gemma.num_layers, gemma.layers[0].window, gemma.layers[5].num_kv_heads] == [48, 1024, 1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TARGETS)
def test_every_recipe_resolves(name, method):
    config = get_config(name, method)
    assert config.run_dir.name == f"{method}_{name}"
    drafter = config.drafter.resolve(decoder(name))
    assert drafter.block == decoder(name).block
    assert drafter.target_vocab_size == TARGETS[name]["vocab_size"]
    assert drafter.vocab_size == (config.drafter.draft_vocab_size or drafter.target_vocab_size)
    assert not config.run_dir.is_absolute() and not any(path.is_absolute() for path in config.responses)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_setting_is_every_methods(name, method):
    config, (target, taps, _) = get_config(name, method), PUBLISHED[name]
    assert config.target == target
    assert config.optimizer == OptimizerConfig(
        learning_rate=6e-4, warmup_share=0.04, clip_norm=1.0, b1=0.9, b2=0.999, orthogonalise=False
    )
    assert (config.data.batch_size, config.data.max_length, config.data.num_anchors) == (512, 4096, 512)
    assert 10 * 1_400_000 <= config.steps * config.data.batch_size < 10 * 1_400_000 + 512
    assert (config.dtype, config.init_from, config.drafter.draft_vocab_size) == ("bfloat16", None, None)
    assert config.drafter.taps == (None if method == "mtp" else taps)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_parallel_drafters(name):
    (_, taps, mask_token), dspark, dflash = PUBLISHED[name], get_config(name), get_config(name, "dflash")
    shape = DSparkRecipe(
        taps=taps,
        mask_token=mask_token,
        num_layers=5,
        block_len=7,
        head=Markov(rank=256),
    )
    assert dspark.drafter == shape and shape.confidence == Confidence(with_markov=True)
    assert dflash.drafter == dataclasses.replace(shape, head=None, confidence=None)
    assert dspark.loss == LossConfig(ce=0.1, tv=0.9, confidence=1.0, decay_len=4.0)
    assert dflash.loss == LossConfig(ce=1.0, tv=0.0, confidence=0.0, decay_len=4.0)


def test_the_papers_sequential_drafters():
    eagle3, mtp = (get_config("gemma4_12b", method) for method in ("eagle3", "mtp"))
    assert (eagle3.drafter.block_len, mtp.drafter.block_len) == (7, 3)
    step_weights = np.exp(-np.arange(7) / eagle3.loss.decay_len)
    np.testing.assert_allclose(step_weights, 0.8 ** np.arange(7))
    assert (eagle3.loss.kl, eagle3.loss.ce, eagle3.loss.normaliser) == (1.0, 0.0, PerToken())
    assert (mtp.loss.ce, mtp.loss.tv, np.exp(-4 / mtp.loss.decay_len)) == (1.0, 0.0, 1.0)


def test_variants_of_a_method():
    assert get_config("qwen3_8b", head="gated").drafter.head == Gated(rank=256)
    assert get_config("smollm2_135m", head="rnn").drafter.head == RNN(rank=64)
    assert [get_config("qwen3_8b", "mtp", k=k).drafter.block_len for k in "135"] == [1, 3, 5]
    with pytest.raises(InputError, match="--head linear"):
        get_config("qwen3_8b", head="linear")
    with pytest.raises(InputError, match="--k 2"):
        get_config("qwen3_8b", "mtp", k="2")


def test_flags_override_a_recipe(monkeypatch, capsys):
    configs = []
    monkeypatch.setattr(front_door, "run_training", configs.append)
    recipe = [str(ROOT / "configs" / "dspark.py"), "--target", "smollm2_135m"]
    front_door.main([*recipe, "--steps", "7", "--data.batch-size", "4", "--drafter.taps", "2", "9"])
    assert configs[0].steps == 7 and configs[0].data.batch_size == 4 and configs[0].drafter.taps == (2, 9)
    front_door.main(recipe)
    assert configs[1] == get_config("smollm2_135m")
    front_door.main([*recipe, "--head", "gated", "--steps", "7"])
    assert configs[2] == dataclasses.replace(get_config("smollm2_135m", head="gated"), steps=7)
    watched = ["--run-name", "second", "--watch.profile-steps", "2", "3", "--keep.every-steps", "100"]
    joined = "--coordinator host:1 --num-processes 2 --process-id 1".replace("--", "--distributed.").split()
    front_door.main([*recipe, *watched, *joined, "--evaluation.prompts", "a.jsonl", "b.jsonl"])
    assert (configs[3].run_dir, configs[3].watch.profile_steps) == (Path("runs/second"), (2, 3))
    assert configs[3].keep.every_steps == 100 and len(configs[3].evaluation.prompts) == 2
    assert configs[3].distributed == DistributedConfig(coordinator="host:1", num_processes=2, process_id=1)
    front_door.main([*recipe, "--checkpoint-root", "gs://bucket/runs"])
    assert str(configs[4].checkpoint_dir) == "gs://bucket/runs/dspark_smollm2_135m/checkpoints"
    with pytest.raises(SystemExit):
        front_door.main([*recipe, "--init-from", "a", "--resume-from", "b"])
    assert "init_from=a" in capsys.readouterr().err
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
        (lambda: DistributedConfig(coordinator="host:1"), "all three"),
        (lambda: dataclasses.replace(get_config("qwen3_4b"), run_name="a/b"), "without a slash"),
        (lambda: OptimizerConfig(learning_rate=0.0), "learning_rate=0.0"),
        (lambda: OptimizerConfig(warmup_share=1.0), "warmup_share=1.0"),
        (lambda: LossConfig(tv=-1.0), "tv=-1.0"),
        (lambda: LossConfig(chunk=0), "chunk=0"),
        (lambda: dataclasses.replace(get_config("qwen3_4b"), dtype="float16"), "float16"),
        (lambda: dataclasses.replace(get_config("qwen3_4b"), steps=0), "steps=0"),
        (lambda: dataclasses.replace(get_config("qwen3_4b"), microbatches=3), "equal parts"),
        (lambda: DSparkRecipe(taps=(1, 36), mask_token=3).resolve(decoder("qwen3_4b")), "36"),
        (lambda: DSparkRecipe(taps=(), mask_token=3).resolve(decoder("qwen3_4b")), "taps"),
        (lambda: Eagle3Recipe(taps=(1, 36)).resolve(decoder("qwen3_4b")), "36"),
        (lambda: MTPRecipe(taps=(-2,)).resolve(decoder("qwen3_4b")), "taps"),
        (lambda: MTPRecipe(block_len=0).resolve(decoder("qwen3_4b")), "block_len"),
        (
            lambda: DSparkRecipe(taps=(1,), mask_token=3, warm_start_sequences=4).resolve(
                decoder("qwen3_4b")
            ),
            "head norms",
        ),
    ],
)
def test_impossible_settings_are_refused(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_mtp_reads_the_targets_last_layer():
    assert MTPRecipe().resolve(decoder("qwen3_4b")).taps == (35,)


def test_json_tells_variants_apart():
    assert as_json(DSparkRecipe(taps=(1,), mask_token=3, head=Gated(rank=4)))["head"] == {
        "type": "Gated",
        "rank": 4,
    }
