"""Drafter directories from format to format: the same bits, DeepSpec's names and shapes, refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints.convert import Format, TargetTensors, convert
from dspark_jax.checkpoints.drafter import load_drafter, save_drafter
from dspark_jax.checkpoints.hf_names import hf_tensor_map
from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.core.errors import InputError
from dspark_jax.drafters.config import Gated, Layout
from dspark_jax.testing.tiny import DRAFTERS, TARGETS, TinyTarget, tiny_drafter, tiny_target

V, D, F, R, TAPS = 41, 16, 24, 4, 3
QWEN3_GATED = {
    "embed_tokens.weight": (V, D),
    "lm_head.weight": (V, D),
    "fc.weight": (D, TAPS * D),
    "hidden_norm.weight": (D,),
    "norm.weight": (D,),
    "markov_head.markov_w1.weight": (V, R),
    "markov_head.markov_w2.weight": (V, R),
    "markov_head.gate_proj.weight": (R, D + R),
    "markov_head.gate_proj.bias": (R,),
    "confidence_head.proj.weight": (1, D + R),
    "confidence_head.proj.bias": (1,),
    **{
        f"layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "self_attn.q_proj": (32, D),
            "self_attn.k_proj": (16, D),
            "self_attn.v_proj": (16, D),
            "self_attn.o_proj": (D, 32),
            "self_attn.q_norm": (8,),
            "self_attn.k_norm": (8,),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
        }.items()
    },
}
"""What spec section 9 lists for a gated drafter of two Qwen3 layers."""


@functools.cache
def target_of(name: str) -> TinyTarget:
    return tiny_target(**TARGETS[name], architectures=["TinyForCausalLM"])


@dataclasses.dataclass(frozen=True)
class Files:
    """Where one test keeps its directories."""

    root: Path

    def target(self, name: str = "qwen3", dtype=np.float32) -> TargetTensors:
        """A tiny target on disk."""
        tiny, directory = target_of(name), self.root / f"target-{name}"
        directory.mkdir(exist_ok=True)
        flat = traverse_util.flatten_dict(tiny.params)
        tensors = {}
        for tensor, slot in hf_tensor_map(tiny.config).items():
            array_np = np.asarray(flat[slot.path]).astype(dtype)
            tensors[tensor] = np.ascontiguousarray(array_np.T if slot.transpose else array_np)
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(tiny.hf_config))
        return TargetTensors(SafetensorsDirectory(directory), str(directory))

    def ours(self, name: str = "qwen3", *, dtype=np.float32, vocabulary_np=None, **fields: Any) -> Path:
        """A drafter as we save it."""
        tiny = tiny_drafter(target_of(name), draft_to_target_np=vocabulary_np, **fields)
        save_drafter(
            self.root / "ours",
            drafter=tiny.drafter,
            params=tiny.params,
            draft_to_target_np=vocabulary_np,
            target_hf_config=target_of(name).hf_config,
            num_anchors=64,
            dtype=dtype,
        )
        return self.root / "ours"

    def convert(self, source: Path, output: str, to: Format, **options: Any) -> Path:
        """Converts into a directory of that name."""
        options.setdefault("target", self.target())
        convert(SafetensorsDirectory(source), self.root / output, to=to, **options)
        return self.root / output


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)


def header(path: Path) -> dict[str, Any]:
    """The directory of a safetensors file, read by hand."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + length])
    entries.pop("__metadata__", None)
    end = max(entry["data_offsets"][1] for entry in entries.values())
    assert len(content) == 8 + length + end
    return entries


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "F32"), (jnp.bfloat16, "BF16")])
def test_an_export_has_deepspecs_names_shapes_and_bits(files, dtype, name):
    ours = files.ours(head=Gated(rank=R), dtype=dtype)

    exported = files.convert(ours, "exported", Format.DEEPSPEC)

    entries = header(exported / "model.safetensors")
    assert {tensor: tuple(entry["shape"]) for tensor, entry in entries.items()} == QWEN3_GATED
    assert {entry["dtype"] for entry in entries.values()} == {name}
    stored = load_file(ours / "model.safetensors")
    with safe_open(exported / "model.safetensors", framework="numpy") as file:
        assert all(file.get_tensor(tensor).tobytes() == array.tobytes() for tensor, array in stored.items())
        embedding = np.asarray(target_of("qwen3").params["embedding"]).astype(dtype)
        assert file.get_tensor("embed_tokens.weight").tobytes() == embedding.tobytes()
    assert config_of(exported)["architectures"] == ["Qwen3DSparkModel"]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["markov", "rnn", "plain-confidence", "dflash", "eagle3"])
