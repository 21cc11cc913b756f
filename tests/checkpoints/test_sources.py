"""Hugging Face directories: single and sharded files, dtypes, and refusals that name everything at once."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.checkpoints.targets import load_target, open_source, read_params
from dspark_jax.core.errors import InputError
from dspark_jax.core.sharding import make_mesh

VOCAB, WIDTH, MLP_WIDTH, HEAD_DIM = 16, 8, 12, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": MLP_WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
}
LAYER = "model.layers.0."


def tensors(dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
        LAYER + "input_layernorm.weight": (WIDTH,),
        LAYER + "post_attention_layernorm.weight": (WIDTH,),
        LAYER + "self_attn.q_proj.weight": (2 * HEAD_DIM, WIDTH),
        LAYER + "self_attn.k_proj.weight": (HEAD_DIM, WIDTH),
        LAYER + "self_attn.v_proj.weight": (HEAD_DIM, WIDTH),
        LAYER + "self_attn.o_proj.weight": (WIDTH, 2 * HEAD_DIM),
        LAYER + "mlp.gate_proj.weight": (MLP_WIDTH, WIDTH),
        LAYER + "mlp.up_proj.weight": (MLP_WIDTH, WIDTH),
        LAYER + "mlp.down_proj.weight": (WIDTH, MLP_WIDTH),
    }
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write_directory(folder: Path, weights: dict[str, np.ndarray], *, shards: int = 1, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(weights.items())[number::shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def edit_index(folder: Path, edit) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_come_back(tmp_path, shards, dtype):
    weights = tensors(dtype)
    source = SafetensorsDirectory(write_directory(tmp_path, weights, shards=shards))

    assert set(source.names()) == set(weights)
    for name, weight_np in weights.items():
        read_np = source.read(name)
        assert read_np.dtype == dtype and source.shape(name) == weight_np.shape
        np.testing.assert_array_equal(read_np, weight_np)


def test_identity_ignores_sharding_and_follows_weights_and_config(tmp_path):
    weights = tensors()
    identities = [
        SafetensorsDirectory(write_directory(tmp_path / "single", weights)).identity(),
        SafetensorsDirectory(write_directory(tmp_path / "sharded", weights, shards=3)).identity(),
        SafetensorsDirectory(write_directory(tmp_path / "config", weights, rms_norm_eps=1e-5)).identity(),
    ]
    weights["model.norm.weight"][0] += 1
    identities.append(SafetensorsDirectory(write_directory(tmp_path / "weights", weights)).identity())

    assert identities[0] == identities[1]
    assert len(set(identities)) == 3


def test_kernels_are_transposed_and_cast(tmp_path):
    weights = tensors(ml_dtypes.bfloat16)
    _, params = read_params(SafetensorsDirectory(write_directory(tmp_path, weights)))

    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    for path, name in {
        ("layers_0", "attention", "k"): LAYER + "self_attn.k_proj.weight",
        ("layers_0", "mlp", "down"): LAYER + "mlp.down_proj.weight",
        ("lm_head",): "lm_head.weight",
    }.items():
        node = params
        for key in path:
            node = node[key]
        np.testing.assert_array_equal(np.asarray(node["kernel"]), weights[name].astype(np.float32).T)


def test_parameters_go_to_their_sharding(tmp_path):
    source = SafetensorsDirectory(write_directory(tmp_path, tensors()))
    _, whole = read_params(source)
    _, sharded = read_params(source, mesh=make_mesh(data=2, fsdp=2, tensor=2))

    kernel = sharded["layers_0"]["mlp"]["gate"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (WIDTH // 2, MLP_WIDTH // 2)
    jax.tree.map(np.testing.assert_array_equal, whole, sharded)


def test_all_wrong_tensors_are_named_at_once(tmp_path):
    weights = tensors()
    del weights["model.norm.weight"]
    weights["extra.weight"] = np.zeros((2, 3), np.float32)
    weights[LAYER + "mlp.up_proj.weight"] = np.zeros((WIDTH, MLP_WIDTH), np.float32)

    with pytest.raises(InputError) as caught:
        read_params(SafetensorsDirectory(write_directory(tmp_path, weights)))

    assert caught.value.given.split("; ") == [
        "unknown tensor extra.weight [2, 3]",
        "missing tensor model.norm.weight [8]",
        "model.layers.0.mlp.up_proj.weight has shape [8, 12] instead of [12, 8]",
    ]


def test_known_buffers_are_ignored(tmp_path):
    weights = tensors() | {LAYER + "self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}

    read_params(SafetensorsDirectory(write_directory(tmp_path, weights)))


def test_the_lm_head_of_a_tied_config_must_equal_the_embedding(tmp_path):
    weights = tensors()
    with pytest.raises(InputError, match="tied"):
        read_params(SafetensorsDirectory(write_directory(tmp_path, weights, tie_word_embeddings=True)))

    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    _, params = read_params(
        SafetensorsDirectory(write_directory(tmp_path, weights, tie_word_embeddings=True))
    )
    assert "lm_head" not in params


def test_missing_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"lacks config\.json"):
        SafetensorsDirectory(tmp_path)
    write_directory(tmp_path, tensors(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match="lacks model-00002-of-00003"):
        SafetensorsDirectory(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    write_directory(tmp_path, tensors(), shards=2)
    file = "model-00001-of-00002.safetensors"

    def edit(weight_map):
        del weight_map["lm_head.weight"]
        weight_map["ghost.weight"] = file

    edit_index(tmp_path, edit)
    with pytest.raises(InputError) as caught:
        SafetensorsDirectory(tmp_path)
    assert f"ghost.weight is indexed in {file} but not there" in caught.value.given
    assert f"lm_head.weight of {file} is not in the index" in caught.value.given


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"", bytes(64)])
def test_what_is_not_safetensors_is_refused(tmp_path, content):
    write_directory(tmp_path, tensors())
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(InputError, match="download the file again"):
        SafetensorsDirectory(tmp_path)


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    file = write_directory(tmp_path, tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(InputError, match="cut off"):
        SafetensorsDirectory(tmp_path)


def test_a_file_is_not_a_directory(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")

    with pytest.raises(InputError, match="is not a directory"):
        open_source(tmp_path / "weights.bin")


def test_a_directory_without_tokenizer_says_so(tmp_path):
    write_directory(tmp_path, tensors())

    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        load_target(tmp_path)


def test_tokenizer_eos_and_generation_defaults(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "<end>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", chat_template="{{ messages[0]['content'] }}"
    ).save_pretrained(tmp_path)
    write_directory(tmp_path, tensors())

    target = load_target(str(tmp_path))
    assert target.eos_ids == (3,) and target.generation == {}  # from config.json
    assert target.tokenizer.encode("a") == [1]
    assert target.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"

    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "temperature": 0.7}))
    target = load_target(tmp_path)
    assert target.eos_ids == (2, 3) and target.generation["temperature"] == 0.7


def test_a_hub_id_is_fetched(tmp_path, monkeypatch):
    write_directory(tmp_path, tensors())
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path)
    )

    assert SafetensorsDirectory("owner/model").config == CONFIG
    assert asked == ["owner/model"]


def test_offline_hub_ids_and_misspelt_paths_say_what_to_do():
    for name in ("owner/model-that-is-not-cached", "not/a/path/at/all"):
        with pytest.raises(InputError, match="offline, download the model elsewhere") as caught:
            SafetensorsDirectory(name)
        assert name in caught.value.given
