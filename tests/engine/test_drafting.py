"""What the engine drafts is what the drafter was trained to draft: same positions, context and features.

A wrong context costs speed only, so no comparison of outputs can show it. Here every block that a run drafts
is compared with the training view of the finished sequence, under teacher forcing.
"""

from __future__ import annotations

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.dspark import DSpark
from dspark_jax.engine import programs
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.requests import Request
from dspark_jax.engine.state import Drafts
from dspark_jax.speculation.verify_length import FixedLength, VerifyPolicy

pytestmark = pytest.mark.usefixtures("quick_compiles")

MAX_CONTEXT = 64
EXACT = 2e-5


def drafting_error(tiny, name: str, policy: VerifyPolicy | None = None) -> float:
    """Largest difference in a probability or confidence between a run's blocks and the training view."""
    requests = tiny.requests((3, 14), max_new_tokens=48, temperature=1.0)  # request i stays in slot i
    rounds = _drafted(tiny.engine(name, policy, slots=2, max_context=MAX_CONTEXT), requests)
    errors = []
    for slot, request in enumerate(requests):
        of_slot = [jax.tree.map(operator.itemgetter(slot), arrays) for arrays in rounds]
        blocks = [(int(anchor), block) for active, anchor, block in of_slot if active]
        errors += _errors(tiny, name, request, blocks)
    return max(errors)


def _drafted(engine: Engine, requests: list[Request]) -> list[tuple[np.ndarray, np.ndarray, Drafts]]:
    """(who drafted [B], anchor positions [B], blocks) of every round, told by the engine's own program."""
    rounds = []
    draft = programs.draft

    def tell(*arrays):
        rounds.append(jax.tree.map(np.asarray, arrays))

    def telling_draft(weights, state, drafts, slots_R, table_RN, **options):
        drafts = draft(weights, state, drafts, slots_R, table_RN, **options)
        drafted_B = jnp.zeros_like(state.active_B).at[slots_R].set(True, mode="drop") & state.active_B
        jax.debug.callback(tell, drafted_B, state.positions_B, drafts)
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "draft", telling_draft)
        for _ in engine.run(requests):
            pass
    jax.effects_barrier()
    return rounds


def _errors(tiny, name: str, request: Request, blocks: list[tuple[int, Drafts]]) -> list[float]:
    sequence = request.prompt_tokens + request.emitted
    probs_AGV, confidence_AG = _training_view(tiny, name, sequence, [anchor for anchor, _ in blocks])
    errors, compared = [], 0
    for row, (anchor, block) in enumerate(blocks):
        true = sequence[anchor + 1 : anchor + 1 + tiny.block_len]
        for k in range(tiny.block_len):
            if block.tokens_BG[:k].tolist() != true[:k]:
                break  # from here on the drafted tokens are not those of the training view
            errors.append(np.abs(block.probs_BGV[k] - probs_AGV[row, k]).max())
            errors.append(abs(block.confidence_logits_BG[k] - confidence_AG[row, k]))
            compared += k > 0
    assert compared > 5
    return errors


def _training_view(tiny, name: str, sequence: list[int], anchors: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [A, G, V] and confidence logits [A, G] at these anchors."""
    drafter = tiny.drafter(name)

    @jax.jit
    def view(tokens_1T, features_1TCD, anchors_1A):
        rows = drafter.drafter.training_rows(
            drafter.params,
            drafter.shared,
            tokens_BT=tokens_1T,
            loss_mask_BT=jnp.ones(tokens_1T.shape, bool),
            features_BTCD=features_1TCD,
            anchors_BA=anchors_1A,
            keep_BA=jnp.ones(anchors_1A.shape, bool),
        )
        logits_MV = rows.hidden_BMD[0] @ drafter.shared.head_DV
        if rows.latent_BMR is not None:
            logits_MV += rows.latent_BMR[0] @ rows.w2_RV
        shape = (anchors_1A.size, tiny.block_len)
        confidence = jnp.zeros(shape) if rows.confidence_logits_BM is None else rows.confidence_logits_BM
        return jax.nn.softmax(logits_MV).reshape(*shape, -1), confidence.reshape(shape)

    tokens_1T, anchors_1A = (np.zeros((1, MAX_CONTEXT), np.int32) for _ in range(2))
    tokens_1T[0, : len(sequence)] = sequence
    anchors_1A[0, : len(anchors)] = anchors
    features_1TCD = tiny.forward(tokens_1T, taps=drafter.drafter.config.taps).features_BTCD
    return jax.device_get(view(tokens_1T, features_1TCD, anchors_1A))


@pytest.mark.parametrize(
    "name", ["markov", "gated", "rnn", "reduced", "dflash", "eagle3", "eagle3-reduced", "mtp"]
)
def test_the_engine_drafts_as_in_training(tiny, name):
    assert drafting_error(tiny, name) < EXACT


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_with_fewer_verified_rows_than_drafted_tokens(tiny, name):
    assert drafting_error(tiny, name, FixedLength(length=1)) < EXACT


def test_a_shifted_position_is_caught(tiny, monkeypatch):
    right = DSpark.draft

    def shifted(self, params, shared, context, anchors_B, positions_B, sampler, paging):
        return right(self, params, shared, context, anchors_B, positions_B + 1, sampler, paging)

    monkeypatch.setattr(DSpark, "draft", shifted)

    assert drafting_error(tiny, "markov") > 100 * EXACT


@pytest.mark.parametrize("name", ["markov", "eagle3", "mtp"])
def test_a_context_that_is_not_extended_is_caught(tiny, monkeypatch, name):
    right = programs.commit

    def without_context(weights, state, output, verified, step, *, models):
        models = dataclasses.replace(models, drafter=None)
        return right(weights, state, output, verified, step, models=models)

    monkeypatch.setattr(programs, "commit", without_context)

    assert drafting_error(tiny, name) > 100 * EXACT


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_wrong_tokens_in_the_context_are_caught(tiny, monkeypatch, name):
    right = programs.commit

    def shifted(weights, state, output, verified, step, *, models):
        moved = dataclasses.replace(verified, tokens_BT=jnp.roll(verified.tokens_BT, -1, axis=1))
        return right(weights, state, output, moved, step, models=models)

    monkeypatch.setattr(programs, "commit", shifted)

    assert drafting_error(tiny, name) > 100 * EXACT


def test_a_context_of_the_wrong_layer_is_caught(tiny, monkeypatch):
    right = programs.Models.run_target

    def next_layer(self, weights, tokens_M, cache, paging):
        output = right(self, weights, tokens_M, cache, paging)
        return output.replace(features_BTCD=output.features_BTCD[:, :, ::-1])

    monkeypatch.setattr(programs.Models, "run_target", next_layer)

    assert drafting_error(tiny, "markov") > 100 * EXACT
