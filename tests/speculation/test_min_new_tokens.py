"""Stop tokens that are forbidden by position leave speculative decoding exact, by enumeration.

The boundary falls inside blocks: rounds begin before it and end behind it.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from dspark_jax.speculation.sampling import MAX_STOP_IDS, Draw, SamplingParams, distribution
from dspark_jax.testing.enumeration import (
    TinyDecoding,
    Tokens,
    continuation_law,
    largest_difference,
    target_law,
)

V, G, STOP, EXACT = 4, 2, 0, 1e-6
PREFIX: Tokens = (1, 2)
MIN_NEW_TOKENS, NUM_TOKENS = 2, 4
OPTIONS = {
    "plain": {},
    "filtered": {"temperature_B": 0.8, "top_k_B": 3, "top_p_B": 0.95},
    "greedy": {"temperature_B": 0},
}

jitted = jax.jit(distribution, static_argnames="draw")


@functools.cache
def sampling_of(option: str, masked: bool) -> SamplingParams:
    values = {"temperature_B": 1.0} | OPTIONS[option]
    stop_ids_BJ = np.full((1, MAX_STOP_IDS), -1)
    stop_ids_BJ[0, 0] = STOP
    return SamplingParams.greedy(1).replace(
        **{name: np.array([value], np.float32) for name, value in values.items()},
        stop_ids_BJ=stop_ids_BJ,
        stop_from_B=np.array([len(PREFIX) + MIN_NEW_TOKENS if masked else 0]),
    )


@functools.cache
def law(option: str, salt: int, prefix: Tokens, *, masked: bool) -> np.ndarray:
    """The float32 law of the token after a prefix, widened."""
    logits_V = np.random.default_rng([salt, *prefix]).normal(size=V).astype(np.float32) * 1.5
    sampling, positions_B = sampling_of(option, masked), np.array([len(prefix)])
    probs_BV = jitted(logits_V[None], sampling, draw=Draw.MASKED, positions=positions_B)
    return np.asarray(probs_BV[0], np.float64)


def decoding_of(option: str, length: int, *, masked_draft: bool, masked_target: bool = True) -> TinyDecoding:
    return TinyDecoding(
        target=lambda prefix: law(option, 1, prefix, masked=masked_target),
        drafter=lambda prefix, drafted: law(option, 2, prefix + drafted, masked=masked_draft),
        verify_length=lambda prefix, block: length,
        block_len=G,
    )


@pytest.mark.parametrize("masked_draft", [True, False])
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("option", OPTIONS)
def test_exact(option, length, masked_draft):
    """Also where the drafter does not know of the mask: then it only proposes in vain."""
    decoding = decoding_of(option, length, masked_draft=masked_draft)
    found = continuation_law(decoding, PREFIX, NUM_TOKENS)

    assert largest_difference(found, target_law(decoding.target, PREFIX, NUM_TOKENS)) < EXACT
    early = sum(p for tokens, p in found.items() if STOP in tokens[:MIN_NEW_TOKENS])
    late = sum(p for tokens, p in found.items() if STOP in tokens[MIN_NEW_TOKENS:])
    assert early == 0
    assert late > 0.1 or option == "greedy"


def test_a_target_without_the_mask_is_caught():
    decoding = decoding_of("plain", 2, masked_draft=True, masked_target=False)
    expected = target_law(decoding_of("plain", 2, masked_draft=True).target, PREFIX, NUM_TOKENS)

    assert largest_difference(continuation_law(decoding, PREFIX, NUM_TOKENS), expected) > 0.01
