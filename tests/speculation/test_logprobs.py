"""Log-probabilities of committed tokens against scipy's."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from dspark_jax.speculation.logprobs import MAX_TOP_LOGPROBS, token_logprobs


@pytest.mark.parametrize("V", [6, 50])
def test_rows(V):
    logits_BTV = np.random.default_rng(0).normal(size=(2, 3, V)).astype(np.float32) * 4
    tokens_BT = np.array([[1, 5, 2, -1], [4, -1, -1, -1]], np.int32)
    found = jax.jit(token_logprobs)(logits_BTV, tokens_BT)

    expected_BTV = log_softmax(logits_BTV.astype(np.float64), axis=-1)
    J = min(V, MAX_TOP_LOGPROBS)
    assert found.chosen_BT.shape == (2, 4) and found.top_BTJ.shape == found.top_ids_BTJ.shape == (2, 4, J)
    for b, t in ((0, 0), (0, 1), (0, 2), (1, 0)):
        np.testing.assert_allclose(found.chosen_BT[b, t], expected_BTV[b, t, tokens_BT[b, t]], atol=1e-5)
        likeliest = np.argsort(-expected_BTV[b, t], kind="stable")[:J]
        np.testing.assert_array_equal(found.top_ids_BTJ[b, t], likeliest)
        np.testing.assert_allclose(found.top_BTJ[b, t], expected_BTV[b, t, likeliest], atol=1e-5)
