"""The shipped drafter on the example prompts: greedy speculative output is plain decoding, token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.shipped import shipped_drafter
from dspark_jax.checkpoints.tap_sketches import layer_sketches, match_taps
from dspark_jax.checkpoints.targets import load_target
from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.load import make_engine
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.speculation.verify_length import FixedLength, FullBlock, VerifyPolicy
from dspark_jax.targets.decoder import Decoder

PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"
NEW_TOKENS = 24
TIE = 1e-4


class SmolLM2:
    """Target, drafter and prompts."""

    def __init__(self):
        self.draft = load_drafter(shipped_drafter("smollm2-135m"))
        self.target = load_target("smollm2-135m")
        chat = ChatTemplate(tokenizer=self.target.tokenizer)
        lines = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
        self.prompts = {
            line["id"]: chat.render_prompt([{"role": "user", "content": line["prompt"]}]) for line in lines
        }
        self.max_context = max(map(len, self.prompts.values())) + NEW_TOKENS
        self._programs = {}

    def engine(self, policy: VerifyPolicy | None, slots: int = 1) -> Engine:
        """A float32 engine; None decodes plainly."""
        config = EngineConfig(slots=slots, max_context=self.max_context, policy=policy or FullBlock())
        engine = make_engine(self.target, self.draft if policy else None, config)
        # A fixed length changes few programs: the others need no second compilation.
        compiled = engine._programs.compiled
        shared = self._programs.setdefault((policy is None, slots), compiled)
        compiled.update({name: p for name, p in shared.items() if name[0] in ("prefill", "draft")})
        return engine

    def requests(self, ids: list[str]) -> list[Request]:
        """Greedy requests."""
        return [
            Request(
                id=id,
                prompt_tokens=self.prompts[id],
                max_new_tokens=NEW_TOKENS,
                stop_ids=frozenset(self.target.eos_ids),
                sampling=SamplingOptions(temperature=0.0),
            )
            for id in ids
        ]

    def assert_plain(self, plain: dict[str, list[int]], finished: Iterator[Request]) -> None:
        """Compares; a first difference is excused only where plain decoding itself had a near tie."""
        for request in finished:
            if request.emitted == plain[request.id]:
                continue
            pairs = zip(request.emitted, plain[request.id], strict=False)
            first = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
            prefix = np.asarray([request.prompt_tokens + plain[request.id][:first]])
            output = Decoder(self.target.config).apply({"params": self.target.params}, prefix)
            best, second = jax.lax.top_k(output.logits_BTV[0, -1], 2)[0]
            assert best - second < TIE, f"{request.id}, token {first}: {float(best - second)} apart"


@pytest.fixture(scope="module")
def smollm2() -> SmolLM2:
    """Skips where the models are not at hand."""
    try:
        return SmolLM2()
    except InputError as error:
        pytest.skip(f"no shipped drafter or no embedded target: {error.given}")


@pytest.fixture(scope="module")
def plain(smollm2) -> dict[str, list[int]]:
    """Plain decoding, one prompt at a time."""
    finished = smollm2.engine(None).run(smollm2.requests(list(smollm2.prompts)))
    return {request.id: request.emitted for request in finished}


def test_every_length_alone(smollm2, plain):
    for length in range(smollm2.draft.drafter.config.block_len + 1):
        engine = smollm2.engine(FixedLength(length=length))
        smollm2.assert_plain(plain, engine.run(smollm2.requests(["math-1", "chat-1"])))


def test_all_prompts_in_one_batch(smollm2, plain):
    engine = smollm2.engine(FullBlock(), slots=len(smollm2.prompts))
    requests = smollm2.requests(list(smollm2.prompts))

    smollm2.assert_plain(plain, engine.run(requests))

    accepted = [accepted for request in requests for accepted in request.accepted_per_round]
    assert np.mean(accepted) > 0.5, "the drafter hardly ever agrees, so this showed little"


def test_a_single_tap_off_by_one_is_named(smollm2):
    declared = smollm2.draft.drafter.config.taps
    layers_LS = layer_sketches(smollm2.target.config, smollm2.target.params)
    for number in range(len(declared)):
        for off in (declared[number] - 1, declared[number] + 1):
            taps = (*declared[:number], off, *declared[number + 1 :])
            for match in match_taps(taps, smollm2.draft.tap_sketches_CS, layers_LS):
                assert match.nearest == declared[match.number]
                assert match.reads_another == (match.number == number)
                assert match.recognised == (match.number != number)