def test_deepspec_to_ours_and_back_is_the_same_file(files, name, dtype):
    released = files.convert(files.ours(**DRAFTERS[name], dtype=dtype), "released", Format.DEEPSPEC)
    fields = config_of(released) | {"transformers_version": "5.10.2", "attention_dropout": 0.0}
    fields.pop("sample_from_anchor", None)
    (released / "config.json").write_text(json.dumps(fields))

    imported = files.convert(released, "imported", Format.DSPARK_JAX)
    again = files.convert(imported, "again", Format.DEEPSPEC)

    names = set(header(imported / "model.safetensors"))
    assert not names & {"embed_tokens.weight", "lm_head.weight"}
    assert (again / "model.safetensors").read_bytes() == (released / "model.safetensors").read_bytes()
    named = {} if name == "eagle3" else {"sample_from_anchor": True}
    assert config_of(imported) == config_of(again) == fields | named


def test_tensors_of_its_own_are_found_by_comparing(files):
    released = files.convert(files.ours(), "released", Format.DEEPSPEC)
    tensors = load_file(released / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].copy()
    tensors["lm_head.weight"][3, 5] = np.nextafter(tensors["lm_head.weight"][3, 5], np.float32(9))
    save_file(tensors, released / "model.safetensors")

    imported = files.convert(released, "imported", Format.DSPARK_JAX)

    stored = load_file(imported / "model.safetensors")
    assert "embed_tokens.weight" not in stored
    np.testing.assert_array_equal(stored["lm_head.weight"], tensors["lm_head.weight"])
    again = files.convert(imported, "again", Format.DEEPSPEC)
    assert (
        load_file(again / "model.safetensors")["lm_head.weight"].tobytes()
        == tensors["lm_head.weight"].tobytes()
    )
    with pytest.raises(InputError, match=r"own lm_head\.weight"):
        files.convert(imported, "speculators", Format.SPECULATORS)


def test_a_copy_that_was_rounded_is_a_copy(files):
    released = files.convert(files.ours(dtype=jnp.bfloat16), "released", Format.DEEPSPEC)

    imported = files.convert(released, "imported", Format.DSPARK_JAX, target=files.target(dtype=np.float32))

    assert "embed_tokens.weight" not in load_file(imported / "model.safetensors")


