"""The pure functions that the engine compiles: take in a chunk of a prompt; draft; select; verify.

A round is draft, select, verify, accept, commit (spec section 6), for R requests compacted from the slots.
It is dispatched as three programs, without waiting in between: drafts lie in a buffer by slot, so that a
program that verifies knows nothing of how many requests drafted, and one that drafts nothing of how much will
be verified. That makes D + R + R M programs out of D R M, prices draft and verification apart, and keeps a
drafter that raises away from the target's state.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from dspark_jax.core.keys import Purpose, round_keys
from dspark_jax.core.sharding import by_device, divided_over
from dspark_jax.drafters.contract import Drafter
from dspark_jax.engine.state import (
    Admission,
    Drafts,
    EngineState,
    RoundResult,
    Weights,
    at_slots,
    put_at_slots,
)
from dspark_jax.nn.kv_cache import KVCache
from dspark_jax.nn.paged_cache import Paging, Rows
from dspark_jax.speculation.logprobs import TokenLogprobs, token_logprobs
from dspark_jax.speculation.rejection import (
    Verified,
    accepted_prefix,
    committed,
    rejected_law,
    residual,
    slot_uniforms,
)
from dspark_jax.speculation.sampling import Draw, distribution, sample
from dspark_jax.speculation.schedule import (
    Algorithm1,
    Lagged,
    Scheduler,
    admit,
    algorithm1,
    predicted_survival,
)
from dspark_jax.speculation.shard_sampling import best, sample_logits
from dspark_jax.speculation.verify_length import verify_lengths
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

    def run_target(self, weights: Weights, tokens_M: Array, cache: KVCache, paging: Paging) -> TargetOutput:
        """The target on M rows (B = 1), with the taps that the drafter reads."""
        taps = () if self.drafter is None else self.drafter.config.taps
        output: Any = self.decoder.apply(
            {"params": weights.target}, tokens_M[None], cache=cache, paging=paging, taps=taps
        )
        return output


def prefill(
    weights: Weights, state: EngineState, tokens_T: Array, admission: Admission, *, models: Models, draw: Draw
) -> tuple[EngineState, tuple[Array, TokenLogprobs | None]]:
    """Takes in a chunk of a prompt; the last one puts the request into its slot.

    Args:
      weights: parameters.
      state: pages and slots; donated.
      tokens_T: the chunk and the one token behind it (0 behind the last chunk), padded to a bucket + 1.
      admission: whose it is.
      models: the networks; static.
      draw: the most that any request asks for; static.

    Returns:
      (state, (the first token of the answer, which is the first anchor [1]; its log-probabilities, if `draw`
      reports them)).
    """
    T = tokens_T.shape[0] - 1
    start_1, num_rows_1, slot_1 = (x[None] for x in (admission.start, admission.num_tokens, admission.slot))
    rows = Rows.ragged(start_1, num_rows_1, T)
    paging = Paging(admission.table_1N, slot_1, rows, rows_per_slot=T)
    output = models.run_target(weights, tokens_T[:T], state.cache, paging)
    # The LM head runs on the last token only; the logits of the others are never computed.
    last_1D = jax.lax.dynamic_index_in_dim(
        output.hidden_BTD, admission.num_tokens - 1, axis=1, keepdims=False
    )
    logits_1V: Any = models.decoder.apply({"params": weights.target}, last_1D, method="unembed")
    end = admission.start + admission.num_tokens
    probs_1V = distribution(logits_1V, admission.sampling_1, draw=draw, positions=end[None])
    # The token at position n is drawn as the target's token of a round anchored at n - 1.
    drawn_1 = sample(round_keys(admission.key_1, end[None] - 1, Purpose.TARGET), probs_1V)
    is_new = admission.anchor < 0
    anchor_1 = jnp.where(is_new, drawn_1, admission.anchor)

    context = state.context
    if models.drafter is not None:
        next_T = tokens_T[1:]
        behind = jnp.where(admission.is_last, anchor_1[0], next_T[admission.num_tokens - 1])
        context = _extend(
            weights,
            models.drafter,
            context,
            output,
            next_T.at[admission.num_tokens - 1].set(behind),
            start_1,
            num_rows_1,
            paging,
        )
    emitted_1 = is_new[None].astype(jnp.int32)
    _, ended_1 = _ending(
        jnp.where(is_new, anchor_1, -1)[:, None], admission.remaining[None], admission.stops_W[None]
    )
    slot_values = (
        anchor_1,
        end[None],
        admission.is_last & ~ended_1,
        admission.remaining[None] - emitted_1,
        admission.stops_W[None],
        admission.key_1,
        admission.sampling_1,
    )
    slots = (
        state.anchors_B,
        state.positions_B,
        state.active_B,
        state.remaining_B,
        state.stops_BW,
        state.keys_B,
        state.sampling,
    )
    assert output.cache is not None
    logprobs = token_logprobs(logits_1V[:, None], anchor_1[:, None]) if draw >= Draw.LOGPROBS else None
    new_state = EngineState(output.cache, context, *put_at_slots(slots, slot_values, slot_1))
    return new_state, (anchor_1, logprobs)


def draft(
    weights: Weights,
    state: EngineState,
    drafts: Drafts,
    slots_R: Array,
    table_RN: Array,
    *,
    drafter: Drafter,
    draw: Draw,
) -> Drafts:
    """Proposes a block for each of these slots; the others keep theirs. `drafts` is donated."""
    assert weights.drafter is not None and weights.shared is not None
    anchors_R, positions_R, keys_R, sampling = at_slots(
        (state.anchors_B, state.positions_B, state.keys_B, state.sampling), slots_R
    )
    # A request of padding has no context, so that it costs little.
    positions_R = jnp.where(slots_R < len(state.active_B), positions_R, 0)
    keys_R = round_keys(keys_R, positions_R, Purpose.DRAFT)
    draft_to_target_V = weights.shared.draft_to_target_V
    # The laws of divided logits wait until the block is drawn: a sum over devices would be one per token.
    laws_later = draw == Draw.TEMPERATURE and bool(divided_over("vocab", drafter.config.vocab_size))

    def draw_row(logits_RV, keys_R, sampling, positions_R, draft_to_target_V) -> tuple[Array, Array]:
        probs_RV = distribution(
            logits_RV, sampling, draw=draw, positions=positions_R, draft_to_target_V=draft_to_target_V
        )
        return sample(keys_R, probs_RV), probs_RV

    def sampler(logits_RV: Array, k: Array) -> tuple[Array, Array]:
        if draw == Draw.GREEDY:
            ids_R, highest_R = best(logits_RV)
            return ids_R, jnp.where(jnp.isfinite(highest_R), 1.0, jnp.nan)[:, None]
        row_keys_R = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_R, k)
        if laws_later:
            return sample_logits(row_keys_R, logits_RV, sampling.temperature_B), logits_RV
        # Filters need the whole row: on a mesh it is gathered, once.
        draw_whole = by_device(draw_row, PartitionSpec(), PartitionSpec())
        return draw_whole(logits_RV, row_keys_R, sampling, positions_R + 1 + k, draft_to_target_V)

    paging = Paging(table_RN, slots_R, Rows.ragged(positions_R, jnp.zeros_like(positions_R), 0), 0)
    block = drafter.draft(
        weights.drafter, weights.shared, state.context, anchors_R, positions_R, sampler, paging
    )
    if laws_later:
        laws_BGV = distribution(block.probs_BGV, sampling, draw=draw)
        block = dataclasses.replace(block, probs_BGV=laws_BGV)
    q_RG = block.probs_BGV[..., 0]
    probs_BGV = drafts.probs_BGV
    if draw != Draw.GREEDY:
        q_RG = jnp.take_along_axis(block.probs_BGV, block.draft_ids_BG[..., None], axis=-1)[..., 0]
        probs_BGV = put_at_slots(probs_BGV, block.probs_BGV, slots_R)
    finite_RG = jnp.isfinite(block.probs_BGV.sum(-1)) & jnp.isfinite(block.confidence_logits_BG)
    small = (drafts.tokens_BG, drafts.q_BG, drafts.confidence_logits_BG, drafts.usable_B)
    new = (block.tokens_BG, q_RG, block.confidence_logits_BG, finite_RG.all(-1))
    tokens_BG, q_BG, confidence_BG, usable_B = put_at_slots(small, new, slots_R)
    return Drafts(tokens_BG, q_BG, probs_BGV, confidence_BG, usable_B)


def select(
    active_B: Array,
    drafts: Drafts,
    slots_R: Array,
    drafted_R: Array,
    budget: Array,
    round_ms_N: Array,
    scaling_R2G: Array,
    *,
    scheduler: Scheduler,
) -> tuple[Array, Array]:
    """How many tokens of each request's block to verify.

    Args:
      active_B: slots whose request has not come to its end.
      drafts: their latest blocks.
      slots_R: the requests of the step.
      drafted_R: which of them drafted in this round.
      budget: tokens for all of them together (`Lagged`).
      round_ms_N: [R G + 1], time of the round with n verified tokens (`Algorithm1`).
      scaling_R2G: of the calibration, for each request.
      scheduler: who decides; static.

    Returns:
      (lengths int32 [R], survival [R, G]).
    """
    confidence_RG, usable_R, active_R = at_slots(
        (drafts.confidence_logits_BG, drafts.usable_B, active_B), slots_R
    )
    active_R &= slots_R < len(active_B)
    ready_R = drafted_R & usable_R & active_R
    survival_RG = predicted_survival(confidence_RG, scaling_R2G)
    match scheduler:
        case Lagged():
            lengths_R = admit(survival_RG, ready_R, budget)
        case Algorithm1():
            lengths_R = algorithm1(survival_RG, ready_R, active_R.sum(), round_ms_N)
        case policy:
            lengths_R = verify_lengths(policy, confidence_RG, confidence_RG.shape[1])
    return jnp.where(ready_R, lengths_R, 0), survival_RG


def verify_round(
    weights: Weights,
    state: EngineState,
    drafts: Drafts | None,
    slots_R: Array,
    table_RN: Array,
    lengths_R: Array,
    survival_RG: Array,
    *,
    models: Models,
    num_rows: int,
    longest: int,
    draw: Draw,
) -> tuple[EngineState, RoundResult]:
    """Verifies, accepts and commits.

    Args:
      weights: parameters.
      state: pages and slots; donated.
      drafts: latest blocks; None without a drafter.
      slots_R: the requests of the step, those of padding last.
      table_RN: their pages.
      lengths_R: drafted tokens to verify.
      survival_RG: handed on to the host.
      models: the networks; static.
      num_rows: M, at least the active requests and their lengths together; static.
      longest: the largest length that occurs; static.
      draw: the most that any request asks for; static.
    """
    step = lay_out(
        state,
        drafts,
        slots_R,
        table_RN,
        lengths_R,
        block_len=models.block_len,
        num_rows=num_rows,
        longest=longest,
    )
    output = models.run_target(weights, step.tokens_M, state.cache, step.paging)
    verified = accept(weights, state, drafts, step, output.logits_BTV[0], longest=longest, draw=draw)
    new_state = commit(weights, state, output, verified, step, models=models)
    return new_state, RoundResult(
        tokens_RT=jnp.where(step.active_R[:, None], verified.tokens_BT, -1),
        accepted_R=verified.accepted_B,
        verified_R=step.lengths_R,
        survival_RG=survival_RG,
        confidence_logits_RG=step.drafts_R.confidence_logits_BG,
        usable_R=step.drafts_R.usable_B,
        logprobs=_logprobs(output.logits_BTV[0], verified, step) if draw >= Draw.LOGPROBS else None,
    )


def _logprobs(logits_MV: Array, verified: Verified, step: Step) -> TokenLogprobs:
    """Those of the committed tokens, request by request."""
    rows = step.paging.rows
    empty = jnp.zeros((len(step.active_R), step.paging.rows_per_slot, logits_MV.shape[1]))
    logits_RTV = empty.at[rows.slots_M, rows.places_M].set(logits_MV, mode="drop")
    return token_logprobs(logits_RTV, verified.tokens_BT)


@flax.struct.dataclass
class Step:
    """The flattened rows of a verification.

    Attributes:
      paging: whose they are and where they lie.
      tokens_M: what they read.
      active_R: requests that have not come to their end.
      lengths_R: drafted tokens of each that are verified.
      drafts_R: their blocks, but for the laws.
    """

    paging: Paging
    tokens_M: Array
    active_R: Array
    lengths_R: Array
    drafts_R: Drafts


def lay_out(
    state: EngineState,
    drafts: Drafts | None,
    slots_R: Array,
    table_RN: Array,
    lengths_R: Array,
    *,
    block_len: int,
    num_rows: int,
    longest: int,
) -> Step:
    """The rows [anchor, x_1 .. x_l] of every active request; see `verify_round`."""
    R = len(slots_R)
    anchors_R, positions_R, active_R = at_slots((state.anchors_B, state.positions_B, state.active_B), slots_R)
    active_R &= slots_R < len(state.active_B)
    if drafts is None:
        drafts_R = Drafts.create(slots=R, block_len=block_len, vocab_size=0)
    else:
        drafts_R = at_slots(dataclasses.replace(drafts, probs_BGV=drafts.usable_B), slots_R)
    # No law can be computed with numbers that are none: such a block is not verified, whoever wants it.
    lengths_R = jnp.where(active_R & drafts_R.usable_B, lengths_R, 0)
    if longest == 0:  # every request stands on its own row, whether active or not
        requests_R = jnp.where(active_R, jnp.arange(R), R)
        rows = Rows(requests_R, jnp.where(active_R, positions_R, 0), jnp.zeros(R, jnp.int32))
    else:
        rows = Rows.ragged(positions_R, jnp.where(active_R, 1 + lengths_R, 0), num_rows)
    block_RT = jnp.concatenate([anchors_R[:, None], drafts_R.tokens_BG], axis=1)
    return Step(
        paging=Paging(table_RN, slots_R, rows, rows_per_slot=longest + 1),
        tokens_M=block_RT.at[rows.slots_M, rows.places_M].get(mode="clip"),
        active_R=active_R,
        lengths_R=lengths_R,
        drafts_R=drafts_R,
    )


def accept(
    weights: Weights,
    state: EngineState,
    drafts: Drafts | None,
    step: Step,
    logits_MV: Array,
    *,
    longest: int,
    draw: Draw,
) -> Verified:
    """Rejection sampling: which drafts stay, and the target's own token."""
    paging, drafts_R, lengths_R = step.paging, step.drafts_R, step.lengths_R
    rows, slots_R = paging.rows, paging.slots_R
    R, G = drafts_R.tokens_BG.shape
    V = logits_MV.shape[1]

    def of_requests(x_M: Array) -> Array:  # the rows that judge a draft token
        empty = jnp.zeros((R, longest), x_M.dtype)
        return empty.at[rows.slots_M, rows.places_M].set(x_M, mode="drop")

    judged_M = drafts_R.tokens_BG.at[rows.slots_M, rows.places_M].get(mode="clip") if longest else None
    if draw == Draw.GREEDY:
        best_M = jnp.argmax(logits_MV, axis=-1).astype(jnp.int32)
        accepted_R = jnp.zeros(R, jnp.int32)
        if judged_M is not None:
            right_RG = of_requests(best_M == judged_M) & (jnp.arange(longest) < lengths_R[:, None])
            accepted_R = jnp.cumprod(right_RG.astype(jnp.int32), axis=1).sum(1)
        return committed(drafts_R.tokens_BG, accepted_R, paging.last_rows(best_M, accepted_R + 1))

    keys_R, positions_R, sampling = at_slots((state.keys_B, state.positions_B, state.sampling), slots_R)
    sampling_M = at_slots(sampling, rows.slots_M)
    probs_MV = distribution(logits_MV, sampling_M, draw=draw, positions=rows.positions_M + 1)
    accepted_R, q_RV = jnp.zeros(R, jnp.int32), jnp.zeros((R, V))
    if judged_M is not None:
        assert drafts is not None and weights.shared is not None
        p_RG = of_requests(jnp.take_along_axis(probs_MV, judged_M[:, None], axis=1)[:, 0])
        # Drawn for all G slots, so that a slot's uniform depends on no shape.
        uniforms_RG = slot_uniforms(round_keys(keys_R, positions_R, Purpose.ACCEPT), G)
        accepted_R = accepted_prefix(p_RG, drafts_R.q_BG[:, :longest], uniforms_RG[:, :longest], lengths_R)
        law_RV = drafts.probs_BGV.at[slots_R, accepted_R].get(mode="clip")
        q_RV = rejected_law(law_RV, accepted_R < lengths_R, weights.shared.draft_to_target_V, V)
    p_RV = paging.last_rows(probs_MV, accepted_R + 1)
    own_R = sample(round_keys(keys_R, positions_R, Purpose.TARGET), residual(p_RV, q_RV))
    return committed(drafts_R.tokens_BG, accepted_R, own_R)


