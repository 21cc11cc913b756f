"""Llama checkpoints in GGUF files, seen as Hugging Face tensors and configs.

The header is parsed here rather than by `gguf.GGUFReader`: that class keeps a memory-mapped array for every
string, which takes four seconds for a vocabulary of 49,152 tokens and their merges. Constants and
dequantisation are the `gguf` package's.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from dspark_jax.checkpoints.gguf_tokenizer import tokenizer_from_metadata
from dspark_jax.checkpoints.sources import HEAD_BYTES, fingerprint
from dspark_jax.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}

# Every `llama.*` key whose meaning is carried into the config; any other key is refused.
_KNOWN_KEYS = frozenset(
    (
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.vocab_size",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.attention.layer_norm_rms_epsilon",
        "llama.rope.freq_base",
        "llama.rope.dimension_count",
    )
)

_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies in the file: shape in numpy order, quantisation, byte range."""

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    start_bytes: int
    size_bytes: int


class GGUFFile:
    """A llama-architecture GGUF file as a `TensorSource`; tensors are dequantised to float32 one by one."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(given=f"{path} is not a file", expected="a .gguf file", fix="check the path")
        self._bytes = np.memmap(self.path, mode="r")
        try:
            self.metadata, stored = parse_header(self._bytes.data)
        except (struct.error, ValueError, UnicodeDecodeError) as error:
            raise InputError(
                given=f"{path}: {error}",
                expected="a complete little-endian GGUF file of version 2 or 3",
                fix="download the file again, or convert the model with a current llama.cpp",
            ) from error
        self.config = config_from_metadata(self.metadata, tied="output.weight" not in stored)
        self._stored = {_hf_name(name): tensor for name, tensor in stored.items()}
        self._check_sizes()

    def names(self) -> tuple[str, ...]:
        """HF names of all tensors; a tensor that has no HF counterpart keeps its GGUF name."""
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The HF shape of a tensor."""
        return self._stored[name].shape

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32, HF orientation and HF RoPE layout."""
        tensor = self._stored[name]
        raw_np = self._tensor_bytes(tensor)
        if tensor.type == gguf.GGMLQuantizationType.F32:
            weight_np = np.array(raw_np.view("<f4").reshape(tensor.shape))  # a copy: never a view of the file
        elif tensor.type == gguf.GGMLQuantizationType.F16:
            weight_np = raw_np.view("<f2").reshape(tensor.shape).astype(np.float32)
        else:
            rows_np = raw_np.reshape(gguf.quant_shape_to_byte_shape(tensor.shape, tensor.type))
            weight_np = np.asarray(_dequantize(name, rows_np, tensor.type))
        if name.endswith("q_proj.weight"):
            return unpermute(weight_np, self.config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            return unpermute(weight_np, self.config["num_key_value_heads"])
        return weight_np

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer and chat template that the file carries."""
        return tokenizer_from_metadata(self.metadata)

    def generation(self) -> dict[str, Any]:
        """Recommended sampling: a GGUF file carries none."""
        return {}

    def identity(self) -> str:
        """A short hash of the config and the first bytes of every tensor."""
        return self._identity

    @functools.cached_property
    def _identity(self) -> str:
        heads = (
            (name, tensor.shape, self._tensor_bytes(tensor)[:HEAD_BYTES].tobytes())
            for name, tensor in self._stored.items()
        )
        return fingerprint(self.config, heads)

    def _tensor_bytes(self, tensor: StoredTensor) -> np.ndarray:
        return self._bytes[tensor.start_bytes : tensor.start_bytes + tensor.size_bytes]

    def _check_sizes(self) -> None:
        end_bytes = max(tensor.start_bytes + tensor.size_bytes for tensor in self._stored.values())
        if end_bytes > self._bytes.size:
            raise InputError(
                given=f"{self.path} has {self._bytes.size} bytes",
                expected=f"at least {end_bytes} bytes, as its header says",
                fix="the file is cut off: download it again",
            )


def _dequantize(name: str, rows_np: np.ndarray, tensor_type: gguf.GGMLQuantizationType) -> np.ndarray:
    try:
        return gguf.quants.dequantize(rows_np, tensor_type)
    except NotImplementedError as error:
        raise InputError(
            given=f"{name} in {tensor_type.name}",
            expected="a quantisation that the gguf package can undo",
            fix="use another quantisation of the model, for example Q8_0",
        ) from error


