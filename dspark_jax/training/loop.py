"""The training loop: read top to bottom. Nothing waits for the device by accident; metrics come late."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dspark_jax.checkpoints.drafter import save_drafter
from dspark_jax.checkpoints.tap_sketches import layer_sketches, sketches_of
from dspark_jax.checkpoints.targets import LoadedTarget, load_target
from dspark_jax.checkpoints.train_state import Retention, TrainCheckpoints, restore_checkpoint
from dspark_jax.core.distributed import (
    from_local_rows,
    from_main,
    gather,
    is_main,
    local_rows,
    on_main,
    place,
    run_together,
)
from dspark_jax.core.errors import require
from dspark_jax.core.preemption import StopRequest
from dspark_jax.core.sharding import make_mesh, replicated
from dspark_jax.data.deepspec_cache import is_deepspec_cache
from dspark_jax.data.pipeline import BatchIterator, training_batches
from dspark_jax.drafters.contract import Drafter, Params, SharedWeights
from dspark_jax.targets.decoder import embedding_table, head_params, lm_head_kernel
from dspark_jax.training.blueprint import Blueprint, StepProgram
from dspark_jax.training.cached_features import check_cache
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.goodput import GoodputClock
from dspark_jax.training.initial import feature_scale, regression_params, unit_scale
from dspark_jax.training.inputs import RunInputs, claim_run, read_inputs, run_fingerprint
from dspark_jax.training.state import Frozen, TrainBatch, TrainState, batch_shardings
from dspark_jax.training.watch import OnLog, TraceWindow, Watcher


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A drafter in the middle of its training, on the host.

    Attributes:
      drafter: its pure functions.
      params: its parameters, float32; numpy arrays, on every process.
      draft_to_target_np: its reduced vocabulary, or None.
      target: what it drafts for; its arrays may be spread over processes.
    """

    drafter: Drafter
    params: Params
    draft_to_target_np: np.ndarray | None
    target: LoadedTarget


Evaluate = Callable[[Snapshot], Mapping[str, float]]


def train(
    config: TrainConfig, *, on_log: OnLog | None = None, evaluate: Evaluate | None = None
) -> Path | None:
    """Trains a drafter, or continues the run that has this name. Every process of a job calls it.

    Args:
      config: the run.
      on_log: called with (step, metrics) whenever process 0 writes a line of metrics.
      evaluate: called by all processes every `config.evaluation.every_steps`; what it returns is logged.

    Returns:
      The directory of the exported drafter; None if SIGTERM asked the run to stop, which it did saved.

    Raises:
      InputError: the name belongs to another run, or the inputs do not fit together.
      Diverged: the loss is no number or has jumped; the message names the records of the batch.
    """
    clock = GoodputClock()
    # 1. Everything that can be refused is refused before a tensor is read.
    inputs = read_inputs(config)
    drafter, B = inputs.drafter, config.data.batch_size
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    whole_batches = functools.partial(training_batches, inputs.records, config=config.data)
    batches = whole_batches(local_rows=local_rows(mesh, B))
    on_main(functools.partial(claim_run, config))

    # 2. The target, and the state: this run's own, another run's, or a new one.
    target = load_target(config.target, dtype=config.target_dtype or config.dtype, mesh=mesh)
    if inputs.cache is not None:
        check_cache(inputs.cache, target, mesh)
    tap_sketches_CS = sketches_of(drafter.config.taps, layer_sketches(target.config, target.params))
    frozen = _frozen(config, target, inputs.vocabulary_np, mesh)
    checkpoints = TrainCheckpoints(config.checkpoint_dir, keep=_retention(config))
    own_step = checkpoints.latest_step()
    resumes = bool(own_step or config.resume_from)
    scale = unit_scale(drafter)
    if drafter.feature_kernel is not None and not resumes:
        scale = feature_scale(target, drafter, next(_host_batches(whole_batches())), mesh)
    blueprint = Blueprint.of(
        config,
        drafter=drafter,
        target=target.config,
        mesh=mesh,
        scale=scale,
        given_params=inputs.given_params,
    )
    if resumes:
        state, saved = _restored(config, checkpoints, own_step, blueprint)
        batches.set_state(saved["position"])
        if own_step:
            clock.resume(saved["clock"])
    else:
        given_params = inputs.given_params
        if given_params is None and config.drafter.warm_start_sequences:
            first = _host_batches(whole_batches())
            given_params = regression_params(config, target, drafter, first, frozen.shared, scale, mesh)
        fresh = jax.jit(blueprint.fresh, out_shardings=blueprint.shardings)
        state = run_together(fresh, None if given_params is None else from_main(given_params))

    # 3. Steps. What a step says is read one step later, when the device is busy with the next.
    start, exported_step, stopped = int(state.step), None, False
    step_fn = StepProgram(blueprint.program, mesh)
    with contextlib.ExitStack() as stack:
        progress = tqdm(total=config.steps, initial=start, unit="step", disable=not is_main())
        watch = Watcher(
            config.watch,
            run_dir=config.run_dir,
            clock=clock,
            start=start,
            tokens=B * config.data.max_length,
            ideal_step_s=lambda: step_fn.ideal_s,
            progress=progress,
            on_log=on_log,
        )
        trace = TraceWindow(config.watch.profile_steps, config.run_dir / "profile")
        for opened in (checkpoints, progress, watch, trace):
            stack.enter_context(contextlib.closing(opened))
        stop = stack.enter_context(StopRequest())
        for step in range(start + 1, config.steps + 1):
            last = step == config.steps
            clock.lap("step" if step > start + 1 else "startup")
            batch = next(batches)
            clock.lap("step" if watch.busy() else "input")
            trace.before(step)
            state, values = step_fn(state, _to_devices(batch, mesh, B), frozen)
            if step == start + 1:
                clock.lap("startup")  # compiled
            watch.hold(step, values, ids=batches.ids, log=last or step % config.log_every_steps == 0)
            trace.after(step, values)
            stopped = stop.reached(step)

            if evaluate is not None and (last or step % config.evaluation.every_steps == 0) and not stopped:
                watch.check()
                clock.lap("step")
                params = gather(state.params, mesh)
                snapshot = Snapshot(
                    drafter=drafter, params=params, draft_to_target_np=inputs.vocabulary_np, target=target
                )
                decoded = evaluate(snapshot)
                clock.lap("evaluation")
                watch.settle(decoded)
            if last or stopped or step % config.save_every_steps == 0:
                watch.settle()  # a bad step is never saved
                clock.lap("step")
                beside = {
                    "position": batches.get_state(),
                    "clock": clock.get_state(),
                    "fingerprint": run_fingerprint(config),
                }
                checkpoints.save(step, state, beside, watch.means_since_save())
                if not stopped:
                    _export(config, target, inputs, gather(state.params, mesh), tap_sketches_CS)
                    exported_step = step
                clock.lap("save")
            progress.update()
            if stopped:
                break
    if stopped and not last:
        return None
    # 4. Again, for a run that was killed between its last checkpoint and the export.
    if exported_step != config.steps:
        _export(config, target, inputs, gather(state.params, mesh), tap_sketches_CS)
    return config.run_dir / "drafter"


