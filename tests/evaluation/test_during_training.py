"""Decoding in the middle of a training run gives the accepted length that `dspark evaluate` would."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.data.pipeline import DataConfig
from dspark_jax.drafters.config import Markov
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import LoadedEngine, make_engine
from dspark_jax.evaluation.accepted_length import summarise
from dspark_jax.evaluation.during_training import TrainingEvaluation
from dspark_jax.evaluation.prompts import choose_prompts, read_evaluation_prompts
from dspark_jax.evaluation.runner import measure
from dspark_jax.speculation.verify_length import FullBlock
from dspark_jax.training.config import EvaluationConfig, TrainConfig
from dspark_jax.training.loop import Snapshot
from dspark_jax.training.recipes import DSparkRecipe

SETTINGS = EvaluationConfig(num_prompts_per_domain=3, max_new_tokens=6, max_prompt_tokens=64, slots=4)


def make_config(prompts: tuple[Path, ...], **changes) -> TrainConfig:
    return TrainConfig(
        run_name="unused",
        target="unused",
        drafter=DSparkRecipe(taps=(0,), mask_token=5, head=Markov(rank=4)),
        responses=(),
        data=DataConfig(batch_size=1, max_length=8, num_anchors=1),
        steps=1,
        dtype="float32",
        evaluation=dataclasses.replace(SETTINGS, prompts=prompts, **changes),
    )


def test_it_is_the_accepted_length_of_an_evaluation(tiny_models, prompt_files):
    target, draft = tiny_models
    evaluation = TrainingEvaluation(make_config(prompt_files))
    snapshot = Snapshot(
        drafter=draft.drafter,
        params=jax.tree.map(np.asarray, draft.params),
        draft_to_target_np=None,
        target=target,
    )
    found = evaluation(snapshot)

    engine_config = EngineConfig(slots=4, max_context=70, policy=FullBlock())
    loaded = LoadedEngine(
        engine=make_engine(target, draft, engine_config),
        target=target,
        chat=ChatTemplate(tokenizer=target.tokenizer),
    )
    prompts = choose_prompts(read_evaluation_prompts(prompt_files), 3, lambda prompt: True)
    records = measure(loaded, prompts, temperature=1.0, max_new_tokens=6).records
    expected = summarise(records, draft.drafter.config.block_len)
    assert found["accepted_length"] == pytest.approx(expected.macro.value)
    for name, domain in expected.domains.items():
        assert found[f"accepted_length/{name}"] == pytest.approx(domain.accepted_length.value)


def test_prompts_that_cannot_be_used_are_refused(tiny_models, prompt_files):
    target, draft = tiny_models
    with pytest.raises(InputError, match="no held-out prompt"):
        TrainingEvaluation(make_config(()))
    snapshot = Snapshot(drafter=draft.drafter, params=draft.params, draft_to_target_np=None, target=target)
    with pytest.raises(InputError, match="at most 2 tokens"):
        TrainingEvaluation(make_config(prompt_files, max_prompt_tokens=2))(snapshot)
