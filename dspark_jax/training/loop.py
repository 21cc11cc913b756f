"""The training loop: read top to bottom. Nothing waits for the device by accident; metrics come late."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dspark_jax.checkpoints.drafter import save_drafter
from dspark_jax.checkpoints.targets import LoadedTarget, load_target
from dspark_jax.checkpoints.train_state import TrainCheckpoints
from dspark_jax.core.metrics import MetricsWriter
from dspark_jax.core.sharding import make_mesh, replicated
from dspark_jax.data.deepspec_cache import is_deepspec_cache
from dspark_jax.drafters.contract import Params, SharedWeights
from dspark_jax.targets.decoder import embedding_table, head_params, lm_head_kernel
from dspark_jax.training.cached_features import check_cache
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.initial import feature_scale, fresh_state, regression_params, unit_scale
from dspark_jax.training.inputs import RunInputs, claim_run, read_inputs
from dspark_jax.training.optimizer import make_optimizer
from dspark_jax.training.state import Frozen, TrainBatch, batch_shardings, state_shardings
from dspark_jax.training.step import bind_step

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
    # 1. Everything that can be refused is refused before a tensor is read.
    inputs = read_inputs(config)
    drafter, batches = inputs.drafter, inputs.batches
    mesh = make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    claim_run(config)

    # 2. The target, and the state: fresh, from an exported drafter, or resumed.
    target = load_target(config.target, dtype=config.dtype, mesh=mesh)
    if inputs.cache is not None:
        check_cache(inputs.cache, target)
    frozen = _frozen(config, target, inputs.vocabulary_np, mesh)
    checkpoints = TrainCheckpoints(config.run_dir / "checkpoints", keep=config.keep_checkpoints)
    resumed_step = checkpoints.latest_step()
    scale = unit_scale(drafter)
    if drafter.feature_kernel is not None and not resumed_step:
        scale = feature_scale(target, drafter, batches)
    optimizer = make_optimizer(
        config.optimizer, steps=config.steps, feature_kernel=drafter.feature_kernel, feature_scale=scale
    )
    fresh = functools.partial(fresh_state, config=config, drafter=drafter, optimizer=optimizer, scale=scale)
    shapes = jax.eval_shape(fresh, inputs.given_params)
    shardings = state_shardings(shapes, drafter, mesh)
    if resumed_step:
        state, data_state = checkpoints.restore(resumed_step, shapes, shardings)
        batches.set_state(data_state)
    else:
        given_params = inputs.given_params
        if given_params is None and config.drafter.warm_start_sequences:
            given_params = regression_params(config, target, drafter, batches, frozen.shared, scale)
        state = jax.jit(fresh, out_shardings=shardings)(given_params)

    # 3. The compiled step.
    step_fn = jax.jit(
        bind_step(config, drafter=drafter, optimizer=optimizer, target=target.config),
        donate_argnums=0,
        out_shardings=(shardings, replicated(mesh)),
    )

    # 4. Steps. Metrics of a step are read one step later, when the device is busy with the next.
    start, pending = int(state.step), None
    last_time_s, last_step = time.monotonic(), start

    def log(pending: tuple[int, dict]) -> None:
        nonlocal last_time_s, last_step
        step, values = pending
        values = jax.device_get(values)
        now_s = time.monotonic()
        row = writer.write(step, {**values, "steps_per_s": (step - last_step) / (now_s - last_time_s)})
        last_time_s, last_step = now_s, step
        progress.set_postfix(loss=f"{row['loss']:.3f}", tau=f"{row['expected_tau']:.3f}")
        if on_log is not None:
            on_log(step, row)

    with (
        contextlib.closing(checkpoints),
        contextlib.closing(MetricsWriter(config.run_dir)) as writer,
        tqdm(total=config.steps, initial=start, unit="step") as progress,
    ):
        for step in range(start + 1, config.steps + 1):
            batch = TrainBatch.from_host(next(batches))
            state, values = step_fn(state, jax.device_put(batch, batch_shardings(batch, mesh)), frozen)
            if pending is not None:
                log(pending)
            pending = (step, values) if step % config.log_every_steps == 0 or step == config.steps else None
            if step % config.save_every_steps == 0 or step == config.steps:
                checkpoints.save(step, state, batches.get_state())
                _export(config, target, inputs, state.params)
            progress.update()
        if pending is not None:
            log(pending)
    # Again, for a run that was killed between its last checkpoint and the export.
    return _export(config, target, inputs, state.params)


def _frozen(
    config: TrainConfig, target: LoadedTarget, vocabulary_np: np.ndarray | None, mesh: Mesh
) -> Frozen:
    vocabulary = None if vocabulary_np is None else jax.device_put(vocabulary_np, replicated(mesh))
    shared = SharedWeights.cut(
        embedding_table(target.params), lm_head_kernel(target.params), vocabulary, target.config.scaling
    )
    target_params = target.params
    if config.feature_store is not None:
        target_params = head_params(target.params) if is_deepspec_cache(config.feature_store) else None
    return Frozen(target_params=target_params, shared=shared)


def _export(
    config: TrainConfig,
    target: LoadedTarget,
    inputs: RunInputs,
    params: Params,
) -> Path:
    directory = config.run_dir / "drafter"
    save_drafter(
        directory,
        drafter=inputs.drafter,
        params=jax.device_get(params),
        draft_to_target_np=inputs.vocabulary_np,
        target_hf_config=target.hf_config,
        num_anchors=config.data.num_anchors,
        template=inputs.template,
    )
    return directory
