"""The training step of DSpark as one would write it in PyTorch at first: what `train_step.py` compares with.

Dense masks, all logits at once, and the loss as the paper writes it, differentiated by autograd. It reads
the parameters of our networks by their names, so that both sides train the same thing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimensions:
    """What the step must know of target and drafter, which have layers of the same size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_layers: int
    drafter_layers: int
    taps: tuple[int, ...]
    block_len: int
    mask_token: int
    theta: float = 1e4
    norm_eps: float = 1e-6
    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay_len: float = 4.0


def tensors(tree: Any, *, trained: bool) -> Any:
    """A tree of numpy arrays as tensors."""
    if isinstance(tree, dict):
        return {name: tensors(value, trained=trained) for name, value in tree.items()}
    return torch.tensor(np.array(tree), requires_grad=trained)


def leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree."""
    return [x for value in tree.values() for x in leaves(value)] if isinstance(tree, dict) else [tree]


class Step:
    """Forward, backward and AdamW on one batch of (tokens, loss mask, anchors, kept anchors)."""

    def __init__(self, target: dict, drafter: dict, dimensions: Dimensions, *, learning_rate: float):
        self.d = dimensions
        self.target, self.drafter = tensors(target, trained=False), tensors(drafter, trained=True)
        self.optimizer = torch.optim.AdamW(leaves(self.drafter), lr=learning_rate, weight_decay=0.0)

    def __call__(self, batch: dict[str, np.ndarray]) -> float:
        """One step; the loss before it."""
        data = {name: torch.from_numpy(array) for name, array in batch.items()}
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(
            data["tokens_BT"].long(), data["loss_mask_BT"], data["anchors_BA"].long(), data["keep_BA"]
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves(self.drafter), 1.0)
        self.optimizer.step()
        return loss.item()

    def loss(self, tokens, loss_mask, anchors, keep) -> torch.Tensor:
        """DSpark's loss of a batch (spec: CE, TV, confidence; weights fall with the slot)."""
        d, p = self.d, self.drafter
        B, T = tokens.shape
        A, G = anchors.shape[1], d.block_len
        embedding = self.target["embedding"]
        features, target_hidden = self.run_target(tokens)
        with torch.no_grad():
            target_probs = F.softmax(target_hidden @ embedding.T, dim=-1)

        at = anchors[..., None] + torch.arange(G)
        inside = at + 1 < T
        labels_at = (at + 1).clamp(max=T - 1).reshape(B, -1)
        labels = tokens.gather(1, labels_at)
        mask = (inside & keep[..., None] & loss_mask.gather(1, labels_at).reshape(B, A, G)).long()
        mask = mask.cumprod(-1).reshape(B, -1)
        prev = tokens.gather(1, at.clamp(max=T - 1).reshape(B, -1))

        hidden = self.run_backbone(features, tokens.gather(1, anchors), at.reshape(B, -1), anchors)
        latent = p["head"]["w1"][prev]
        logits = hidden @ embedding.T + latent @ p["head"]["w2"]
        log_q = F.log_softmax(logits, dim=-1)
        rows = at.clamp(max=T - 1).reshape(B, -1, 1).expand(-1, -1, embedding.shape[0])
        target_rows = target_probs.gather(1, rows)
        distance = (log_q.exp() - target_rows).abs().sum(-1)
        ce = -log_q.gather(-1, labels[..., None])[..., 0]
        accept = (1 - 0.5 * distance.detach()).clamp(0, 1)
        confidence = torch.cat([hidden, latent], dim=-1) @ p["confidence"]["kernel"] + p["confidence"]["bias"]
        bce = F.binary_cross_entropy_with_logits(confidence[..., 0], accept, reduction="none")
        weights = torch.exp(-torch.arange(G) / d.decay_len).repeat(A) * mask
        total = (weights * (d.ce * ce + d.tv * distance + d.confidence * bce)).sum()
        return total / (weights.sum() + 1e-6)

    @torch.no_grad()
    def run_target(self, tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """(features [B, T, C D], hidden states after the last norm)."""
        d, T = self.d, tokens.shape[1]
        x = self.target["embedding"][tokens]
        outputs = {-1: x}
        positions, mask = torch.arange(T), torch.ones(T, T).tril().bool()
        for i in range(d.target_layers):
            layer = self.target[f"layers_{i}"]
            q, k, v = self.project(layer["attention"], self.norm(x, layer["input_norm"]), positions)
            x = outputs[i] = self.rest(layer, x, self.attend(q, k, v, mask))
        return torch.cat([outputs[tap] for tap in d.taps], dim=-1), self.norm(x, self.target["final_norm"])

    def run_backbone(self, features, anchor_tokens, positions, anchors) -> torch.Tensor:
        """Hidden states [B, A G, D] of all blocks under one dense mask."""
        d, p = self.d, self.drafter["backbone"]
        B, T = features.shape[:2]
        A, G = anchor_tokens.shape[1], d.block_len
        ids = torch.full((B, A, G), d.mask_token)
        ids[..., 0] = anchor_tokens
        x = self.target["embedding"][ids.reshape(B, -1)]
        context = self.norm(features @ p["fc"]["kernel"], p["hidden_norm"])
        of_context = torch.arange(T) < anchors.repeat_interleave(G, dim=1)[..., None]
        block = torch.arange(A).repeat_interleave(G)
        of_blocks = (block[:, None] == block).expand(B, -1, -1)
        mask = torch.cat([of_context, of_blocks], dim=-1)[:, None]
        for i in range(d.drafter_layers):
            layer = p[f"layers_{i}"]
            _, context_k, context_v = self.project(layer["attention"], context, torch.arange(T))
            q, k, v = self.project(layer["attention"], self.norm(x, layer["input_norm"]), positions)
            mixed = self.attend(q, torch.cat([context_k, k], 2), torch.cat([context_v, v], 2), mask)
            x = self.rest(layer, x, mixed)
        return self.norm(x, p["final_norm"])

    def project(self, attention: dict, x, positions) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values [B, heads, T, H], rotated."""
        d = self.d

        def heads(name: str, count: int) -> torch.Tensor:
            return (x @ attention[name]["kernel"]).unflatten(-1, (count, d.head_dim)).transpose(1, 2)

        frequencies = d.theta ** (-torch.arange(0, d.head_dim, 2) / d.head_dim)
        angles = positions[..., None] * torch.cat([frequencies, frequencies])
        angles = angles if angles.ndim == 2 else angles[:, None]

        def rotate(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, dim=-1)
            return y * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

        q, k, v = heads("q", d.num_heads), heads("k", d.num_kv_heads), heads("v", d.num_kv_heads)
        return rotate(q), rotate(k), v

    def attend(self, q, k, v, mask) -> torch.Tensor:
        """Masked attention, heads joined again [B, T, N H]."""
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)

    def rest(self, layer: dict, x, mixed) -> torch.Tensor:
        """What follows attention in a layer."""
        x = x + mixed @ layer["attention"]["o"]["kernel"]
        y, mlp = self.norm(x, layer["post_attention_norm"]), layer["mlp"]
        gated = F.silu(y @ mlp["gate"]["kernel"]) * (y @ mlp["up"]["kernel"])
        return x + gated @ mlp["down"]["kernel"]

    def norm(self, x, parameters: dict) -> torch.Tensor:
        """RMS norm."""
        return F.rms_norm(x, (x.shape[-1],), parameters["scale"], self.d.norm_eps)
