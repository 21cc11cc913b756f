"""Plain numpy, one request and one token at a time: what `speculation` must agree with."""

from __future__ import annotations

import numpy as np


def reference_distribution(
    logits_np: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """float64 probabilities of one row [V]: sort, then take tokens in order while the filters allow it.

    Tokens of equal probability stay or go together.
    """
    logits_np = np.asarray(logits_np, np.float64)
    if temperature == 0:
        return np.eye(logits_np.size)[np.argmax(logits_np)]
    weights_np = np.exp((logits_np - logits_np.max()) / temperature)
    probs_np = weights_np / weights_np.sum()
    if 0 < top_k < probs_np.size:
        smallest = np.sort(probs_np)[-top_k]
        probs_np = np.where(probs_np >= smallest, probs_np, 0) / probs_np[probs_np >= smallest].sum()
    if top_p < 1:
        descending_np = np.sort(probs_np)[::-1]
        needed = int(np.searchsorted(np.cumsum(descending_np), top_p)) if top_p > 0 else 0
        smallest = descending_np[min(needed, descending_np.size - 1)]
        probs_np = np.where(probs_np >= smallest, probs_np, 0) / probs_np[probs_np >= smallest].sum()
    probs_np = np.where(probs_np >= min_p * probs_np.max(), probs_np, 0)
    return probs_np / probs_np.sum()


def reference_verify(
    target_probs_np: np.ndarray,
    draft_probs_np: np.ndarray,
    draft_ids_np: np.ndarray,
    draft_to_target_np: np.ndarray | None,
    verify_len: int,
    uniforms_np: np.ndarray,
) -> tuple[list[int], np.ndarray]:
    """Verification of one request with the uniforms given.

    Args:
      target_probs_np: [verify_len + 1 or more, V].
      draft_probs_np: [G, Vd].
      draft_ids_np: int [G], draft ids.
      draft_to_target_np: int [Vd] or None.
      verify_len: draft tokens to verify.
      uniforms_np: [G], in [0, 1).

    Returns:
      The accepted tokens (target ids), and the law [V] that the target's own token must be drawn from.
    """
    accepted: list[int] = []
    for slot in range(verify_len):
        p_V = np.asarray(target_probs_np[slot], np.float64)
        q_V = np.zeros_like(p_V)
        ids = np.arange(p_V.size) if draft_to_target_np is None else draft_to_target_np
        q_V[ids] = draft_probs_np[slot]
        token = int(ids[draft_ids_np[slot]])
        if not uniforms_np[slot] * q_V[token] < p_V[token]:
            excess_V = np.maximum(p_V - q_V, 0)
            return accepted, excess_V / excess_V.sum() if excess_V.sum() > 0 else p_V
        accepted.append(token)
    return accepted, np.asarray(target_probs_np[verify_len], np.float64)
