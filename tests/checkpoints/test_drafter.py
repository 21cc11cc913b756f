"""Drafter directories: bit-exact round trips in DeepSpec's names, shapes and fields; refusals."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints.drafter import load_drafter, save_drafter
from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.checkpoints.tap_sketches import SKETCH_SIZE
from dspark_jax.core.errors import InputError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.drafters.config import Layout
from dspark_jax.nn.config import TokenScaling
from dspark_jax.testing.tiny import DRAFTERS, TARGETS, TinyDrafter, TinyTarget, tiny_drafter, tiny_target

D, F, V, R, TAPS = 16, 24, 41, 4, 3
LAYER_SHAPES = {
    "self_attn.q_proj.weight": (32, D),
    "self_attn.k_proj.weight": (16, D),
    "self_attn.v_proj.weight": (16, D),
    "self_attn.o_proj.weight": (D, 32),
    "mlp.gate_proj.weight": (F, D),
    "mlp.up_proj.weight": (F, D),
    "mlp.down_proj.weight": (D, F),
    "input_layernorm.weight": (D,),
    "post_attention_layernorm.weight": (D,),
}
BACKBONE_SHAPES = {
    "fc.weight": (D, TAPS * D),
    "hidden_norm.weight": (D,),
    "norm.weight": (D,),
    **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()},
}
MARKOV_SHAPES = {"markov_head.markov_w1.weight": (V, R), "markov_head.markov_w2.weight": (V, R)}
CONFIDENCE_SHAPES = {"confidence_head.proj.weight": (1, D + R), "confidence_head.proj.bias": (1,)}
SHAPES = {
    "markov": MARKOV_SHAPES | CONFIDENCE_SHAPES,
    "gated": MARKOV_SHAPES
    | CONFIDENCE_SHAPES
    | {"markov_head.gate_proj.weight": (R, D + R), "markov_head.gate_proj.bias": (R,)},
    "rnn": MARKOV_SHAPES
    | CONFIDENCE_SHAPES
    | {"markov_head.joint_proj.weight": (3 * R, 2 * R + D), "markov_head.joint_proj.bias": (3 * R,)},
    "plain-confidence": MARKOV_SHAPES | CONFIDENCE_SHAPES | {"confidence_head.proj.weight": (1, D)},
    "dflash": {},
    "fill-in": MARKOV_SHAPES | CONFIDENCE_SHAPES,
}
EAGLE3_SHAPES = {
    "fc.weight": (D, TAPS * D),
    "norm.weight": (D,),
    "layers.0.hidden_norm.weight": (D,),
    **{f"layers.0.{name}": shape for name, shape in LAYER_SHAPES.items()},
    **{
        f"layers.0.self_attn.{name}_proj.weight": (rows, 2 * D)
        for name, rows in (("q", 32), ("k", 16), ("v", 16))
    },
}


@functools.cache
def target_of(name: str = "llama-gqa-tied") -> TinyTarget:
    return tiny_target(**TARGETS[name], pad_token_id=0, layer_types=["full_attention"] * 3)


def save(
    directory: Path, tiny: TinyDrafter, *, target: TinyTarget | None = None, dtype=jnp.float32, **options
):
    draft_to_target_V = tiny.shared.draft_to_target_V
    save_drafter(
        directory,
        drafter=tiny.drafter,
        params=tiny.params,
        draft_to_target_np=None if draft_to_target_V is None else np.asarray(draft_to_target_V),
        target_hf_config=(target or target_of()).hf_config,
        num_anchors=64,
        dtype=dtype,
        **options,
    )


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def rewrite(directory: Path, *, fields: dict | None = None, tensors: dict | None = None):
    """Changes a saved directory; None removes."""
    config = config_of(directory) | (fields or {})
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    stored = load_file(directory / "model.safetensors") | (tensors or {})
    save_file({k: v for k, v in stored.items() if v is not None}, directory / "model.safetensors")


def test_the_template_of_the_training_data_stays_with_the_drafter(tmp_path):
    tiny = tiny_drafter(target_of())
    for template in (None, "chat(enable_thinking=False)"):
        save(tmp_path, tiny, template=template)
        assert load_drafter(tmp_path).template == template


def test_sketches_of_the_taps_stay_with_the_drafter(tmp_path):
    tiny = tiny_drafter(target_of())
    save(tmp_path, tiny)
    assert load_drafter(tmp_path).tap_sketches_CS is None
    identity = SafetensorsDirectory(tmp_path).identity()
    sketches_CS = np.linspace(-1, 1, TAPS * SKETCH_SIZE).round(2).reshape(TAPS, -1)
    save(tmp_path, tiny, tap_sketches_CS=sketches_CS)
    np.testing.assert_array_equal(load_drafter(tmp_path).tap_sketches_CS, sketches_CS)
    assert SafetensorsDirectory(tmp_path).identity() == identity, (
        "calibrations of the same weights stay valid"
    )
    for wrong in ([], sketches_CS[1:].tolist(), sketches_CS[:, 1:].tolist(), [["0"] * SKETCH_SIZE] * TAPS, 5):
        rewrite(tmp_path, fields={"tap_sketches": wrong})
        with pytest.raises(InputError, match=f"not {SKETCH_SIZE} numbers for each of {TAPS} taps"):
            load_drafter(tmp_path)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_trip_is_bit_exact(name, dtype, tmp_path):
    tiny = tiny_drafter(target_of(), **DRAFTERS[name])
    save(tmp_path, tiny, dtype=dtype)

    loaded = load_drafter(tmp_path)

    assert loaded.drafter == tiny.drafter
    assert (loaded.draft_to_target_np, loaded.embedding_VD, loaded.head_DV) == (None, None, None)
    saved, read = (traverse_util.flatten_dict(params) for params in (tiny.params, loaded.params))
    assert saved.keys() == read.keys()
    for path, array in saved.items():
        assert read[path].dtype == jnp.float32
        np.testing.assert_array_equal(read[path], np.asarray(array.astype(dtype), np.float32))


def test_names_and_shapes_of_eagle3_are_deepspecs(tmp_path):
    save(tmp_path, tiny_drafter(target_of(), **DRAFTERS["eagle3"]))

    tensors = load_file(tmp_path / "model.safetensors")

    assert {key: x.shape for key, x in tensors.items()} == EAGLE3_SHAPES
    assert config_of(tmp_path)["architectures"] == ["LlamaEagle3Model"]
    assert config_of(tmp_path)["ttt_length"] == 3


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_shapes_are_deepspecs(name, tmp_path):
    tiny = tiny_drafter(target_of(), **DRAFTERS[name])
    save(tmp_path, tiny)

    tensors = load_file(tmp_path / "model.safetensors")

    assert {key: x.shape for key, x in tensors.items()} == BACKBONE_SHAPES | SHAPES[name]
    backbone = tiny.params["backbone"]
    np.testing.assert_array_equal(tensors["fc.weight"].T, backbone["fc"]["kernel"])
    down = backbone["layers_1"]["mlp"]["down"]["kernel"]
    np.testing.assert_array_equal(tensors["layers.1.mlp.down_proj.weight"].T, down)
    if "head" in tiny.params:
        np.testing.assert_array_equal(tensors["markov_head.markov_w1.weight"], tiny.params["head"]["w1"])
        np.testing.assert_array_equal(tensors["markov_head.markov_w2.weight"].T, tiny.params["head"]["w2"])


def test_head_norms_and_biases_have_names(tmp_path):
    for name, expected in (("qwen3", "q_norm.weight"), ("llama-mqa-biased", "q_proj.bias")):
        tiny = tiny_drafter(target_of(name))
        save(tmp_path / name, tiny, target=target_of(name))

        assert f"layers.0.self_attn.{expected}" in load_file(tmp_path / name / "model.safetensors")
        assert load_drafter(tmp_path / name).drafter == tiny.drafter


def test_on_a_mesh_every_parameter_lies_where_serving_wants_it(tmp_path):
    target = target_of()
    save(tmp_path, tiny_drafter(target, **DRAFTERS["markov"]), target=target)

    alone, divided = load_drafter(tmp_path), load_drafter(tmp_path, mesh=make_mesh(tensor=2, fsdp=4))

    jax.tree.map(np.testing.assert_array_equal, alone.params, divided.params)
    kernel, w1 = (divided.params[a][b] for a, b in (("backbone", "fc"), ("head", "w1")))
    assert w1.is_fully_replicated
    assert kernel["kernel"].addressable_shards[0].data.size == kernel["kernel"].size // 4


def test_layers_on_a_target_with_experts_are_dense(tmp_path):
    target = tiny_target(**TARGETS["qwen3-moe"], pad_token_id=0)
    drafter = tiny_drafter(target)
    save(tmp_path, drafter, target=target)

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["model_type"] == "qwen3"
    assert not [name for name in config if "expert" in name or "moe" in name]
    loaded = load_drafter(tmp_path)
    assert loaded.drafter.config == drafter.drafter.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, drafter.params)


def test_config_fields(tmp_path):
    save(tmp_path, tiny_drafter(target_of(), **DRAFTERS["rnn"]), dtype=jnp.bfloat16)

    assert config_of(tmp_path) == {
        **target_of().hf_config,
        "architectures": ["LlamaDSparkModel"],
        "dtype": "bfloat16",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
        "block_size": 3,
        "sample_from_anchor": True,
        "mask_token_id": 40,
        "target_layer_ids": [-1, 0, 2],
        "num_target_layers": 3,
        "num_anchors": 64,
        "markov_rank": 4,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def test_the_reduced_vocabulary_is_kept(tmp_path):
    vocabulary_np = np.array([9, 4, 30, 7], np.int64)
    save(tmp_path, tiny_drafter(target_of(), draft_to_target_np=vocabulary_np), dtype=jnp.bfloat16)

    loaded = load_drafter(tmp_path)

    assert config_of(tmp_path)["draft_vocab_size"] == 4
    assert loaded.draft_to_target_np is not None and loaded.draft_to_target_np.dtype == np.int32
    np.testing.assert_array_equal(loaded.draft_to_target_np, vocabulary_np)
    embedding_VD = jnp.arange(V * D, dtype=jnp.float32).reshape(V, D)
    shared = loaded.shared_weights(embedding_VD, embedding_VD.T, TokenScaling())
    np.testing.assert_array_equal(shared.head_DV, embedding_VD[vocabulary_np].T)
    assert shared.target_ids(jnp.array([2])).tolist() == [30]


def test_an_embedding_and_lm_head_of_its_own_win_over_the_targets(tmp_path):
    save(tmp_path, tiny_drafter(target_of()))
    own_VD = np.arange(V * D, dtype=np.float32).reshape(V, D)
    rewrite(tmp_path, tensors={"embed_tokens.weight": own_VD, "lm_head.weight": -own_VD})

    shared = load_drafter(tmp_path).shared_weights(jnp.zeros((V, D)), jnp.zeros((D, V)), TokenScaling())

    np.testing.assert_array_equal(shared.embedding_VD, own_VD)
    np.testing.assert_array_equal(shared.head_DV, -own_VD.T)


def test_the_layout_is_named(tmp_path):
    for layout, rows in ((Layout.ANCHOR_FIRST, 3), (Layout.FILL_IN, 4)):
        tiny = tiny_drafter(target_of(), layout=layout)
        save(tmp_path, tiny)

        written = config_of(tmp_path)
        assert (written["block_size"], written["sample_from_anchor"]) == (rows, rows == 3)
        assert load_drafter(tmp_path).drafter == tiny.drafter


def test_deepspecs_own_classes_are_anchor_first(tmp_path):
    save(tmp_path, tiny_drafter(target_of()))
    rewrite(tmp_path, fields={"sample_from_anchor": None})

    assert load_drafter(tmp_path).drafter.config.layout is Layout.ANCHOR_FIRST


def test_the_original_dflash_is_fill_in(tmp_path):
    tiny = tiny_drafter(target_of(), head=None, confidence=None, layout=Layout.FILL_IN)
    save(tmp_path, tiny)
    theirs = ("mask_token_id", "target_layer_ids", "sample_from_anchor", "markov_rank", "markov_head_type")
    theirs += ("enable_confidence_head", "confidence_head_with_markov", "num_anchors")
    nested = {name: config_of(tmp_path)[name] for name in theirs[:2]}
    rewrite(
        tmp_path,
        fields=dict.fromkeys(theirs)
        | {"dflash_config": nested, "architectures": ["DFlashDraftModel"], "auto_map": {}},
    )

    assert load_drafter(tmp_path).drafter == tiny.drafter


def test_large_weights_are_written_in_shards(tmp_path):
    tiny = tiny_drafter(target_of())
    save(tmp_path, tiny)
    whole = load_file(tmp_path / "model.safetensors")

    save(tmp_path, tiny, max_shard_bytes=4000)

    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    assert index["weight_map"].keys() == whole.keys()
    read = {name: array for shard in shards for name, array in load_file(tmp_path / shard).items()}
    assert read.keys() == whole.keys()
    assert all(read[name].tobytes() == array.tobytes() for name, array in whole.items())
    same = jax.tree.map(np.array_equal, load_drafter(tmp_path).params, tiny.params)
    assert all(jax.tree.leaves(same))

    save(tmp_path, tiny)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_all_tensor_problems_are_in_one_error(tmp_path):
    save(tmp_path, tiny_drafter(target_of(), draft_to_target_np=np.arange(4)))
    rewrite(
        tmp_path,
        tensors={
            "fc.weight": np.zeros((D, D), np.float32),
            "norm.weight": None,
            "extra.weight": np.zeros(1, np.float32),
            "draft_to_target": np.array([1, 2, 2, V], np.int32),
        },
    )

    with pytest.raises(InputError) as caught:
        load_drafter(tmp_path)

    for problem in (
        "unknown tensor extra.weight",
        "missing tensor norm.weight",
        "fc.weight of shape (16, 16) instead of (16, 48)",
        "draft_to_target with repeated ids or ids outside 0..40",
    ):
        assert problem in caught.value.given


def test_a_reduced_vocabulary_without_its_map_is_refused(tmp_path):
    save(tmp_path, tiny_drafter(target_of(), draft_to_target_np=np.arange(4)))
    rewrite(tmp_path, tensors={"draft_to_target": None})

    with pytest.raises(InputError, match="draft_vocab_size without draft_to_target"):
        load_drafter(tmp_path)


def test_all_config_problems_are_in_one_error(tmp_path):
    save(tmp_path, tiny_drafter(target_of()))
    rewrite(
        tmp_path,
        fields={
            "target_layer_ids": None,
            "sliding_window": 7,
            "speed": 9,
            "mask_token_id": 0,
        },
    )

    with pytest.raises(InputError) as caught:
        load_drafter(tmp_path)

    for problem in (
        "no field 'target_layer_ids'",
        "sliding_window=7",
        "unknown field 'speed'",
        "mask_token_id 0, the padding id",
    ):
        assert problem in caught.value.given


def test_unknown_fields_do_not_hide_what_else_is_wrong(tmp_path):
    save(tmp_path, tiny_drafter(target_of()))
    rewrite(
        tmp_path,
        fields={"speed": 9, "target_layer_ids": [0, 7]},
        tensors={"extra.weight": np.zeros(1, np.float32)},
    )

    with pytest.raises(InputError) as caught:
        load_drafter(tmp_path)

    for problem in (
        "unknown field 'speed'",
        "unknown tensor extra.weight",
        "[0, 7] of a target with 3 layers",
    ):
        assert problem in caught.value.given


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"markov_head_type": "attention"}, "markov_head_type 'attention'"),
        ({"block_size": None}, "no field 'block_size'"),
        ({"sample_from_anchor": "diagonal"}, "names no layout"),
        ({"architectures": ["Qwen3DSparkModel"]}, "with model_type 'llama'"),
        ({"dflash_config": {"causal": True}}, "dflash_config with 'causal'"),
    ],
)
def test_fields_with_other_values_are_refused(fields, problem, tmp_path):
    save(tmp_path, tiny_drafter(target_of()))
    rewrite(tmp_path, fields=fields)

    with pytest.raises(InputError) as caught:
        load_drafter(tmp_path)

    assert problem in caught.value.given


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["LlamaMedusaModel"]},
        {"architectures": None},
    ],
)
def test_what_is_not_a_drafter_is_refused(fields, tmp_path):
    save(tmp_path, tiny_drafter(target_of()))
    rewrite(tmp_path, fields=fields)

    with pytest.raises(InputError, match="a drafter: one of"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(("mask_token", "problem"), [(-1, "mask_token=-1"), (V, f"mask_token={V}")])
def test_mask_tokens_outside_the_vocabulary_are_refused(mask_token, problem, tmp_path):
    save(tmp_path, tiny_drafter(target_of()))
    rewrite(tmp_path, fields={"mask_token_id": mask_token})

    with pytest.raises(InputError, match=problem):
        load_drafter(tmp_path)


def test_padding_as_mask_token_is_not_even_saved(tmp_path):
    with pytest.raises(InputError, match="the padding id"):
        save(tmp_path, tiny_drafter(target_of(), mask_token=0))

    assert list(tmp_path.iterdir()) == []