def _restored(
    config: TrainConfig, checkpoints: TrainCheckpoints, own_step: int | None, blueprint: Blueprint
) -> tuple[TrainState, dict[str, Any]]:
    """The state of this run where there is one, else that of the run to go on from."""
    if not own_step:
        assert config.resume_from is not None
        return restore_checkpoint(config.resume_from, blueprint.shapes, blueprint.shardings)
    state, saved = checkpoints.restore(own_step, blueprint.shapes, blueprint.shardings)
    require(
        saved["fingerprint"] == run_fingerprint(config),
        given=f"{config.checkpoint_dir} with the checkpoints of another configuration",
        expected="the configuration with which the run was started",
        fix="use a new --run-name (with --resume-from to go on from these checkpoints), or the old values",
    )
    return state, saved


def _host_batches(batches: BatchIterator) -> Iterator[TrainBatch]:
    return map(TrainBatch.from_host, batches)


def _to_devices(batch: dict[str, np.ndarray], mesh: Mesh, batch_size: int) -> TrainBatch:
    """A global batch, of which this process has read its rows."""
    local = TrainBatch.from_host(batch)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype), local)
    return jax.tree.map(
        functools.partial(from_local_rows, batch_size=batch_size), local, batch_shardings(shapes, mesh)
    )


def _retention(config: TrainConfig) -> Retention:
    keep = config.keep
    return Retention(
        latest=keep.latest,
        best=keep.best,
        metric=keep.metric,
        lowest=keep.lowest,
        every_steps=keep.every_steps,
    )


def _frozen(
    config: TrainConfig, target: LoadedTarget, vocabulary_np: np.ndarray | None, mesh: Mesh
) -> Frozen:
    vocabulary = None if vocabulary_np is None else place(vocabulary_np, replicated(mesh))
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
    params_np: Params,
    tap_sketches_CS: np.ndarray,
) -> None:
    """Writes the drafter, in process 0."""
    on_main(
        functools.partial(
            save_drafter,
            config.run_dir / "drafter",
            drafter=inputs.drafter,
            params=params_np,
            draft_to_target_np=inputs.vocabulary_np,
            target_hf_config=target.hf_config,
            num_anchors=config.data.num_anchors,
            template=inputs.template,
            tap_sketches_CS=tap_sketches_CS,
        )
    )
