"""A drafter that knows a few texts by heart, and the same one put together wrongly in every way."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.tap_sketches import layer_sketches, sketches_of
from dspark_jax.checkpoints.targets import LoadedTarget
from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.drafters.config import DSparkConfig, Layout
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.engine import self_check as module
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.load import make_engine
from dspark_jax.engine.self_check import Trial, refuse_misfit, self_check
from dspark_jax.testing.loaded import as_loaded_drafter, as_loaded_target
from dspark_jax.testing.tiny import DRAFTERS, TinyTarget, randomised, tiny_drafter, tiny_target
from dspark_jax.testing.tokenizer import CHATML, tiny_tokenizer

G, MASK, MAX_CONTEXT = 3, 1, 120
THINKS = CHATML + "{% if not enable_thinking %}<think>{% endif %}"
CONVERSATIONS = (
    ("ab", "The quick brown fox jumps over the lazy dog."),
    ("q?", "Sphinx of black quartz, judge my vow: 12345."),
    ("x 1", "Pack my box with five dozen liquor jugs, now!"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, the drafter that knows its distributions along the texts, without thinking, and an engine."""

    target: LoadedTarget
    draft: LoadedDrafter
    engine: Engine

    def check(self, *, thinking=False, template=None, **changes) -> float:
        """The check of a drafter that differs in these fields of its configuration."""
        config = dataclasses.replace(self.draft.drafter.config, **changes)
        draft = dataclasses.replace(self.draft, drafter=DSpark(config), template=template)
        chat = ChatTemplate.of(self.target.tokenizer, thinking=thinking)
        return self_check(self.engine, self.target, draft, chat)


@pytest.fixture(scope="module", autouse=True)
def short_texts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CONVERSATIONS", CONVERSATIONS)
        yield


@pytest.fixture(scope="module")
def pair(short_texts, quick_compiles) -> Pair:
    tiny = tiny_target(
        vocab_size=259, num_hidden_layers=4, tie_word_embeddings=False, max_position_embeddings=128, seed=14
    )
    tiny.params["lm_head"]["kernel"] *= 2
    target = as_loaded_target(tiny, tokenizer=tiny_tokenizer(THINKS), eos_ids=())
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
    engine = make_engine(target, None, EngineConfig(max_context=MAX_CONTEXT, smallest_prefill=32))
    return Pair(target=target, draft=learnt_by_heart(target, draft), engine=engine)


@pytest.fixture(scope="module")
def recorded(pair) -> Pair:
    """The same with sketches of what its taps read."""
    sketches_CS = sketches_of((0, 2), layer_sketches(pair.target.config, pair.target.params))
    return dataclasses.replace(pair, draft=dataclasses.replace(pair.draft, tap_sketches_CS=sketches_CS))


def learnt_by_heart(target: LoadedTarget, draft: LoadedDrafter) -> LoadedDrafter:
    """The drafter after some steps on every anchor of the trial itself."""
    trial = Trial(target, draft, ChatTemplate.of(target.tokenizer), max_tokens=MAX_CONTEXT)
    drafter, optimizer = draft.drafter, optax.adam(1e-2)
    features_BTCD = jnp.stack([trial.features[tap] for tap in drafter.config.taps], axis=2)

    def loss(params):
        accepted_BAG = module._acceptance(
            drafter, params, trial.shared, features_BTCD, trial.probs_BTV, trial.batch
        )
        return -jnp.nanmean(accepted_BAG)

    @jax.jit
    def train(params):
        def step(_, carry):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, 400, step, (params, optimizer.init(params)))[0]

    return dataclasses.replace(draft, params=train(draft.params))


def test_a_drafter_that_fits_passes(pair):
    assert pair.check() > 2
    assert pair.check(template="chat(enable_thinking=False)") > 2


def test_all_taps_off_by_one(pair):
    with pytest.raises(InputError, match=r"with taps \(0, 2\): its taps looks wrong"):
        pair.check(taps=(1, 3))


def test_one_tap_off_by_one(pair, monkeypatch):
    monkeypatch.setattr(module, "DOING_BADLY", 1)
    with pytest.raises(InputError, match=r"with taps \(0, 2\): its taps looks wrong"):
        pair.check(taps=(0, 3))


