"""`dspark plan`: the real step, compiled for TPUs, its memory and its collectives."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.commands import plan as command
from dspark_jax.core.devices import TPU_KINDS
from dspark_jax.core.errors import InputError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.pipeline import DataConfig
from dspark_jax.drafters.config import Markov
from dspark_jax.targets.families import decoder_config_from_hf
from dspark_jax.training.config import LossConfig, MeshConfig, TrainConfig
from dspark_jax.training.plan import StepPlan, plan_step
from dspark_jax.training.recipes import DSparkRecipe

TARGET = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CONFIG = TrainConfig(
    run_name="unused",
    target="unused",
    drafter=DSparkRecipe(taps=(0, 1), mask_token=5, num_layers=1, block_len=3, head=Markov(rank=128)),
    responses=(Path("unused"),),
    data=DataConfig(batch_size=4, max_length=128, num_anchors=8),
    steps=10,
    loss=LossConfig(chunk=8),
)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_step_compiles_for_tpus_without_gathering_the_vocabulary(tpu_devices, topology):
    devices = tpu_devices(topology)
    mesh = make_mesh(data=-1, tensor=2, devices=devices)
    target = decoder_config_from_hf(TARGET)
    plan = plan_step(CONFIG, target, mesh)

    assert plan.fits and plan.tokens == 4 * 128
    head_bytes = 2 * 4096 * 256  # bfloat16
    logits_bytes = 4 * 8 * 4096  # one chunk of one sequence, float32
    gathered = plan.collectives.get("all-gather")
    assert gathered is None or gathered.largest_bytes < min(head_bytes, logits_bytes)
    assert "all-reduce" in plan.collectives
    parameters = 4 * sum(x.size for x in jax.tree.leaves(_drafter_shapes(target)))
    assert parameters / 2 < plan.parameter_bytes < parameters  # the norms are whole on every device
    assert plan.optimizer_bytes >= 2 * plan.parameter_bytes
    assert plan.flops > 2 * plan.tokens * 2 * 256 * 512 * 3 * 2  # the target's MLPs alone


def test_weights_travel_and_activations_stay_where_weights_are_cut(tpu_devices):
    data = dataclasses.replace(CONFIG.data, batch_size=16, max_length=512)
    mesh = make_mesh(fsdp=-1, devices=tpu_devices("v5e:2x2"))
    plan = plan_step(dataclasses.replace(CONFIG, data=data), decoder_config_from_hf(TARGET), mesh)

    head_bytes, activation_bytes = 2 * 4096 * 256, 2 * 16 * 512 * 256
    assert plan.collectives["all-gather"].largest_bytes <= head_bytes < activation_bytes
    gradients = 4 * sum(x.size for x in jax.tree.leaves(_drafter_shapes(decoder_config_from_hf(TARGET))))
    assert plan.collectives["all-reduce"].total_bytes < 2 * gradients


def test_slices_lie_along_the_data_axis(tpu_devices):
    devices = tpu_devices("v5e:2x2", slices=2)
    mesh = make_mesh(data=2, fsdp=2, tensor=2, devices=devices[::-1])
    assert [{d.slice_index for d in part.flat} for part in mesh.devices] == [{0}, {1}]

    data = dataclasses.replace(CONFIG.data, batch_size=8)
    plan = plan_step(dataclasses.replace(CONFIG, data=data), decoder_config_from_hf(TARGET), mesh)
    assert plan.fits and "all-reduce" in plan.collectives
    with pytest.raises(InputError, match="mesh data=1 over 2 slices"):
        make_mesh(fsdp=-1, devices=devices)


def _drafter_shapes(target):
    from dspark_jax.drafters.registry import make_drafter

    return jax.eval_shape(make_drafter(CONFIG.drafter.resolve(target)).init, jax.random.key(0))


def test_what_does_not_fit_is_said(tpu_devices):
    mesh = make_mesh(data=-1, devices=tpu_devices("v5e:2x2"))
    plan = plan_step(CONFIG, decoder_config_from_hf(TARGET | {"intermediate_size": 1 << 23}), mesh)
    assert not plan.fits and plan.total_bytes is None and "hbm" in plan.refusal.lower()


def test_the_command_prints_a_table_and_writes_it(tpu_devices, tmp_path, capsys, monkeypatch):
    tpu_devices("v5e:2x2")
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    monkeypatch.setattr(command.runpy, "run_path", lambda path: {"get_config": lambda target: CONFIG})
    config = command.Plan(
        recipe=Path("configs/tiny.py"),
        target="tiny",
        topology="v5e:2x2",
        target_config=tmp_path / "config.json",
        microbatches=4,
        search=True,
        json=tmp_path / "plan.json",
    )
    command.run(config)
    shown, written = capsys.readouterr().out, json.loads(config.json.read_text())
    assert written["fits"] and written["microbatches"] == 1
    assert "bound by" in shown and "tokens/s" in shown and f"{written['flops'] / 1e12:.1f} TFLOP" in shown


@pytest.mark.parametrize(
    ("given", "fitting", "found", "fits"),
    [(8, 2, 2, True), (1, 4, 4, True), (1, 128, 16, False), (1, 1, 1, True), (16, 0, 1, True)],
)
def test_the_search_goes_both_ways(given, fitting, found, fits):
    numbers = {field.name: 0 for field in dataclasses.fields(StepPlan)}

    def plan_of(config: TrainConfig) -> StepPlan:
        return StepPlan(**numbers | {"fits": config.microbatches >= fitting})

    data = dataclasses.replace(CONFIG.data, batch_size=16)
    config = dataclasses.replace(CONFIG, data=data, microbatches=given)
    config, plan = command.fewest_microbatches(config, plan_of(config), plan_of)
    assert (config.microbatches, plan.fits) == (found, fits)


def test_experts_are_divided_and_their_weights_do_not_travel(tpu_devices):
    fields = {
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    }
    target = decoder_config_from_hf(TARGET | fields)
    together, divided = (
        plan_step(CONFIG, target, make_mesh(**axes, devices=tpu_devices("v5e:2x2")))
        for axes in ({"data": 4}, {"expert": 4})
    )
    experts_bytes = 2 * 2 * 16 * 3 * 256 * 512  # two layers, bfloat16
    assert together.target_bytes - divided.target_bytes == experts_bytes * 3 // 4
    assert divided.collectives["all-gather"].largest_bytes < experts_bytes // 2 // 3 // 4


def test_unknown_devices_are_refused(tmp_path):
    with pytest.raises(InputError, match="v5e"):
        command.device_kind("h100:8")
    assert {"v5e", "v5p", "v6e", "tpu7x"} <= TPU_KINDS.keys()
    assert jnp.dtype(CONFIG.dtype) == jnp.bfloat16


@pytest.mark.parametrize(
    ("microbatches", "tensor", "fits", "hint"),
    [
        (64, 1, False, "raise --microbatches to 128: .* instead of 2 .* 4 parts"),
        (128, 1, False, "raise --mesh.tensor"),
        (256, 1, True, "2 sequences at once do not fill the 4 parts"),
        (256, 2, True, None),
    ],
)
def test_hints_follow_from_the_mesh(microbatches, tensor, fits, hint):
    config = dataclasses.replace(
        CONFIG,
        data=dataclasses.replace(CONFIG.data, batch_size=512),
        microbatches=microbatches,
        mesh=MeshConfig(data=1, fsdp=-1, tensor=tensor),
    )
    numbers = {field.name: 0 for field in dataclasses.fields(StepPlan)}
    plan = StepPlan(**numbers | {"fits": fits, "refusal": "", "collectives": {}})
    hints = command.advice(plan, config, 4)
    assert len(hints) == (hint is not None)
    assert hint is None or re.search(hint, hints[0])
