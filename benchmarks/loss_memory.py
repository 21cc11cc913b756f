"""Peak temporaries of a training loss against the naive one: `python benchmarks/loss_memory.py [--step]`.

Both are compiled for the real shapes and asked for their memory; nothing is allocated, nothing runs. The
naive loss is the formula as it is written in the paper, differentiated by JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import tyro
from jax import Array

from dspark_jax.core.files import atomic_write
from dspark_jax.drafters.contract import SharedWeights
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.evaluation.provenance import provenance
from dspark_jax.losses import RowTerms, RowWeights, block_loss
from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.rope import DefaultRope
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.training import step as step_module
from dspark_jax.training.config import LossConfig, OptimizerConfig
from dspark_jax.training.features import TargetFeatures
from dspark_jax.training.optimizer import make_optimizer
from dspark_jax.training.recipes import DSparkRecipe
from dspark_jax.training.state import Frozen, TrainBatch, TrainState

QWEN3_4B = DecoderConfig(
    family="qwen3",
    vocab_size=151_936,
    layers=36
    * (
        BlockConfig(
            width=2560,
            mlp_width=9728,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            qk_norm=True,
            rope=DefaultRope(theta=1e6),
        ),
    ),
    tie_embeddings=True,
    max_positions=40_960,
)
RECIPE = DSparkRecipe(taps=(1, 9, 17, 25, 33), mask_token=151_669)
REQUIRED_RATIO = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossMemory:
    """What to compile."""

    anchors: int = 512
    """Draft blocks per sequence; the paper's number."""
    block_len: int = 7
    """Rows per block."""
    step: bool = False
    """Compile the whole training step too, once with each loss; takes minutes."""
    step_tokens: int = 4096
    """Sequence length of that step."""
    json: Path | None = None
    """Also write the figures here."""


def naive_loss(
    *,
    hidden_BMD: Array,
    latent_BMR: Array,
    w2_RV: Array,
    head_DV: Array,
    target_hidden_BMD: Array,
    target_logz_BM: Array,
    labels_BM: Array,
    weights: RowWeights,
    softcap: None = None,  # Qwen3 has none
    chunk: int = 0,  # ignored: it stands in for block_loss
    dtype=jnp.float32,
) -> tuple[Array, RowTerms]:
    """What `losses.block_loss` computes, with all logits at once and JAX's own gradient."""

    def matmul(a, b):
        return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)

    logits_BMV = matmul(hidden_BMD, head_DV) + matmul(latent_BMR, w2_RV)
    target_logits_BMV = matmul(target_hidden_BMD, head_DV)
    log_q = jax.nn.log_softmax(logits_BMV)
    p = jax.lax.stop_gradient(jnp.exp(target_logits_BMV - target_logz_BM[..., None]))
    tv_BM = jnp.abs(jnp.exp(log_q) - p).sum(-1) + jnp.maximum(1 - p.sum(-1), 0)
    ce_BM = -jnp.take_along_axis(log_q, jnp.maximum(labels_BM, 0)[..., None], axis=-1)[..., 0]
    kl_BM = -(p * log_q).sum(-1)
    loss = (weights.ce_BM * ce_BM + weights.tv_BM * tv_BM + weights.kl_BM * kl_BM).sum()
    agree_BM = (logits_BMV.argmax(-1) == target_logits_BMV.argmax(-1)).astype(jnp.float32)
    terms = RowTerms(ce_BM=ce_BM, tv_BM=tv_BM, kl_BM=kl_BM, accept_BM=1 - tv_BM / 2, agree_BM=agree_BM)
    return loss, jax.lax.stop_gradient(terms)


def loss_arguments(rows: int, width: int, rank: int, vocab_size: int) -> dict:
    """Shapes of one sequence's rows."""
    floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return {
        "hidden_BMD": floats((1, rows, width)),
        "latent_BMR": floats((1, rows, rank)),
        "w2_RV": floats((rank, vocab_size)),
        "head_DV": floats((width, vocab_size)),
        "target_hidden_BMD": floats((1, rows, width)),
        "target_logz_BM": floats((1, rows)),
        "labels_BM": jax.ShapeDtypeStruct((1, rows), jnp.int32),
        "weights": RowWeights(*(floats((1, rows)) for _ in range(3))),
    }


def value_and_grad(loss):
    """Loss, terms and the gradients of everything trained."""

    def of_trained(trained, frozen):
        return loss(**trained, **frozen)

    return jax.jit(jax.value_and_grad(of_trained, has_aux=True))


def split(arguments: dict) -> tuple[dict, dict]:
    """(trained, frozen) arguments of a loss."""
    trained = {name: arguments[name] for name in ("hidden_BMD", "latent_BMR", "w2_RV")}
    return trained, {name: value for name, value in arguments.items() if name not in trained}


