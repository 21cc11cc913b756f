"""What follows from a run's configuration before there is an array: optimiser, shapes, shardings, step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from dspark_jax.core.devices import device_kind
from dspark_jax.core.distributed import barrier
from dspark_jax.core.program_costs import matmul_cost
from dspark_jax.core.sharding import replicated
from dspark_jax.drafters.contract import Drafter, Params
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.initial import fresh_state
from dspark_jax.training.optimizer import make_optimizer
from dspark_jax.training.state import TrainState, state_shardings
from dspark_jax.training.step import bind_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blueprint:
    """The state and the step of one run on one mesh; trained with and planned from alike.

    Attributes:
      fresh: given parameters, or None for random ones -> the state before the first step.
      shapes: of the state.
      shardings: of the state.
      step: one optimiser step, a function of arrays alone.
      program: the same, to be compiled: the state is donated, the metrics come back whole on every device.
    """

    fresh: Callable[[Params | None], TrainState]
    shapes: TrainState
    shardings: TrainState
    step: Callable[..., tuple[TrainState, dict[str, Any]]]
    program: Any

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        *,
        drafter: Drafter,
        target: DecoderConfig,
        mesh: Mesh,
        scale: np.ndarray,
        given_params: Params | None = None,
    ) -> Blueprint:
        """The blueprint of a run.

        Args:
          config: the run.
          drafter: the drafter to train.
          target: dimensions of the target.
          mesh: devices, real or of a topology.
          scale: 1 / rms of every feature; only the shape matters where a checkpoint brings the values.
          given_params: parameters to start from, or None.
        """
        optimizer: optax.GradientTransformation = make_optimizer(
            config.optimizer, steps=config.steps, feature_kernel=drafter.feature_kernel, feature_scale=scale
        )
        fresh = functools.partial(
            fresh_state, config=config, drafter=drafter, optimizer=optimizer, scale=scale
        )
        shapes = jax.eval_shape(fresh, given_params)
        shardings = state_shardings(shapes, drafter, mesh)
        step = bind_step(config, drafter=drafter, optimizer=optimizer, target=target, mesh=mesh)
        return cls(
            fresh=fresh,
            shapes=shapes,
            shardings=shardings,
            step=step,
            program=jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated(mesh))),
        )


class StepProgram:
    """A step that is compiled once, at its first call, for exactly the shapes and shardings of that call.

    Args:
      program: of a blueprint.
      mesh: its devices.

    Attributes:
      ideal_s: seconds of the step's matrix products, recomputed ones included, at the stated bfloat16 peak of
        the devices; None before the first call and where the peak is not known.
    """

    def __init__(self, program: Any, mesh: Mesh):
        self._program, self._devices = program, mesh.devices
        self._compiled: Any = None
        self.ideal_s: float | None = None

    def __call__(self, *arguments: Any) -> tuple[TrainState, dict[str, Any]]:
        if self._compiled is None:
            traced = self._program.trace(*arguments)
            kind = device_kind(self._devices.flat[0].device_kind)
            if kind is not None:
                peak_flops_per_s = self._devices.size * kind.bf16_tflops * 1e12
                self.ideal_s = matmul_cost(traced.jaxpr).flops / peak_flops_per_s
            self._compiled = traced.lower().compile()
            barrier()  # as in run_together
        return self._compiled(*arguments)
