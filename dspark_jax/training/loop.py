"""The training loop: read top to bottom. Nothing in it waits for the device by accident; metrics come late."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from tqdm import tqdm

from dspark_jax.checkpoints.drafter import load_drafter, save_drafter
from dspark_jax.checkpoints.targets import LoadedTarget, load_target
from dspark_jax.checkpoints.train_state import TrainCheckpoints
from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write
from dspark_jax.core.metrics import MetricsWriter
from dspark_jax.core.sharding import make_mesh, replicated
from dspark_jax.data.draft_vocab import most_frequent_tokens
from dspark_jax.data.feature_store import FeatureStore
from dspark_jax.data.pipeline import BatchIterator, training_batches
from dspark_jax.data.sources import Example, read_responses, split_held_out
from dspark_jax.drafters.contract import Params, SharedWeights
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.targets.decoder import embedding_table, lm_head_kernel
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.features import target_features
from dspark_jax.training.optimizer import FC, make_optimizer, start_from_target
from dspark_jax.training.state import Frozen, TrainBatch, TrainState, batch_shardings, state_shardings
from dspark_jax.training.step import train_step

OnLog = Callable[[int, dict[str, Any]], None]


def train(config: TrainConfig, *, on_log: OnLog | None = None) -> Path:
    """Trains a drafter, or continues the run that `config.run_dir` holds.

    Args:
      config: the run.
      on_log: called with (step, metrics) whenever a line of metrics is written.

    Returns:
      The directory of the exported drafter.

    Raises:
      InputError: the run directory holds another run, or the inputs do not fit together.
    """
    # 1. The run, the target and the data.
    _claim(config)
    mesh = make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    target = load_target(config.target, dtype=config.dtype, mesh=mesh)
    drafter = DSpark(config.drafter.resolve(target.config), jnp.dtype(config.dtype))
    examples, _ = split_held_out(read_responses(config.responses, vocab_size=target.config.vocab_size))
    batches = training_batches(_source(config, target, examples), config=config.data)

    # 2. The state: fresh, from an exported drafter, or resumed.
    vocabulary_np = _draft_vocabulary(config, examples, target.config.vocab_size)
    frozen = _frozen(config, target, vocabulary_np, mesh)
    checkpoints = TrainCheckpoints(config.run_dir / "checkpoints", keep=config.keep_checkpoints)
    optimizer, state, shardings = _initial_state(config, target, drafter, batches, mesh)
    if (step := checkpoints.latest_step()) is not None:
        state, data_state = checkpoints.restore(step, state, shardings)
        batches.set_state(data_state)

    # 3. The compiled step.
    step_fn = jax.jit(
        functools.partial(
            train_step,
            drafter=drafter,
            optimizer=optimizer,
            target=target.config,
            loss=config.loss,
            microbatches=config.microbatches,
        ),
        donate_argnums=0,
        out_shardings=(shardings, replicated(mesh)),
    )

    # 4. Steps. Metrics of a step are read one step later, when the device is busy with the next.
    writer = MetricsWriter(config.run_dir)
    start, pending = int(state.step), None
    last_time_s, last_step = time.monotonic(), start

    def log(pending: tuple[int, dict]) -> None:
        nonlocal last_time_s, last_step
        step, values = pending
        now_s = time.monotonic()
        values = {**jax.device_get(values), "steps_per_s": (step - last_step) / (now_s - last_time_s)}
        last_time_s, last_step = now_s, step
        row = writer.write(step, values)
        progress.set_postfix(loss=f"{row['loss']:.3f}", tau=f"{row['expected_tau']:.3f}")
        if on_log is not None:
            on_log(step, row)

    with tqdm(total=config.steps, initial=start, unit="step") as progress:
        for step in range(start + 1, config.steps + 1):
            batch = TrainBatch.from_host(next(batches))
            state, values = step_fn(state, jax.device_put(batch, batch_shardings(batch, mesh)), frozen)
            if pending is not None:
                log(pending)
            pending = (step, values) if step % config.log_every_steps == 0 or step == config.steps else None
            if step % config.save_every_steps == 0 or step == config.steps:
                checkpoints.save(step, state, batches.get_state())
                _export(config, target, drafter, state.params, vocabulary_np)
            progress.update()
        if pending is not None:
            log(pending)
    checkpoints.close()
    writer.close()
    return config.run_dir / "drafter"


def _claim(config: TrainConfig) -> None:
    """Writes the resolved configuration, or checks that the run there has the same one."""
    path = config.run_dir / "config.json"
    resolved = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    if path.exists():
        before = json.loads(path.read_text())
        changed = sorted(name for name in resolved if resolved[name] != before.get(name))
        if changed:
            raise InputError(
                given=f"{config.run_dir} holds a run with other values of {changed}",
                expected="the configuration with which the run was started",
                fix="use a new --run-dir (with --init-from to start from its drafter), or the old values",
            )
        return
    with atomic_write(path, "w") as file:
        json.dump(resolved, file, indent=2)


def _source(config: TrainConfig, target: LoadedTarget, examples: list[Example]) -> Sequence[Example] | FeatureStore:
    if config.feature_store is None:
        return examples
    store = FeatureStore(config.feature_store, taps=config.drafter.taps)
    store.require(identity=target.identity)
    wanted = {example.id for example in examples}
    return store.select(wanted.__contains__)


def _draft_vocabulary(config: TrainConfig, examples: list[Example], vocab_size: int) -> np.ndarray | None:
    size = config.drafter.draft_vocab_size
    return None if size is None else most_frequent_tokens(examples, size, vocab_size=vocab_size)


def _frozen(config: TrainConfig, target: LoadedTarget, vocabulary_np: np.ndarray | None, mesh: Mesh) -> Frozen:
    vocabulary = None if vocabulary_np is None else jax.device_put(vocabulary_np, replicated(mesh))
    shared = SharedWeights.cut(embedding_table(target.params), lm_head_kernel(target.params), vocabulary)
    return Frozen(target_params=target.params if config.feature_store is None else None, shared=shared)


def _initial_state(
    config: TrainConfig, target: LoadedTarget, drafter: DSpark, batches: BatchIterator, mesh: Mesh
) -> tuple[optax.GradientTransformation, TrainState, TrainState]:
    """(optimizer, state, its shardings). The feature scale comes from the first batch, which is then put back."""
    position = batches.get_state()
    scale = _feature_scale(config, target, drafter, TrainBatch.from_host(next(batches)))
    batches.set_state(position)
    optimizer = make_optimizer(config.optimizer, steps=config.steps, feature_scale=scale)

    def fresh() -> TrainState:
        params = nn.meta.unbox(drafter.init(jax.random.key(config.seed)))
        params["backbone"][FC[1]][FC[2]] *= scale[:, None]
        if config.drafter.start_from_layers is not None:
            params = start_from_target(params, target.params, config.drafter.start_from_layers)
        if config.init_from is not None:
            params = load_drafter(config.init_from).params
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))

    shardings = state_shardings(jax.eval_shape(fresh), drafter, optimizer, mesh)
    return optimizer, jax.jit(fresh, out_shardings=shardings)(), shardings


def _feature_scale(config: TrainConfig, target: LoadedTarget, drafter: DSpark, batch: TrainBatch) -> jax.Array:
    """1 / rms of every feature [C D] over the supervised tokens of a batch."""
    features = batch.target
    if features is None:
        forward = functools.partial(
            target_features, config=target.config, taps=drafter.config.taps, dtype=drafter.dtype
        )
        features = jax.jit(forward)(target.params, jnp.asarray(batch.tokens_BT))
    supervised = np.asarray(features.features_BTCD, np.float32)[np.asarray(batch.loss_mask_BT)]
    rms = np.sqrt(np.mean(supervised.reshape(len(supervised), -1) ** 2, axis=0))
    return jnp.asarray(1.0 / np.maximum(rms, 1e-3), jnp.float32)


def _export(
    config: TrainConfig, target: LoadedTarget, drafter: DSpark, params: Params, vocabulary_np: np.ndarray | None
) -> None:
    save_drafter(
        config.run_dir / "drafter",
        drafter=drafter,
        params=jax.device_get(params),
        draft_to_target_np=vocabulary_np,
        target_hf_config=target.hf_config,
        num_anchors=config.data.num_anchors,
    )
