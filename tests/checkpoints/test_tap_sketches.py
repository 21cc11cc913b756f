"""Layers are recognised by their sketches in any dtype; another target is not taken for a wrong tap."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.tap_sketches import SKETCH_SIZE, layer_sketches, match_taps, sketches_of
from dspark_jax.testing.tiny import TARGETS, TinyTarget, tiny_target


@functools.cache
def target_of(name: str, seed: int = 0) -> TinyTarget:
    return tiny_target(**TARGETS[name], seed=seed)


@functools.cache
def sketches(name: str, seed: int = 0) -> np.ndarray:
    tiny = target_of(name, seed)
    return layer_sketches(tiny.config, tiny.params)


@pytest.mark.parametrize("name", TARGETS)
def test_every_layer_is_recognised_and_no_other_is_taken_for_it(name):
    layers = range(-1, target_of(name).config.num_layers)
    assert sketches(name).shape == (len(layers), SKETCH_SIZE)
    for trained in layers:
        recorded_CS = sketches_of((trained,), sketches(name))
        for read in layers:
            (match,) = match_taps((read,), recorded_CS, sketches(name))
            assert match.nearest == trained
            assert (match.recognised, match.reads_another) == (read == trained, read != trained)


def test_bfloat16_changes_nothing():
    tiny = target_of("llama-gqa-tied")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params)
    served_LS = layer_sketches(tiny.config, rounded)
    taps = tuple(range(-1, tiny.config.num_layers))
    assert all(match.similarity > 0.95 for match in match_taps(taps, sketches("llama-gqa-tied"), served_LS))


def test_another_target_is_not_recognised_and_nothing_is_called_off_by_one():
    other_LS = sketches("llama-gqa-tied", seed=5)
    for match in match_taps((0, 1), sketches_of((0, 1), sketches("llama-gqa-tied")), other_LS):
        assert not match.recognised and not match.reads_another