@pytest.mark.parametrize(
    ("taps", "diagnosis"),
    [
        ((-1, 2), "tap 0 reads layer -1, the drafter was trained on layer 0;"),
        ((1, 2), "tap 0 reads layer 1, the drafter was trained on layer 0;"),
        ((0, 1), "tap 1 reads layer 1, the drafter was trained on layer 2;"),
        ((0, 3), "tap 1 reads layer 3, the drafter was trained on layer 2;"),
        ((2, 0), "layer 0; tap 1 reads layer 0, the drafter was trained on layer 2;"),
    ],
)
def test_one_tap_off_by_one_as_the_checkpoint_says(recorded, taps, diagnosis):
    with pytest.raises(InputError) as refusal:
        recorded.check(taps=taps)
    assert diagnosis.rstrip(";") in str(refusal.value) and "--no-self-check" in str(refusal.value)


def test_taps_as_the_checkpoint_says_them_pass(recorded, caplog):
    assert recorded.check() > 2
    assert not caplog.records


def test_another_target_than_in_training_is_said(recorded, caplog):
    strange_CS = recorded.draft.tap_sketches_CS[:, ::-1]
    draft = dataclasses.replace(recorded.draft, tap_sketches_CS=strange_CS)
    assert dataclasses.replace(recorded, draft=draft).check() > 2
    assert "was trained with another target" in caplog.text


def test_the_other_layout(pair):
    with pytest.raises(InputError, match="in the layout anchor-first: its layout looks wrong"):
        pair.check(layout=Layout.FILL_IN, block_len=G - 1)


def test_another_mask_token(pair, monkeypatch):
    monkeypatch.setattr(module, "DOING_BADLY", 1)  # in so small a network the mask's embedding matters little
    with pytest.raises(InputError, match="with mask token 1: its mask id looks wrong"):
        pair.check(mask_token=200)


def test_another_mode_of_the_template_as_the_checkpoint_says(pair):
    with pytest.raises(InputError, match=r"trained on chat\(enable_thinking=False\)"):
        pair.check(thinking=True, template="chat(enable_thinking=False)")


def test_another_mode_of_the_template_as_the_trial_shows(pair, monkeypatch):
    monkeypatch.setattr(module, "DOING_BADLY", 1)
    with pytest.raises(InputError, match=r"in the mode .*False\): its template looks wrong"):
        pair.check(thinking=True)


def test_a_drafter_without_a_clue(pair):
    fresh = randomised(pair.draft.params, seed=8)
    with pytest.raises(InputError, match="no more than of a guess that ignores the text"):
        dataclasses.replace(pair, draft=dataclasses.replace(pair.draft, params=fresh)).check()


@pytest.mark.parametrize("name", ["rnn", "eagle3", "mtp-3"])
def test_every_kind_of_drafter_can_be_tried(pair, name):
    tiny = TinyTarget(hf_config={}, config=pair.target.config, params=pair.target.params)
    draft = as_loaded_drafter(tiny_drafter(tiny, **DRAFTERS[name]))
    trial = Trial(pair.target, draft, ChatTemplate.of(pair.target.tokenizer), max_tokens=MAX_CONTEXT)

    accepted_BAG = trial.accepted(draft.drafter)

    answers = sum(len(answer) for _, answer in CONVERSATIONS)
    assert (~np.isnan(accepted_BAG)).all(-1).sum() == answers - 3 * draft.drafter.config.block_len
    assert np.nanmin(accepted_BAG) > 0 and np.nanmax(accepted_BAG) <= 1 + 1e-6


def test_too_little_text_is_no_verdict(pair, monkeypatch):
    monkeypatch.setattr(module, "CONVERSATIONS", (("x" * 100, "cut off"),))
    assert np.isnan(pair.check())


def test_blocks_that_resemble_each_other_count_once():
    """Of drafters for which a change makes no difference, one in hundreds is refused, not one in ten."""
    rng = np.random.default_rng(0)
    alarms = [module._standard_errors(rng.standard_t(4, 30)) > module.SIGNIFICANT for _ in range(4000)]
    assert np.mean(alarms) < 0.005


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
