"""What a step holds at a time depends on the sizes of its parts, not on how many blocks there are."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

from dspark_jax.drafters.config import Markov
from dspark_jax.testing.tiny import tiny_drafter, tiny_target
from dspark_jax.training.config import LossConfig
from dspark_jax.training.state import Frozen, TrainBatch, TrainState
from dspark_jax.training.step import train_step

T = 32


def step_bytes(anchors: int, block_chunk: int) -> int:
    """Peak of a step with the target online: arguments, results and temporaries."""
    target = tiny_target(vocab_size=1024, num_hidden_layers=1)
    tiny = tiny_drafter(target, taps=(0,), num_layers=1, block_len=4, head=Markov(rank=4))
    optimizer = optax.sgd(1e-3)
    state = TrainState(jnp.zeros((), jnp.int32), tiny.params, optimizer.init(tiny.params))
    shape = jax.ShapeDtypeStruct
    batch = TrainBatch(
        tokens_BT=shape((1, T), jnp.int32),
        loss_mask_BT=shape((1, T), jnp.bool_),
        anchors_BA=shape((1, anchors), jnp.int32),
        keep_BA=shape((1, anchors), jnp.bool_),
        target=None,
    )
    step = functools.partial(
        train_step,
        drafter=tiny.drafter,
        optimizer=optimizer,
        target=target.config,
        loss=LossConfig(chunk=16, block_chunk=block_chunk),
    )
    frozen = Frozen(target_params=target.params, shared=tiny.shared)
    memory = jax.jit(step, donate_argnums=0).lower(state, batch, frozen).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def test_four_times_the_blocks_need_less_than_a_tenth_more_memory():
    few, many = step_bytes(16, block_chunk=16), step_bytes(64, block_chunk=16)
    assert few < many < 1.1 * few
    assert step_bytes(64, block_chunk=64) > 1.1 * many, (
        "blocks at once would show: the test measures something"
    )
