"""The decoder computes what transformers' PyTorch models compute, layer by layer, from the same files."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.checkpoints.targets import open_source, read_params
from dspark_jax.nn.kv_cache import KVCache
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
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES |= {
    "experts": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "experts-not-normalised-in-every-other-layer": (
        "Qwen3Moe",
        {**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,  # far shorter than the sequence
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
}
CASES |= {
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-own-values-uncapped": (
        "Gemma4",
        {**GEMMA4, "attention_k_eq_v": False, "final_logit_softcapping": None},
    ),
    "gemma4-biased-untied": ("Gemma4", {**GEMMA4, "attention_bias": True, "tie_word_embeddings": False}),
}
CONFIG_CLASSES = {"Gemma4": "Gemma4TextConfig"}
TOLERANCES = {"Gemma4": 1e-4}
"""Where not 1e-5. Gemma 4 multiplies normed heads without scaling the products: on these models transformers
in float32 is itself 3e-5 away from its float64 outputs."""
ROPES = {
    "linear": {"factor": 4.0},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
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
    config_class = CONFIG_CLASSES.get(family, f"{family}Config")
    config = getattr(transformers, config_class)(**{**SIZES, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return randomised(model)


def randomised(model):
    generator = torch.Generator().manual_seed(0)
    scalars = [(name, x) for name, x in model.named_buffers() if name.endswith("layer_scalar")]
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *scalars]:
            noise = torch.randn(x.shape, generator=generator)
            x.copy_(1 + 0.2 * noise if "norm" in name or "scalar" in name else 0.2 * noise)
    return model.eval()


def reference(model, tokens_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits [B, T, V], raw outputs [B, T, layers + 1, D] of the embedding and of every layer)."""
    outputs = []
    text = getattr(model.model, "language_model", model.model)
    modules = [text.embed_tokens, *text.layers]
    hooks = [module.register_forward_hook(lambda *args: outputs.append(args[-1])) for module in modules]
    with torch.no_grad():
        logits = model(torch.tensor(tokens_BT, dtype=torch.long)).logits
    for hook in hooks:
        hook.remove()
    tensors = [output[0] if isinstance(output, tuple) else output for output in outputs]
    return logits.numpy(), torch.stack(tensors, dim=2).numpy()


def assert_equal_networks(model, directory: Path, tolerance: float = 1e-5):
    model.save_pretrained(directory)
    config, params = read_params(open_source(directory))
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (2, POSITIONS)).astype(np.int32)
    logits_np, hidden_np = reference(model, tokens_BT)

    taps = tuple(range(-1, config.num_layers))
    apply = jax.jit(Decoder(config).apply, static_argnames="taps")
    output = apply({"params": params}, tokens_BT, taps=taps)

    np.testing.assert_allclose(output.features_BTCD, hidden_np, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(output.logits_BTV, logits_np, atol=tolerance, rtol=tolerance)
    return logits_np


@pytest.mark.parametrize("case", CASES)
def test_random_models(case, tmp_path):
    family, fields = CASES[case]
    assert_equal_networks(random_model(family, **fields), tmp_path, TOLERANCES.get(family, 1e-5))


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("gemma4")])
def test_gemma4_with_a_cache(case, tmp_path):
    """A prompt, rejected rows, a chunk and single tokens give what one pass gives."""
    model = random_model(CASES[case][0], **CASES[case][1])
    model.save_pretrained(tmp_path)
    config, params = read_params(open_source(tmp_path))
    tokens_1T = np.random.default_rng(1).integers(0, config.vocab_size, (1, 24)).astype(np.int32)
    expected_np = reference(model, tokens_1T)[0]
    apply = jax.jit(Decoder(config).apply)

    def run(tokens_1T, start: int, cache: KVCache):
        output = apply({"params": params}, tokens_1T, start_B=np.asarray([start], np.int32), cache=cache)
        return output.logits_BTV, output.cache

    logits, cache = run(tokens_1T[:, :16], 0, KVCache.create(config.layers, num_pages=1, page_len=32))
    parts = [logits]
    _, cache = run((tokens_1T[:, :6] + 1) % config.vocab_size, 16, cache)  # rejected
    for start, end in ((16, 22), (22, 23), (23, 24)):
        logits, cache = run(tokens_1T[:, start:end], start, cache)
        parts.append(logits)

    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected_np, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        tokens = torch.tensor(tokens_1T, dtype=torch.long)
        past = model(tokens[:, :23], use_cache=True).past_key_values
        last = model(tokens[:, 23:], past_key_values=past).logits
    np.testing.assert_allclose(parts[-1], last.numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Gemma4", "Gemma4Unified"])
def test_the_text_model_of_a_multimodal_gemma4(name, tmp_path):
    vision = {
        "Gemma4": dict(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            position_embedding_size=16,
        ),
        "Gemma4Unified": dict(mm_embed_dim=16, output_proj_dims=32, mm_posemb_size=8),
    }
    config = getattr(transformers, f"{name}Config")(
        text_config={**SIZES, **GEMMA4}, vision_config=vision[name], audio_config=None
    )
    model = randomised(getattr(transformers, f"{name}ForConditionalGeneration")(config))

    assert_equal_networks(model, tmp_path, TOLERANCES["Gemma4"])


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
