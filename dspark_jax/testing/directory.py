"""A tiny target as a Hugging Face directory: what commands read, at the size of a unit test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from dspark_jax.checkpoints.hf_names import hf_tensor_map
from dspark_jax.testing.tiny import TinyTarget
from dspark_jax.testing.tokenizer import tiny_tokenizer


def save_tiny_target(target: TinyTarget, directory: Path) -> Path:
    """Writes config.json, weights and a byte-level tokenizer; returns the directory."""
    flat = traverse_util.flatten_dict(target.params)
    slots = hf_tensor_map(target.config)
    tensors = {name: slot.to_file(np.asarray(flat[slot.path])) for name, slot in slots.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(target.hf_config))
    tiny_tokenizer().save_pretrained(directory)
    return directory