def test_shards_are_read_and_written(files):
    whole = files.convert(files.ours(), "whole", Format.DEEPSPEC)

    shards = files.convert(whole, "shards", Format.DEEPSPEC, max_shard_bytes=6000)
    joined = files.convert(shards, "joined", Format.DEEPSPEC)

    assert len(list(shards.glob("model-*-of-*.safetensors"))) > 2
    assert not (shards / "model.safetensors").exists()
    assert (joined / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_another_dtype_is_rounded_once(files):
    ours = files.ours()

    rounded = files.convert(ours, "rounded", Format.DSPARK_JAX, dtype="bfloat16")

    stored, expected = (load_file(path / "model.safetensors") for path in (rounded, ours))
    assert all(
        array.tobytes() == expected[name].astype(jnp.bfloat16).tobytes() for name, array in stored.items()
    )
    assert config_of(rounded)["dtype"] == "bfloat16"


def test_the_layout_is_named_or_said_and_never_contradicted(files):
    fill_in = files.ours(layout=Layout.FILL_IN)
    assert config_of(files.convert(fill_in, "named", Format.DSPARK_JAX))["sample_from_anchor"] is False
    with pytest.raises(InputError, match="--layout anchor-first"):
        files.convert(fill_in, "contradicted", Format.DSPARK_JAX, layout=Layout.ANCHOR_FIRST)

    fields = config_of(fill_in)
    del fields["sample_from_anchor"]
    (fill_in / "config.json").write_text(json.dumps(fields))
    said = files.convert(fill_in, "said", Format.DSPARK_JAX, layout=Layout.FILL_IN)
    assert load_drafter(said).drafter.config.layout is Layout.FILL_IN


def test_what_deepspec_cannot_hold_is_refused_all_at_once(files):
    vocabulary_np = np.array([7, 2, 30, 11], np.int32)
    ours = files.ours("llama-gqa-tied", vocabulary_np=vocabulary_np, layout=Layout.FILL_IN)

    with pytest.raises(InputError) as caught:
        files.convert(ours, "exported", Format.DEEPSPEC, target=files.target("llama-gqa-tied"))

    for problem in ("family llama", "reduced draft vocabulary", "fill-in layout"):
        assert problem in caught.value.given
    assert not (files.root / "exported").exists()


def test_another_target_is_refused(files):
    ours = files.ours()
    (files.root / "small").mkdir()
    small = Files(files.root / "small")
    tiny = tiny_target(**TARGETS["qwen3"], num_hidden_layers=2, vocab_size=50)
    directory = small.root / "target"
    directory.mkdir()
    save_file({"x": np.zeros(1, np.float32)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(tiny.hf_config))

    with pytest.raises(InputError) as caught:
        files.convert(
            ours,
            "converted",
            Format.DSPARK_JAX,
            target=TargetTensors(SafetensorsDirectory(directory), "small"),
        )

    for problem in ("vocabulary 41 instead of 50", "num_target_layers 3 instead of 2", "target_layer_ids"):
        assert problem in caught.value.given


def test_an_output_with_something_in_it_is_left_alone(files):
    ours = files.ours()

    with pytest.raises(InputError, match="not empty"):
        files.convert(ours, "ours", Format.DSPARK_JAX)


def test_speculators_layout(files):
    exported = files.convert(
        files.ours(taps=(-1, 0, 1), head=Gated(rank=R)), "speculators", Format.SPECULATORS
    )

    written = config_of(exported)
    assert written["architectures"] == ["DSparkDraftModel"]
    assert written["speculators_model_type"] == "dspark"
    assert written["aux_hidden_state_layer_ids"] == [0, 1, 2], "0 is the embedding"
    assert (written["block_size"], written["sample_from_anchor"]) == (3, True)
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert written["speculators_config"]["verifier"]["architectures"] == ["TinyForCausalLM"]
    assert (written["markov_rank"], written["markov_head_type"]) == (R, "gated")
    layers = written["transformer_layer_config"]
    assert (layers["model_type"], layers["num_hidden_layers"]) == ("qwen3", 2)
    assert not {"block_size", "target_layer_ids", "markov_rank", "architectures"} & layers.keys()
    verifiers = {"embed_tokens.weight", "lm_head.weight"}
    assert set(header(exported / "model.safetensors")) == set(QWEN3_GATED) - verifiers


def test_speculators_vocabulary_is_in_the_order_of_target_ids(files):
    vocabulary_np = np.array([7, 2, 30, 11], np.int32)
    ours = files.ours(vocabulary_np=vocabulary_np, taps=(0, 1))

    exported = files.convert(ours, "speculators", Format.SPECULATORS)

    theirs, stored = (load_file(path / "model.safetensors") for path in (exported, ours))
    assert "draft_to_target" not in theirs
    assert (theirs["d2t"] + np.arange(4)).tolist() == [2, 7, 11, 30]
    assert np.flatnonzero(theirs["t2d"]).tolist() == [2, 7, 11, 30]
    head_DV = np.asarray(target_of("qwen3").params["lm_head"]["kernel"])
    np.testing.assert_array_equal(theirs["lm_head.weight"], head_DV[:, [2, 7, 11, 30]].T)
    w2 = "markov_head.markov_w2.weight"
    np.testing.assert_array_equal(theirs[w2], stored[w2][[1, 0, 3, 2]])


def test_what_speculators_cannot_hold_is_refused(files):
    with pytest.raises(InputError, match="last layer"):
        files.convert(files.ours(), "tap", Format.SPECULATORS)
    ours = files.ours("llama-gqa-tied")
    with pytest.raises(InputError, match="family llama"):
        files.convert(ours, "family", Format.SPECULATORS, target=files.target("llama-gqa-tied"))


def test_a_converted_drafter_drafts_as_before(files):
    ours = files.ours(**DRAFTERS["rnn"])

    imported = files.convert(files.convert(ours, "there", Format.DEEPSPEC), "back", Format.DSPARK_JAX)

    before, after = load_drafter(ours), load_drafter(imported)
    assert before.drafter == after.drafter
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before.params, after.params)))