def unpermute(weight_np: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order of q and k in llama GGUFs.

    llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head, HF pairs (i, i + H/2); its converter
    therefore interleaves the two halves of every head's rows.

    Args:
      weight_np: [num_heads * H, D], interleaved.
      num_heads: query heads for q, kv heads for k.

    Returns:
      [num_heads * H, D] in HF order.
    """
    rows, width = weight_np.shape
    pairs_np = weight_np.reshape(num_heads, rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(pairs_np.swapaxes(1, 2)).reshape(rows, width)


def parse_header(data: memoryview) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensor directory of a GGUF file, under the file's own names."""
    cursor = _Cursor(data)
    magic, version = cursor.take("II")
    if magic != gguf.GGUF_MAGIC or version not in (2, 3):
        raise ValueError(f"magic {magic:#x}, version {version}")
    tensor_count, key_count = cursor.take("QQ")
    metadata = {cursor.string(): cursor.value(*cursor.take("I")) for _ in range(key_count)}
    directory = []
    for _ in range(tensor_count):
        name = cursor.string()
        (rank,) = cursor.take("I")
        shape = cursor.take(f"{rank}Q")[::-1]
        directory.append((name, shape, *cursor.take("IQ")))

    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, type_number, offset in directory:
        tensor_type = gguf.GGMLQuantizationType(type_number)
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        tensors[name] = StoredTensor(
            shape=shape,
            type=tensor_type,
            start_bytes=data_start + offset,
            size_bytes=int(np.prod(shape)) // block_len * block_bytes,
        )
    return metadata, tensors


class _Cursor:
    """Reads the little-endian GGUF header front to back."""

    def __init__(self, data: memoryview):
        self._data = data
        self.position = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (size,) = self.take("Q")
        start, self.position = self.position, self.position + size
        return str(self._data[start : self.position], "utf-8")

    def value(self, type_number: int) -> Any:
        kind = gguf.GGUFValueType(type_number)
        if kind == gguf.GGUFValueType.STRING:
            return self.string()
        if kind == gguf.GGUFValueType.ARRAY:
            item_type, count = self.take("IQ")
            if item_type in _SCALARS:
                return list(self.take(f"{count}{_SCALARS[item_type]}"))
            return [self.value(item_type) for _ in range(count)]
        (scalar,) = self.take(_SCALARS[kind])
        # The shortest decimal of the stored float32: 1e-05, not 9.999999747378752e-06, as in config.json.
        return float(str(np.float32(scalar))) if kind == gguf.GGUFValueType.FLOAT32 else scalar


def config_from_metadata(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The HF `config.json` fields that the metadata of a llama GGUF stands for."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise InputError(
            given=f"a GGUF file of architecture {architecture!r}",
            expected="architecture 'llama'",
            fix="use the model's safetensors directory instead",
        )
    unknown = sorted(key for key in metadata if key.startswith("llama.") and key not in _KNOWN_KEYS)
    if unknown:
        raise InputError(
            given=f"GGUF keys {', '.join(f'{key} = {metadata[key]!r}' for key in unknown)}",
            expected="a plain llama: no RoPE scaling, no experts",
            fix="use the model's safetensors directory instead",
        )
    try:
        return _llama_config({key.removeprefix("llama."): value for key, value in metadata.items()}, tied)
    except KeyError as error:
        raise InputError(
            given=f"a GGUF file without the key llama.{error.args[0]}",
            expected="all the sizes of a llama",
            fix="convert the model again with a current llama.cpp",
        ) from error


def _llama_config(keys: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = keys["attention.head_count"]
    head_dim = keys.get("attention.key_length", keys["embedding_length"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise InputError(
                given=f"llama.{key} = {keys[key]}",
                expected=f"the key head dimension {head_dim} (no partial rotation, no uneven heads)",
                fix="use the model's safetensors directory instead",
            )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10000.0)},
        "max_position_embeddings": keys["context_length"],
        "vocab_size": keys.get("vocab_size") or len(keys["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": keys.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": keys.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": keys.get("tokenizer.ggml.padding_token_id"),
    }


def _hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_NAMES[rest]}" if rest in _LAYER_NAMES else name
    return _MODEL_NAMES.get(name, name)
