"""`serve_file` over a tiny target with a byte tokenizer, and files to feed it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.data.chat import ChatTemplate
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.load import NONE, SHIPPED, LoadedEngine
from dspark_jax.engine.requests import Request, Status
from dspark_jax.engine.state import Weights
from dspark_jax.serving import jsonl
from dspark_jax.serving.jsonl import ServeConfig, serve_file
from dspark_jax.testing.loaded import as_loaded_target
from dspark_jax.testing.tiny import tiny_drafter, tiny_target
from dspark_jax.testing.tokenizer import tiny_tokenizer

MAX_CONTEXT = 96


@dataclasses.dataclass
class Served:
    """What a job left behind."""

    exit_code: int | None
    answers: list[dict[str, Any]]
    out: str
    err: str


class Server:
    """Runs jobs on engines that are compiled once for all tests."""

    def __init__(self):
        tiny = tiny_target(vocab_size=259, max_position_embeddings=256, tie_word_embeddings=False)
        self.target = as_loaded_target(tiny)
        self._drafter = tiny_drafter(tiny)
        self._engines: dict[Any, Engine] = {}

    def load_engine(
        self, *, target: str, drafter: str, config: EngineConfig, check: bool = True, thinking: bool = False
    ) -> LoadedEngine:
        """In the place of `engine.load.load_engine`."""
        assert target == "smollm2-135m" and drafter in (NONE, SHIPPED)
        key = (drafter, config)
        # An engine that a test has broken still has work, and is not used again.
        if key not in self._engines or self._engines[key].has_work:
            draft = self._drafter if drafter == SHIPPED else None
            self._engines[key] = Engine(
                target=self.target.config,
                drafter=draft and draft.drafter,
                weights=Weights(
                    target=self.target.params, drafter=draft and draft.params, shared=draft and draft.shared
                ),
                config=config,
            )
        return LoadedEngine(
            engine=self._engines[key], target=self.target, chat=ChatTemplate(tokenizer=self.target.tokenizer)
        )


@pytest.fixture(scope="session")
def _server() -> Server:
    return Server()


@pytest.fixture
def server(_server, monkeypatch) -> Server:
    """The engines behind `serve`."""
    monkeypatch.setattr(jsonl, "load_engine", _server.load_engine)
    return _server


class FakeEngine:
    """Answers with hex digits that follow from a request's prompt, seed and sample, two tokens a round.

    For everything about a job that is not decoding: nothing compiles.

    Attributes:
      before_step: called with the number of the step, from 1; may raise.
      cancelled: ids of the requests that were cancelled.
    """

    def __init__(self, *, slots: int = 2):
        self.config = types.SimpleNamespace(slots=slots)
        self.models = types.SimpleNamespace(block_len=2)
        self.compile_s = 0.0
        self.counters = {"preemptions": 3}
        self.before_step: Callable[[int], None] = lambda number: None
        self.cancelled: list[str] = []
        self.steps = 0
        self._requests: list[Request] = []

    def warm_up(self, prompt_buckets=None, *, draws=()) -> None: ...

    def check(self, request: Request) -> None: ...

    def submit(self, request: Request) -> None:
        assert len(self._requests) < self.config.slots
        request.move_to(Status.PREFILLING)
        request.move_to(Status.DECODING)
        self._requests.append(request)

    def cancel(self, request: Request) -> None:
        request.move_to(Status.CANCELLED)
        self.cancelled.append(request.id)
        self._requests.remove(request)

    def step(self) -> list[Request]:
        self.steps += 1
        self.before_step(self.steps)
        for request in self._requests:
            request.accepted_per_round.append(1)
            request.verified_per_round.append(2)
            request.emit(self._answer(request)[len(request.emitted) :][:2])
        ended = [request for request in self._requests if request.status is Status.FINISHED]
        self._requests = [request for request in self._requests if request not in ended]
        return ended

    def _answer(self, request: Request) -> list[int]:
        told = f"{request.prompt_tokens} {request.sampling.seed} {request.sampling.sample}"
        digest = hashlib.sha512(told.encode()).hexdigest()
        assert request.max_new_tokens <= len(digest)
        return TOKENIZER.encode(digest, add_special_tokens=False)


TOKENIZER = tiny_tokenizer()


@pytest.fixture
def fake_engine(monkeypatch) -> FakeEngine:
    """In the place of the engine of the next jobs; `config.slots` is its own."""
    engine = FakeEngine()

    def load_engine(*, target: str, drafter: str, **_) -> LoadedEngine:
        tiny = types.SimpleNamespace(tokenizer=TOKENIZER, identity=target, eos_ids=(2,), generation={})
        chat = ChatTemplate(tokenizer=TOKENIZER)
        return LoadedEngine(engine=engine, target=tiny, chat=chat, drafter_identity=drafter)

    monkeypatch.setattr(jsonl, "load_engine", load_engine)
    return engine


@pytest.fixture
def serve(server, tmp_path: Path, capfd) -> Callable[..., Served]:
    """Runs a job over lines (records, text or bytes) with flags; answers that are not there read as []."""

    def run(lines, **flags) -> Served:
        config = serve_config(tmp_path, lines, **flags)
        exit_code = serve_file(config)
        output = Path(config.output)
        answers = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
        return Served(exit_code, answers, *capfd.readouterr())

    return run


def serve_config(folder: Path, lines, **flags) -> ServeConfig:
    """A configuration for these lines, written into in.jsonl; full blocks, for which few programs compile."""
    encoded = [line if isinstance(line, bytes) else _text(line).encode() for line in lines]
    (folder / "in.jsonl").write_bytes(b"".join(line + b"\n" for line in encoded))
    rules = {"verify_tokens", "confidence_threshold", "scheduler"}
    full = {} if rules & set(flags) else {"scheduler": "full"}
    flags = {"max_context": MAX_CONTEXT, "max_new_tokens": 8, "slots": 2} | full | flags
    return ServeConfig(input=str(folder / "in.jsonl"), output=str(folder / "out.jsonl"), **flags)


@pytest.fixture
def make_config(tmp_path) -> Callable[..., ServeConfig]:
    """(lines, **flags) -> a configuration for a job in this test's folder."""
    return functools.partial(serve_config, tmp_path)


def _text(line) -> str:
    return line if isinstance(line, str) else json.dumps(line)
