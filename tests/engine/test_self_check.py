"""A drafter that knows its target's answers by heart, and the same one put together wrongly in every way."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.targets import LoadedTarget
from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.drafters.config import DSparkConfig, Layout
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.engine import self_check as module
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.load import make_engine
from dspark_jax.engine.self_check import refuse_misfit, self_check
from dspark_jax.testing.tiny import randomised, tiny_target
from dspark_jax.testing.tokenizer import CHATML, tiny_tokenizer
from dspark_jax.training.config import LossConfig
from dspark_jax.training.features import target_features
from dspark_jax.training.state import TrainBatch
from dspark_jax.training.step import loss_sums

G, MASK = 3, 1
THINKS = CHATML + "{% if not enable_thinking %}--{% endif %}"
PLAIN = {"enable_thinking": False}
PROMPTS = ("ab", "q?", "x 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, the drafter that knows its answers in the mode PLAIN, and an engine.

    The engine decodes plainly: greedy answers are the same, and need not be compiled for every change.
    """

    target: LoadedTarget
    draft: LoadedDrafter
    engine: Engine

    def check(self, mode=PLAIN, **changes) -> float:
        """The check of a drafter that differs in these fields of its configuration."""
        config = dataclasses.replace(self.draft.drafter.config, **changes)
        draft = dataclasses.replace(self.draft, drafter=DSpark(config))
        return self_check(self.engine, self.target, draft, chat(self.target, mode))


def chat(target: LoadedTarget, mode) -> ChatTemplate:
    return ChatTemplate(tokenizer=target.tokenizer, options=mode)


@pytest.fixture(scope="module", autouse=True)
def short_prompts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PROMPTS", PROMPTS)
        yield


@pytest.fixture(scope="module")
def pair(short_prompts, quick_compiles) -> Pair:
    tiny = tiny_target(
        vocab_size=259, num_hidden_layers=4, tie_word_embeddings=False, max_position_embeddings=128, seed=14
    )
    target = LoadedTarget(
        config=tiny.config,
        params=tiny.params,
        tokenizer=tiny_tokenizer(THINKS),
        identity="tiny",
        eos_ids=(),
        generation={},
        hf_config=tiny.hf_config,
    )
    config = DSparkConfig(
        target_vocab_size=259,
        vocab_size=259,
        num_layers=1,
        block=tiny.config.block,
        taps=(0, 2),
        block_len=G,
        mask_token=MASK,
        head=None,
        confidence=None,
    )
    fresh = randomised(jax.eval_shape(DSpark(config).init, jax.random.key(0)), seed=3)
    draft = LoadedDrafter(
        drafter=DSpark(config), params=fresh, draft_to_target_np=None, embedding_VD=None, head_DV=None
    )
    engine = make_engine(target, None, EngineConfig(slots=3, max_context=80, smallest_prefill=32))
    answers = module._answers(engine, target, chat(target, PLAIN))
    return Pair(target=target, draft=learnt_by_heart(target, draft, answers), engine=engine)


def learnt_by_heart(target: LoadedTarget, draft: LoadedDrafter, answers) -> LoadedDrafter:
    """The drafter after some steps on every anchor of the answers."""
    assert all(len(set(request.emitted)) > 6 for request in answers), "answers that anything could predict"
    replay = module.Replay(answers, target, draft)
    batch = TrainBatch(**replay.batch, target=None)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def train(params):
        drafter = draft.drafter
        features = target_features(
            target.params, batch.tokens_BT, config=target.config, taps=drafter.config.taps, dtype=jnp.float32
        )

        def loss(params):
            value, sums = loss_sums(
                params,
                batch,
                features,
                replay._shared,
                drafter=drafter,
                config=LossConfig(ce=1.0, tv=0.0, confidence=0.0, decay_len=100.0, chunk=72),
            )
            return value / sums.weight

        def step(_, carry):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, 300, step, (params, optimizer.init(params)))[0]

    return dataclasses.replace(draft, params=train(draft.params))


def test_a_drafter_that_fits_passes(pair):
    assert pair.check() > 2


def test_taps_off_by_one(pair):
    with pytest.raises(InputError, match=r"with taps \(0, 2\): its taps looks wrong"):
        pair.check(taps=(1, 3))


def test_the_other_layout(pair):
    with pytest.raises(InputError, match="in the layout anchor-first: its layout looks wrong"):
        pair.check(layout=Layout.FILL_IN, block_len=G - 1)


def test_another_mask_token(pair, monkeypatch):
    monkeypatch.setattr(module, "DOING_BADLY", G)  # in so small a network the mask's embedding matters little
    with pytest.raises(InputError, match="with mask token 1: its mask id looks wrong"):
        pair.check(mask_token=200)


def test_another_mode_of_the_template(pair):
    with pytest.raises(InputError, match=r"in the mode .*: its template looks wrong"):
        pair.check(mode={"enable_thinking": True})


def test_a_drafter_without_a_clue(pair):
    fresh = randomised(pair.draft.params, seed=8)
    with pytest.raises(
        InputError, match=r"0\.\d\d tokens of a block are accepted, and no more with other values of taps"
    ):
        dataclasses.replace(pair, draft=dataclasses.replace(pair.draft, params=fresh)).check()


def test_no_room_for_a_prompt_is_no_verdict(pair, monkeypatch):
    monkeypatch.setattr(module, "PROMPTS", ("x" * 100,))
    assert np.isnan(pair.check())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"taps": (0, 4)}, r"taps \(0, 4\) of a target with 4 layers"),
        ({"mask_token": 0}, "mask token 0, the target's padding"),
        ({"target_vocab_size": 300, "vocab_size": 259}, r"vocabulary and width \(300, 16\)"),
    ],
)
def test_what_needs_no_trial_is_refused_before_it(pair, changes, problem):
    config = dataclasses.replace(pair.draft.drafter.config, **changes)
    with pytest.raises(InputError, match=problem):
        refuse_misfit(pair.target, dataclasses.replace(pair.draft, drafter=DSpark(config)))


@pytest.mark.parametrize("mask_token", [-1, 259])
def test_mask_tokens_outside_the_vocabulary_do_not_exist(pair, mask_token):
    with pytest.raises(InputError, match=f"mask_token={mask_token}"):
        dataclasses.replace(pair.draft.drafter.config, mask_token=mask_token)
