"""The pure functions that the engine compiles: prefill one request; run one round for all slots.

A round is draft, choose, verify, accept, commit (spec section 6). Each stage is a function of its own, so
that benchmarks can time it and tests can take it apart; `speculative_round` is their composition.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.core.keys import Purpose, round_keys
from dspark_jax.drafters.contract import DraftBlock, Drafter
from dspark_jax.engine.state import EngineState, RoundResult, Weights, put_row
from dspark_jax.nn.kv_cache import KVCache
from dspark_jax.speculation.logprobs import TokenLogprobs, token_logprobs
from dspark_jax.speculation.rejection import Verified, verify_block
from dspark_jax.speculation.sampling import Draw, SamplingParams, distribution, sample
from dspark_jax.speculation.verify_length import VerifyPolicy, verify_lengths
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.decoder import Decoder, TargetOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """The static half of a program: which networks, in which precision.

    Attributes:
      target: the target's dimensions.
      drafter: pure functions of the drafter, or None for plain decoding.
      dtype: dtype in which the target's matrix products read their inputs.
    """

    target: DecoderConfig
    drafter: Drafter | None
    dtype: DTypeLike = jnp.float32

    @property
    def block_len(self) -> int:
        """G; 0 without a drafter."""
        return 0 if self.drafter is None else self.drafter.config.block_len

    @property
    def decoder(self) -> Decoder:
        """The target's module."""
        return Decoder(self.target, self.dtype)

    def run_target(self, weights: Weights, tokens_BT: Array, start_B: Array, cache: KVCache) -> TargetOutput:
        """The target on T tokens per request, with the taps that the drafter reads."""
        taps = () if self.drafter is None else self.drafter.config.taps
        output: Any = self.decoder.apply(
            {"params": weights.target}, tokens_BT, start_B=start_B, cache=cache, taps=taps
        )
        return output


def prefill(
    weights: Weights,
    state: EngineState,
    slot: Array,
    tokens_1T: Array,
    num_tokens: Array,
    key_1: Array,
    sampling_1: SamplingParams,
    *,
    models: Models,
    draw: Draw,
) -> tuple[EngineState, tuple[Array, TokenLogprobs | None]]:
    """Runs a prompt and puts the request into a slot.

    Args:
      weights: parameters.
      state: the slots; donated.
      slot: number of a free slot, int32.
      tokens_1T: the prompt, right padded to a bucket.
      num_tokens: its true length, int32.
      key_1: the request's key.
      sampling_1: its sampling parameters.
      models: the networks; static.
      draw: the most that any request asks for; static.

    Returns:
      (state, (the first token of the answer [1], which is the first anchor; its log-probabilities, if `draw`
      reports them)).
    """
    T = tokens_1T.shape[1]
    start_1 = jnp.zeros(1, jnp.int32)
    dtype = state.cache.keys_BKSH[0].dtype
    cache = KVCache.create(models.target.layers, batch=1, length=T, dtype=dtype)
    output = models.run_target(weights, tokens_1T, start_1, cache)
    # The LM head runs on the last token only; the logits of the others are never computed.
    last_1D = jax.lax.dynamic_index_in_dim(output.hidden_BTD, num_tokens - 1, axis=1, keepdims=False)
    logits_1V: Any = models.decoder.apply({"params": weights.target}, last_1D, method="unembed")
    position_1 = num_tokens[None]
    probs_1V = distribution(logits_1V, sampling_1, draw=draw, positions=position_1)
    # The token at position n is drawn as the target's token of a round anchored at n - 1.
    anchor_1 = sample(round_keys(key_1, position_1 - 1, Purpose.TARGET), probs_1V)

    context = state.context
    if models.drafter is not None:
        assert weights.drafter is not None and weights.shared is not None
        context_1 = models.drafter.extend_context(
            weights.drafter,
            weights.shared,
            models.drafter.create_context(batch=1, length=T),
            features_BTCD=output.features_BTCD,
            next_tokens_BT=jnp.roll(tokens_1T, -1, axis=1).at[:, num_tokens - 1].set(anchor_1),
            start_B=start_1,
            num_rows_B=position_1,
        )
        context = put_row(context, context_1, slot)
    return EngineState(
        cache=put_row(state.cache, output.cache, slot),
        context=context,
        anchors_B=state.anchors_B.at[slot].set(anchor_1[0]),
        positions_B=state.positions_B.at[slot].set(num_tokens),
        active_B=state.active_B.at[slot].set(True),
        keys_B=state.keys_B.at[slot].set(key_1[0]),
        sampling=put_row(state.sampling, sampling_1, slot),
    ), (anchor_1, _logprobs(logits_1V[:, None], anchor_1[:, None], draw))


def draft(weights: Weights, state: EngineState, *, drafter: Drafter, draw: Draw) -> DraftBlock:
    """Proposes a block for every slot."""
    assert weights.drafter is not None and weights.shared is not None
    keys_B = round_keys(state.keys_B, state.positions_B, Purpose.DRAFT)
    draft_to_target_V = weights.shared.draft_to_target_V

    def sampler(logits_BV: Array, k: Array) -> tuple[Array, Array]:
        probs_BV = distribution(
            logits_BV,
            state.sampling,
            draw=draw,
            positions=state.positions_B + 1 + k,
            draft_to_target_V=draft_to_target_V,
        )
        return sample(jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, k), probs_BV), probs_BV

    return drafter.draft(
        weights.drafter, weights.shared, state.context, state.anchors_B, state.positions_B, sampler
    )


