"""Training from a DeepSpec cache is training online, but for the rounding of the cache to bfloat16."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.checkpoints.targets import load_target
from dspark_jax.core.errors import InputError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.deepspec_cache import DeepSpecCache
from dspark_jax.data.sources import is_held_out
from dspark_jax.drafters.contract import SharedWeights
from dspark_jax.targets.decoder import embedding_table, head_params, lm_head_kernel
from dspark_jax.testing.tiny import tiny_drafter, tiny_target
from dspark_jax.training import loop
from dspark_jax.training.cached_features import check_cache
from dspark_jax.training.config import LossConfig, MeshConfig
from dspark_jax.training.features import (
    TargetFeatures,
    UnnormalisedFeatures,
    log_normalisers,
    target_features,
)
from dspark_jax.training.state import Frozen, TrainBatch, TrainState
from dspark_jax.training.step import train_step

TAPS = (-1, 1)
IDS = [number for number in range(60) if not is_held_out(str(number))][:8]


@pytest.fixture(scope="module")
def sequences() -> dict[int, np.ndarray]:
    """Sample id -> tokens, 12 of which are the prompt."""
    rng = np.random.default_rng(5)
    return {number: rng.integers(0, 38, rng.integers(26, 30)).astype(np.int32) for number in IDS}


@pytest.fixture(scope="module")
def target(target_directory):
    return load_target(target_directory)


@pytest.fixture(scope="module")
def write_cache(sequences, target):
    """Writes what the target computes as DeepSpec does: (directory, taps to run, layer ids to claim)."""

    def write(directory: Path, taps=TAPS, claimed=TAPS) -> Path:
        directory.mkdir()
        index, shard = b"", b""
        for number, tokens_T in sequences.items():
            output = target_features(
                target.params, tokens_T[None], config=target.config, taps=taps, dtype=jnp.float32
            )
            arrays = (
                tokens_T,
                np.ones(len(tokens_T), np.uint8),
                (np.arange(len(tokens_T)) >= 12).astype(np.uint8),
                np.asarray(output.features_BTCD[0], jnp.bfloat16),
                np.asarray(output.hidden_BTD[0], jnp.bfloat16),
            )
            offsets = []
            for array in arrays:
                offsets.append(len(shard))
                shard += array.tobytes()
            index += struct.pack("<QIIQQQQQ", number, 0, len(tokens_T), *offsets)
        (directory / "samples.idx").write_bytes(index)
        (directory / "shard-00000.bin").write_bytes(shard)
        manifest = {
            "version": 2,
            "num_samples": len(sequences),
            "target_layer_ids": claimed,
            "hidden_size": target.config.block.width,
            "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
        }
        (directory / "manifest.json").write_text(json.dumps(manifest))
        return directory

    return write


def test_a_step_from_the_cache_is_the_step_from_the_same_rounded_features(write_cache, target, tmp_path):
    tiny = tiny_drafter(
        tiny_target(vocab_size=40, num_hidden_layers=2, tie_word_embeddings=False),
        draft_to_target_np=np.arange(24),
        taps=TAPS,
    )
    shared = SharedWeights.cut(
        embedding_table(target.params), lm_head_kernel(target.params), jnp.arange(24), target.config.scaling
    )
    records = list(DeepSpecCache(write_cache(tmp_path / "cache")))[:4]
    T = 26
    features, hidden = (
        np.stack([getattr(record, name)[:T] for record in records])
        for name in ("features_TCD_np", "hidden_TD_np")
    )
    tokens_BT = np.stack([record.example.tokens_np[:T] for record in records])
    online = target_features(target.params, tokens_BT, config=target.config, taps=TAPS, dtype=jnp.float32)
    rounded = (x.astype(jnp.bfloat16) for x in (online.features_BTCD, online.hidden_BTD))
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(features, target_params):
        batch = TrainBatch(
            tokens_BT=tokens_BT,
            loss_mask_BT=np.stack([record.example.loss_mask_np[:T] for record in records]),
            anchors_BA=np.broadcast_to(np.array([12, 15, 19]), (4, 3)),
            keep_BA=np.ones((4, 3), bool),
            target=features,
        )
        state = TrainState(
            step=jnp.zeros((), jnp.int32), params=tiny.params, opt_state=optimizer.init(tiny.params)
        )
        return train_step(
            state,
            batch,
            Frozen(target_params=target_params, shared=shared),
            drafter=tiny.drafter,
            optimizer=optimizer,
            target=target.config,
            loss=LossConfig(chunk=8),
        )[1]

    cached = step(UnnormalisedFeatures(features, hidden), head_params(target.params))
    features_BTCD, hidden_BTD = rounded
    logz_BT = log_normalisers(target.params, hidden_BTD, config=target.config, dtype=jnp.float32)
    expected = step(TargetFeatures(features_BTCD, hidden_BTD, logz_BT), None)

    for name, value in expected.items():
        np.testing.assert_allclose(cached[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    exact = step(online, None)
    assert 0 < abs(cached["loss"] - exact["loss"]) < 0.01 * exact["loss"], "what the rounding costs"


def test_a_run_from_the_cache_follows_the_run_online(
    make_config, on_devices, write_cache, sequences, tmp_path
):
    rows = [
        {
            "id": str(number),
            "domain": "deepspec",
            "prompt_ids": tokens[:12].tolist(),
            "response_ids": tokens[12:].tolist(),
        }
        for number, tokens in sequences.items()
    ]
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    on_devices(1)

    def run(name: str, **changes) -> list[dict]:
        logged: list[dict] = []
        config = make_config(tmp_path / name, steps=3, mesh=MeshConfig(), save_every_steps=3, **changes)
        loop.train(config, on_log=lambda step, row: logged.append(row))
        return logged

    online = run("online", responses=(tmp_path / "responses.jsonl",))
    cached = run("cached", responses=(), feature_store=write_cache(tmp_path / "cache"))

    for ours, theirs in zip(cached, online, strict=True):
        assert ours["rows"] == theirs["rows"]
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=5e-3)


def test_features_of_other_layers_are_refused(write_cache, target, tmp_path):
    mesh = make_mesh(devices=jax.devices()[:1])
    check_cache(DeepSpecCache(write_cache(tmp_path / "right")), target, mesh)

    with pytest.raises(InputError, match="stored for layer 1"):
        check_cache(DeepSpecCache(write_cache(tmp_path / "shifted", taps=(-1, 0))), target, mesh)