def commit(
    weights: Weights,
    state: EngineState,
    output: TargetOutput,
    verified: Verified,
    step: Step,
    *,
    models: Models,
) -> EngineState:
    """Moves every active request to its new anchor; the drafter's context takes in the verified rows.

    Rows of rejected tokens stay behind the new anchor's position: the next round overwrites them before
    anything attends to them.
    """
    paging = step.paging
    slots_R = jnp.where(step.active_R, paging.slots_R, len(state.active_B))
    positions_R, remaining_R, stops_RW = at_slots(
        (state.positions_B, state.remaining_B, state.stops_BW), slots_R
    )
    context = state.context
    if models.drafter is not None:
        rows = paging.rows
        next_M = verified.tokens_BT.at[rows.slots_M, rows.places_M].get(mode="clip")
        context = _extend(
            weights,
            models.drafter,
            context,
            output,
            jnp.maximum(next_M, 0),
            positions_R,
            verified.num_committed_B,
            dataclasses.replace(paging, slots_R=slots_R),
        )
    emitted_R, ended_R = _ending(verified.tokens_BT, remaining_R, stops_RW)
    old = (state.anchors_B, state.positions_B, state.remaining_B, state.active_B)
    new = (
        verified.anchor_B,
        positions_R + verified.num_committed_B,
        remaining_R - emitted_R,
        ~ended_R,
    )
    anchors_B, positions_B, remaining_B, active_B = put_at_slots(old, new, slots_R)
    assert output.cache is not None
    return dataclasses.replace(
        state,
        cache=output.cache,
        context=context,
        anchors_B=anchors_B,
        positions_B=positions_B,
        remaining_B=remaining_B,
        active_B=active_B,
    )


def _extend(
    weights: Weights,
    drafter: Drafter,
    context,
    output: TargetOutput,
    next_tokens_M: Array,
    start_R: Array,
    num_rows_R: Array,
    paging: Paging,
):
    """The drafter's context with the rows of a step."""
    assert weights.drafter is not None and weights.shared is not None
    return drafter.extend_context(
        weights.drafter,
        weights.shared,
        context,
        features_BTCD=output.features_BTCD,
        next_tokens_BT=next_tokens_M[None],
        start_B=start_R,
        num_rows_B=num_rows_R,
        paging=paging,
    )


def _ending(tokens_RT: Array, remaining_R: Array, stops_RW: Array) -> tuple[Array, Array]:
    """(tokens that count, whether the request ends with them), for committed tokens filled up with -1."""
    there_RT = tokens_RT >= 0
    stops_RT = there_RT & (tokens_RT[..., None] == stops_RW[:, None]).any(-1)
    before_a_stop_RT = jnp.cumsum(stops_RT, axis=1) - stops_RT == 0
    emitted_R = jnp.sum(there_RT & before_a_stop_RT, axis=1)
    ended_R = stops_RT.any(1) | (emitted_R >= remaining_R)
    return emitted_R, ended_R
