"""The decoder computes what transformers' PyTorch models compute, layer by layer, from the same files."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.checkpoints.targets import open_source, read_params
from dspark_jax.targets.decoder import Decoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
POSITIONS = 40
SIZES = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CASES = {
    "gqa": ("Llama", {}),
    "mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mqa-biased": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-biased": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
ROPES = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-explicit": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
        "truncate": False,
    },
}


def random_model(family: str, **fields):
    """A random PyTorch model in which every parameter matters."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return model


def reference(model, tokens_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits [B, T, V], raw outputs [B, T, layers + 1, D] of the embedding and of every layer)."""
    outputs = []
    modules = [model.model.embed_tokens, *model.model.layers]
    hooks = [module.register_forward_hook(lambda *args: outputs.append(args[-1])) for module in modules]
    with torch.no_grad():
        logits = model(torch.tensor(tokens_BT, dtype=torch.long)).logits
    for hook in hooks:
        hook.remove()
    tensors = [output[0] if isinstance(output, tuple) else output for output in outputs]
    return logits.numpy(), torch.stack(tensors, dim=2).numpy()


def assert_equal_networks(model, directory: Path):
    model.save_pretrained(directory)
    config, params = read_params(open_source(directory))
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (2, POSITIONS)).astype(np.int32)
    logits_np, hidden_np = reference(model, tokens_BT)

    taps = tuple(range(-1, config.num_layers))
    apply = jax.jit(Decoder(config).apply, static_argnames="taps")
    output = apply({"params": params}, tokens_BT, taps=taps)

    np.testing.assert_allclose(output.features_BTCD, hidden_np, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(output.logits_BTV, logits_np, atol=1e-5, rtol=1e-5)
    return logits_np


@pytest.mark.parametrize("case", CASES)
def test_random_models(case, tmp_path):
    family, fields = CASES[case]
    assert_equal_networks(random_model(family, **fields), tmp_path)


@pytest.mark.parametrize("case", ROPES)
def test_rope_variants(case, tmp_path):
    rope = {"rope_type": case.split("-")[0], "rope_theta": 1000.0, **ROPES[case]}
    logits_np = assert_equal_networks(random_model("Llama", rope_parameters=rope), tmp_path)

    plain = random_model("Llama", rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    tokens_BT = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, POSITIONS)).astype(np.int32)
    assert np.abs(reference(plain, tokens_BT)[0] - logits_np).max() > 0.1, "a forgotten variant would pass"


def test_smollm2(embedded_gguf):
    source = open_source(embedded_gguf)
    tokenizer = source.tokenizer()
    texts: dict[str, str] = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        texts[prompt["domain"]] = texts.get(prompt["domain"], "") + prompt["prompt"] + "\n"
    assert sorted(texts) == ["chat", "code", "if", "math"]
    tokens_BT = np.asarray([(2 * tokenizer(text)["input_ids"])[:64] for text in texts.values()], np.int32)
    assert tokens_BT.shape == (4, 64)

    config, params = read_params(source)
    logits_BTV = np.asarray(jax.jit(Decoder(config).apply)({"params": params}, tokens_BT).logits_BTV)
    del params
    model = transformers.AutoModelForCausalLM.from_pretrained(
        embedded_gguf.parent, gguf_file=embedded_gguf.name, dtype=torch.float32
    )

    difference_np = np.abs(reference(model, tokens_BT)[0] - logits_BTV).max((1, 2))
    assert (difference_np < 2e-4).all(), dict(zip(texts, difference_np, strict=True))