def verify(
    weights: Weights, state: EngineState, block: DraftBlock, *, models: Models, bucket: int
) -> TargetOutput:
    """The target on [anchor, x_1 .. x_bucket] of every slot; writes these rows into the cache."""
    tokens_BT = jnp.concatenate([state.anchors_B[:, None], block.tokens_BG[:, :bucket]], axis=1)
    return models.run_target(weights, tokens_BT, state.positions_B, state.cache)


def accept(
    weights: Weights,
    state: EngineState,
    block: DraftBlock,
    logits_BTV: Array,
    verify_len_B: Array,
    *,
    draw: Draw,
) -> Verified:
    """Rejection sampling: which drafts stay, and the target's own token."""
    positions_BT = state.positions_B[:, None] + 1 + jnp.arange(logits_BTV.shape[1])
    return verify_block(
        distribution(logits_BTV, state.sampling, draw=draw, positions=positions_BT),
        block.probs_BGV,
        block.draft_ids_BG,
        None if weights.shared is None else weights.shared.draft_to_target_V,
        verify_len_B,
        round_keys(state.keys_B, state.positions_B, Purpose.ACCEPT),
        round_keys(state.keys_B, state.positions_B, Purpose.TARGET),
    )


def commit(
    weights: Weights, state: EngineState, output: TargetOutput, verified: Verified, *, drafter: Drafter | None
) -> EngineState:
    """Moves every active slot to its new anchor; the drafter's context takes in the verified rows.

    Rows of rejected tokens stay behind the new anchor's position: the next round overwrites them before
    anything attends to them.
    """
    context = state.context
    if drafter is not None:
        assert weights.drafter is not None and weights.shared is not None
        rows = output.features_BTCD.shape[1]
        context = drafter.extend_context(
            weights.drafter,
            weights.shared,
            context,
            features_BTCD=output.features_BTCD,
            next_tokens_BT=jnp.maximum(verified.tokens_BT[:, :rows], 0),
            start_B=state.positions_B,
            num_rows_B=verified.num_committed_B,
        )
    return dataclasses.replace(
        state,
        cache=output.cache,
        context=context,
        anchors_B=jnp.where(state.active_B, verified.anchor_B, state.anchors_B),
        positions_B=state.positions_B + jnp.where(state.active_B, verified.num_committed_B, 0),
    )


def speculative_round(
    weights: Weights,
    state: EngineState,
    *,
    models: Models,
    policy: VerifyPolicy,
    buckets: tuple[int, ...],
    draw: Draw,
) -> tuple[EngineState, RoundResult]:
    """One round for all slots.

    Args:
      weights: parameters.
      state: the slots; donated.
      models: the networks; static.
      policy: how many drafts to verify; static.
      buckets: declared verify lengths, ascending, the largest at least what the policy can choose; static.
      draw: the most that any request asks for; static.
    """
    assert models.drafter is not None, "plain_round decodes without a drafter"
    block = draft(weights, state, drafter=models.drafter, draw=draw)
    verify_len_B = verify_lengths(policy, block.confidence_logits_BG, models.block_len)

    def with_bucket(bucket: int):
        def run(state: EngineState) -> tuple[EngineState, Verified, TokenLogprobs | None]:
            output = verify(weights, state, block, models=models, bucket=bucket)
            verified = accept(weights, state, block, output.logits_BTV, verify_len_B, draw=draw)
            logprobs = _logprobs(output.logits_BTV, verified.tokens_BT, draw)
            return commit(weights, state, output, verified, drafter=models.drafter), verified, logprobs

        return run

    longest = jnp.max(jnp.where(state.active_B, verify_len_B, 0))
    choice = jnp.searchsorted(jnp.asarray(buckets), longest)
    new_state, verified, logprobs = jax.lax.switch(choice, [with_bucket(bucket) for bucket in buckets], state)
    return new_state, RoundResult(
        tokens_BT=verified.tokens_BT,
        accepted_B=verified.accepted_B,
        verified_B=verify_len_B,
        confidence_logits_BG=block.confidence_logits_BG,
        logprobs=logprobs,
    )


def plain_round(
    weights: Weights, state: EngineState, *, models: Models, draw: Draw
) -> tuple[EngineState, RoundResult]:
    """Plain decoding: a round that verifies nothing and drafts nothing."""
    B = state.anchors_B.shape[0]
    nothing = DraftBlock(
        draft_ids_BG=jnp.zeros((B, 0), jnp.int32),
        tokens_BG=jnp.zeros((B, 0), jnp.int32),
        probs_BGV=jnp.zeros((B, 0, models.target.vocab_size)),
        confidence_logits_BG=jnp.zeros((B, 0)),
    )
    none_B = jnp.zeros(B, jnp.int32)
    output = verify(weights, state, nothing, models=models, bucket=0)
    verified = accept(weights, state, nothing, output.logits_BTV, none_B, draw=draw)
    new_state = commit(weights, state, output, verified, drafter=None)
    return new_state, RoundResult(
        tokens_BT=verified.tokens_BT,
        accepted_B=none_B,
        verified_B=none_B,
        confidence_logits_BG=nothing.confidence_logits_BG,
        logprobs=_logprobs(output.logits_BTV, verified.tokens_BT, draw),
    )


def _logprobs(logits_BTV: Array, tokens_BT: Array, draw: Draw) -> TokenLogprobs | None:
    """Nothing unless some request asks for it, so that a program without it pays nothing."""
    return token_logprobs(logits_BTV, tokens_BT) if draw >= Draw.LOGPROBS else None
