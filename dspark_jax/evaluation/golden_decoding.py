"""Greedy speculative decoding that keeps what every round drafted, for comparison with records."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.drafters.contract import DraftBlock, Params, SharedWeights
from dspark_jax.nn.kv_cache import KVCache
from dspark_jax.speculation.verify_length import ConfidenceThreshold, verify_lengths
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.decoder import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What a run did.

    Attributes:
      tokens: prompt and answer.
      lengths: per round, under the names of the record: committed, verified and accepted tokens.
      rounds: per round: the anchor's position and token, drafts, confidence logits, how many were verified.
    """

    tokens: list[int]
    lengths: dict[str, list[int]]
    rounds: list[dict[str, Any]]


class GreedyDecoder:
    """Compiled once for all prompts of a case. The engine has the same rounds, but keeps less of them.

    Args:
      target: the target's dimensions.
      target_params: its parameters.
      loaded: the drafter.
      shared: the embedding and LM head that it uses.
      prompt_bucket: longest prompt, in tokens.
      length: longest prompt and answer, in tokens.
    """

    def __init__(
        self,
        *,
        target: DecoderConfig,
        target_params: Params,
        loaded: LoadedDrafter,
        shared: SharedWeights,
        prompt_bucket: int,
        length: int,
    ):
        self._target, self._target_params = target, target_params
        self._drafter, self._params, self._shared = loaded.drafter, loaded.params, shared
        self._prompt_bucket = prompt_bucket
        self._length = length + 2 * (loaded.drafter.config.block_len + 1)  # a round may pass the end
        self._prefill, self._draft, self._verify = (
            jax.jit(function) for function in (self._run_prompt, self._run_draft, self._run_verify)
        )

    def run(self, prompt: list[int], *, rounds: int, threshold: float) -> Trace:
        """Decodes `rounds` rounds; drafts are verified up to the first confidence below `threshold`."""
        tokens = list(prompt)
        cache = KVCache.create(self._target.layers, num_pages=1, page_len=self._length)
        context = self._drafter.create_context(slots=1, num_pages=1, page_len=self._length)
        padded_1T = np.pad(np.asarray([prompt], np.int32), ((0, 0), (0, self._prompt_bucket - len(prompt))))
        anchor, cache, context = self._prefill(padded_1T, np.int32(len(prompt)), cache, context)
        tokens.append(int(anchor))
        lengths = {"acceptance_lengths": [], "proposal_lengths": [], "accepted_draft_lengths": []}
        told = []
        policy = ConfidenceThreshold(threshold=threshold)
        for _ in range(rounds):
            position = len(tokens) - 1
            anchor_1, position_1 = np.asarray([tokens[-1]], np.int32), np.asarray([position], np.int32)
            block = self._draft(anchor_1, position_1, context)
            verified = int(verify_lengths(policy, block.confidence_logits_BG, block.tokens_BG.shape[1])[0])
            choices_T, accepted, cache, context = self._verify(
                anchor_1, position_1, block, np.int32(verified), cache, context
            )
            committed = np.asarray(choices_T)[: int(accepted) + 1].tolist()
            tokens += committed
            for name, count in zip(lengths, (len(committed), verified, len(committed) - 1), strict=True):
                lengths[name].append(count)
            told.append(
                {
                    "start": position,
                    "anchor": int(anchor_1[0]),
                    "draft": block.tokens_BG[0].tolist(),
                    "conf": block.confidence_logits_BG[0].tolist(),
                    "n": verified,
                }
            )
        return Trace(tokens=tokens, lengths=lengths, rounds=told)

    def _forward(self, tokens_1T: Array, start_1: Array, cache: KVCache):
        """(most likely next tokens [T], features, cache)."""
        output: Any = Decoder(self._target).apply(
            {"params": self._target_params},
            tokens_1T,
            start_B=start_1,
            cache=cache,
            taps=self._drafter.config.taps,
        )
        return output.logits_BTV[0].argmax(-1).astype(jnp.int32), output.features_BTCD, output.cache

    def _extend(self, context, features_BTCD: Array, next_T: Array, start_1: Array, num_rows: Array):
        return self._drafter.extend_context(
            self._params,
            self._shared,
            context,
            features_BTCD=features_BTCD,
            next_tokens_BT=next_T[None],
            start_B=start_1,
            num_rows_B=num_rows[None],
        )

    def _run_prompt(self, tokens_1T: Array, num_tokens: Array, cache: KVCache, context):
        start_1 = jnp.zeros(1, jnp.int32)
        choices_T, features, cache = self._forward(tokens_1T, start_1, cache)
        anchor = choices_T[num_tokens - 1]
        next_T = jnp.roll(tokens_1T[0], -1).at[num_tokens - 1].set(anchor)
        return anchor, cache, self._extend(context, features, next_T, start_1, num_tokens)

    def _run_draft(self, anchor_1: Array, position_1: Array, context) -> DraftBlock:
        def greedy(logits_BV: Array, _: Array) -> tuple[Array, Array]:
            ids_B = logits_BV.argmax(-1).astype(jnp.int32)
            return ids_B, jax.nn.one_hot(ids_B, logits_BV.shape[-1])

        return self._drafter.draft(self._params, self._shared, context, anchor_1, position_1, greedy)

    def _run_verify(
        self, anchor_1: Array, position_1: Array, block: DraftBlock, verified: Array, cache, context
    ):
        tokens_1T = jnp.concatenate([anchor_1[:, None], block.tokens_BG], axis=1)
        choices_T, features, cache = self._forward(tokens_1T, position_1, cache)
        agree_G = (block.tokens_BG[0] == choices_T[:-1]) & (jnp.arange(len(choices_T) - 1) < verified)
        accepted = jnp.cumprod(agree_G.astype(jnp.int32)).sum()
        # Behind an accepted row stands the draft accepted there, behind the last one the new anchor.
        return (
            choices_T,
            accepted,
            cache,
            self._extend(context, features, choices_T, position_1, accepted + 1),
        )
