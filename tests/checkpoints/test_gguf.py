"""A GGUF file gives back the tensors, the config and the tokenizer that were written into it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from dspark_jax.checkpoints.gguf_file import GGUFFile, parse_header
from dspark_jax.checkpoints.targets import load_target
from dspark_jax.core.errors import InputError

LAYERS, WIDTH, MLP_WIDTH, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "a", "b", "1", "2", "Ġa", "ab", "ĠĠ", "Ċ"]
MERGES = ["Ġ a", "a b", "Ġ Ġ"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def interleaved(weight_np: np.ndarray, heads: int) -> np.ndarray:
    """Row order of q and k in a llama GGUF, written out row by row: halves of a head become pairs."""
    head_dim = len(weight_np) // heads
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight_np[order]


def hf_tensors(*, tied: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), WIDTH), "model.norm.weight": (WIDTH,)}
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), WIDTH)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (WIDTH,),
            prefix + "post_attention_layernorm.weight": (WIDTH,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, WIDTH),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            prefix + "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
            prefix + "mlp.gate_proj.weight": (MLP_WIDTH, WIDTH),
            prefix + "mlp.up_proj.weight": (MLP_WIDTH, WIDTH),
            prefix + "mlp.down_proj.weight": (WIDTH, MLP_WIDTH),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, tensors: dict[str, np.ndarray], *, architecture: str = "llama", extra=()) -> Path:
    """Writes tensors in HF layout the way llama.cpp's converter does: own names, interleaved q and k."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for key, value in extra:
        writer.add_string(key, value)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, weight_np in tensors.items():
        stored_np = weight_np
        if name.endswith("q_proj.weight"):
            stored_np = interleaved(weight_np, HEADS)
        elif name.endswith("k_proj.weight"):
            stored_np = interleaved(weight_np, KV_HEADS)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None
        if "mlp.up" in name:
            quantised_np = gguf.quants.quantize(stored_np, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(gguf_name, quantised_np, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        elif "mlp.gate" in name:
            writer.add_tensor(gguf_name, stored_np.astype(np.float16))
        else:
            writer.add_tensor(gguf_name, stored_np)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_stored(name: str, weight_np: np.ndarray) -> np.ndarray:
    if "mlp.up" in name:
        q4_1 = gguf.GGMLQuantizationType.Q4_1
        return gguf.quants.dequantize(gguf.quants.quantize(weight_np, q4_1), q4_1)
    return weight_np.astype(np.float16).astype(np.float32) if "mlp.gate" in name else weight_np


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_come_back_in_hf_layout(tmp_path, tied):
    tensors = hf_tensors(tied=tied)
    source = GGUFFile(write_gguf(tmp_path / "tiny.gguf", tensors))

    assert set(source.names()) == set(tensors)
    for name, weight_np in tensors.items():
        read_np = source.read(name)
        assert read_np.dtype == np.float32 and read_np.shape == source.shape(name) == weight_np.shape
        np.testing.assert_array_equal(read_np, as_stored(name, weight_np), err_msg=name)


def test_config(tmp_path):
    config = GGUFFile(write_gguf(tmp_path / "tiny.gguf", hf_tensors(tied=True))).config

    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100_000.0}
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["hidden_size"], config["intermediate_size"]) == (WIDTH, MLP_WIDTH)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (len(TOKENS), 128)
    assert config["tie_word_embeddings"] is True


def test_header_agrees_with_the_gguf_package(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", hf_tensors(tied=False))
    reader = gguf.GGUFReader(path)
    metadata, tensors = parse_header(memoryview(path.read_bytes()))

    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    for key in ("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"):
        assert np.float32(metadata.pop(key)) == np.float32(theirs.pop(key))
    assert metadata == theirs
    for tensor in reader.tensors:
        ours = tensors[tensor.name]
        assert (ours.start_bytes, ours.size_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.shape == tuple(reversed(tensor.shape.tolist())) and ours.type == tensor.tensor_type


def test_load_target(tmp_path):
    tensors = hf_tensors(tied=True)
    target = load_target(write_gguf(tmp_path / "tiny.gguf", tensors))

    q_np = np.asarray(target.params["layers_1"]["attention"]["q"]["kernel"])
    np.testing.assert_array_equal(q_np, tensors["model.layers.1.self_attn.q_proj.weight"].T)
    assert "lm_head" not in target.params
    assert target.eos_ids == (2,) and target.generation == {}
    assert target.tokenizer.eos_token == "<|im_end|>"


def test_identity_follows_the_weights(tmp_path):
    tensors = hf_tensors(tied=True)
    first = GGUFFile(write_gguf(tmp_path / "first.gguf", tensors)).identity()
    again = GGUFFile(write_gguf(tmp_path / "again.gguf", tensors)).identity()
    tensors["model.norm.weight"][0] += 1
    other = GGUFFile(write_gguf(tmp_path / "other.gguf", tensors)).identity()

    assert first == again != other


def test_tokenizer(tmp_path):
    tokenizer = GGUFFile(write_gguf(tmp_path / "tiny.gguf", hf_tensors(tied=True))).tokenizer()

    def pieces(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))

    assert pieces("ab a12") == ["ab", "Ġa", "1", "2"]
    # The single-digit split comes first, so the spaces before a digit stay together.
    assert pieces("a  1") == ["a", "ĠĠ", "1"]
    assert pieces("<|im_start|>a<|im_end|>") == ["<|im_start|>", "a", "<|im_end|>"]
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>ab<|im_end|>"
    assert tokenizer.decode([1, 4, 2], skip_special_tokens=True) == "a"


def test_other_architectures_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", hf_tensors(tied=True), architecture="gemma3")

    with pytest.raises(InputError, match="architecture 'gemma3'"):
        GGUFFile(path)


def test_rope_scaling_is_refused_by_name(tmp_path):
    extra = [("llama.rope.scaling.type", "yarn")]
    path = write_gguf(tmp_path / "tiny.gguf", hf_tensors(tied=True), extra=extra)

    with pytest.raises(InputError, match=r"llama\.rope\.scaling\.type = 'yarn'"):
        GGUFFile(path)


def test_other_tokenizers_are_refused(tmp_path):
    source = GGUFFile(write_gguf(tmp_path / "tiny.gguf", hf_tensors(tied=True)))
    source.metadata["tokenizer.ggml.pre"] = "llama-bpe"

    with pytest.raises(InputError, match="llama-bpe"):
        source.tokenizer()


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    content = write_gguf(tmp_path / "tiny.gguf", hf_tensors(tied=True)).read_bytes()
    for name, size in (("data.gguf", len(content) - 100), ("header.gguf", 500), ("magic.gguf", 3)):
        (tmp_path / name).write_bytes(content[:size])
        with pytest.raises(InputError, match="download"):
            GGUFFile(tmp_path / name)
    (tmp_path / "other.gguf").write_bytes(b"<html>" * 100)
    with pytest.raises(InputError, match="magic"):
        GGUFFile(tmp_path / "other.gguf")
