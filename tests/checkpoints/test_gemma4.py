"""Gemma 4 in files: names of tensors with and without other modalities; its drafters' config.json."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flax import traverse_util

from dspark_jax.checkpoints.drafter import load_drafter, save_drafter
from dspark_jax.checkpoints.hf_names import hf_tensor_map, text_tensors
from dspark_jax.core.errors import InputError
from dspark_jax.testing.tiny import TARGETS, TinyTarget, tiny_drafter, tiny_target


def gemma4(**fields) -> TinyTarget:
    return tiny_target(**{**TARGETS["gemma4"], **fields})


def test_names_of_every_tensor():
    names = set(hf_tensor_map(gemma4().config))

    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.layer_scalar"} <= names
    assert "lm_head.weight" not in names, "tied"
    assert "model.layers.0.self_attn.v_proj.weight" in names
    assert "model.layers.2.self_attn.v_proj.weight" not in names, "a global layer's values are its keys"
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        assert f"model.layers.1.{norm}_layernorm.weight" in names


def test_the_text_model_inside_a_multimodal_file():
    names = [
        "model.language_model.layers.0.layer_scalar",
        "model.language_model.norm.weight",
        "model.vision_tower.patch_embedder.input_proj.weight",
        "model.embed_audio.embedding_projection.weight",
        "lm_head.weight",
        "model.unheard_of.weight",
    ]

    assert text_tensors(names) == {
        "model.layers.0.layer_scalar": names[0],
        "model.norm.weight": names[1],
        "lm_head.weight": names[4],
        "model.unheard_of.weight": names[5],  # left for the check to refuse
    }
    alone = ["model.norm.weight", "model.vision_tower.weight"]
    assert list(text_tensors([*alone, "model.layers.0.self_attn.rotary_emb.inv_freq"])) == alone


PER_LAYER = {"global_head_dim": None, "per_layer_config": {"2": {"head_dim": 16, "num_key_value_heads": 1}}}


@pytest.mark.parametrize("fields", [{}, PER_LAYER, {"model_type": "gemma4_unified_text"}])
def test_a_drafter_comes_back(tmp_path, fields):
    """Its layers repeat the target's last one, however the target's config.json says what that is."""
    target = gemma4(**fields)
    tiny = tiny_drafter(target)
    save_drafter(
        tmp_path,
        drafter=tiny.drafter,
        params=tiny.params,
        draft_to_target_np=None,
        target_hf_config={"text_config": target.hf_config, "vision_config": {}, "image_token_id": 7},
        num_anchors=4,
        dtype=np.float32,
    )

    loaded = load_drafter(tmp_path)

    assert loaded.drafter.config == tiny.drafter.config
    assert loaded.drafter.config.block.head_dim == 16 and loaded.drafter.config.block.window is None
    ours, theirs = (traverse_util.flatten_dict(params) for params in (tiny.params, loaded.params))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(theirs[path], value)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["Gemma4DSparkModel"]
    assert (written["global_head_dim"], written["num_global_key_value_heads"]) == (16, 1)


def test_a_drafter_with_sliding_layers_is_refused(tmp_path):
    target = gemma4()
    tiny = tiny_drafter(target)
    save_drafter(
        tmp_path,
        drafter=tiny.drafter,
        params=tiny.params,
        draft_to_target_np=None,
        target_hf_config=target.hf_config,
        num_anchors=4,
    )
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "layer_types": ["sliding_attention", "full_attention"]}))

    with pytest.raises(InputError, match="layers that are not all alike"):
        load_drafter(tmp_path)
    with pytest.raises(InputError, match="layers with a window of 3"):
        tiny_drafter(target, block=target.config.layers[0])