def check_equal() -> None:
    """At a small size both losses are the same function, or the comparison means nothing."""
    keys = iter(jax.random.split(jax.random.key(0), 10))
    shapes = loss_arguments(rows=10, width=8, rank=4, vocab_size=40)
    arguments = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape).astype(x.dtype), shapes)
    arguments["labels_BM"] = jnp.arange(10)[None]
    target_logits = arguments["target_hidden_BMD"] @ arguments["head_DV"]
    arguments["target_logz_BM"] = jax.nn.logsumexp(target_logits, axis=-1)
    ours = value_and_grad(functools.partial(block_loss, chunk=4))(*split(arguments))
    naive = value_and_grad(naive_loss)(*split(arguments))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(naive), strict=True):
        assert jnp.allclose(a, b, atol=1e-4), "the naive loss is not the loss of the package"


def temporaries_bytes(jitted, *shapes) -> int:
    """Bytes of temporaries that the compiled program needs beside arguments and results."""
    return jitted.lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def step_shapes(recipe: DSparkRecipe, config: LossMemory) -> tuple[functools.partial, tuple]:
    """(the training step, the shapes of its arguments) with the target's features given."""
    drafter = DSpark(recipe.resolve(QWEN3_4B), jnp.dtype(jnp.bfloat16))
    D, C, T = QWEN3_4B.block.width, len(recipe.taps), config.step_tokens
    optimizer = make_optimizer(
        OptimizerConfig(), steps=1000, feature_kernel=drafter.feature_kernel, feature_scale=jnp.ones(C * D)
    )

    def fresh() -> TrainState:
        params = nn.meta.unbox(drafter.init(jax.random.key(0)))
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))

    shape, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    batch = TrainBatch(
        tokens_BT=shape((1, T), jnp.int32),
        loss_mask_BT=shape((1, T), jnp.bool_),
        anchors_BA=shape((1, config.anchors), jnp.int32),
        keep_BA=shape((1, config.anchors), jnp.bool_),
        target=TargetFeatures(shape((1, T, C, D), bf16), shape((1, T, D), bf16), shape((1, T), jnp.float32)),
    )
    V = QWEN3_4B.vocab_size
    shared = SharedWeights.cut(shape((V, D), bf16), shape((D, V), bf16), None, QWEN3_4B.scaling)
    frozen = Frozen(target_params=None, shared=shared)
    step = functools.partial(
        step_module.train_step, drafter=drafter, optimizer=optimizer, target=QWEN3_4B, loss=LossConfig()
    )
    return step, (jax.eval_shape(fresh), batch, frozen)


def main(config: LossMemory) -> None:
    """Compiles, compares, and fails when the loss does not save what it promises."""
    check_equal()
    recipe = dataclasses.replace(RECIPE, block_len=config.block_len)
    rows, chunk = config.anchors * config.block_len, LossConfig().chunk
    shapes = split(loss_arguments(rows, QWEN3_4B.block.width, recipe.head.rank, QWEN3_4B.vocab_size))
    figures = {
        "loss": {
            "naive": temporaries_bytes(value_and_grad(naive_loss), *shapes),
            "ours": temporaries_bytes(value_and_grad(functools.partial(block_loss, chunk=chunk)), *shapes),
        }
    }
    if config.step:
        step, arguments = step_shapes(recipe, config)
        figures["step"] = {"ours": temporaries_bytes(jax.jit(step, donate_argnums=0), *arguments)}
        with mock.patch.object(step_module, "block_loss", naive_loss):
            # A new function, so that nothing traced with the other loss is found again.
            naive_step = functools.partial(step.func, **step.keywords)
            figures["step"]["naive"] = temporaries_bytes(jax.jit(naive_step, donate_argnums=0), *arguments)

    about = provenance()
    sizes = f"{rows} rows, V = {QWEN3_4B.vocab_size}, D = {QWEN3_4B.block.width}"
    print(f"{about['date']}, {about['machine']['cpu']}, jax {about['versions']['jax']}: {sizes}")
    for name, sizes in figures.items():
        sizes["ratio"] = sizes["naive"] / sizes["ours"]
        print(
            f"temporaries of the {name}: naive {sizes['naive'] / 2**20:.0f} MiB,"
            f" ours {sizes['ours'] / 2**20:.0f} MiB, {sizes['ratio']:.1f} times smaller"
        )
    if config.json:
        options = {name: value for name, value in dataclasses.asdict(config).items() if name != "json"}
        with atomic_write(config.json, "w") as file:
            json.dump({**about, "config": options, "temporaries_bytes": figures}, file, indent=2)
    if figures["loss"]["ratio"] < REQUIRED_RATIO:
        sys.exit(f"less than {REQUIRED_RATIO:g} times smaller")


if __name__ == "__main__":
    main(tyro.cli(LossMemory, description=__doc__))
