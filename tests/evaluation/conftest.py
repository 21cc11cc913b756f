"""A tiny target and drafter in the place of what commands load, and prompt files for them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.targets import LoadedTarget
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.data.sources import is_held_out
from dspark_jax.engine.load import LoadedEngine, make_engine
from dspark_jax.evaluation import held_out
from dspark_jax.testing.loaded import as_loaded_drafter, as_loaded_target
from dspark_jax.testing.tiny import tiny_drafter, tiny_target

BLOCK_LEN = 2


@pytest.fixture(scope="session")
def tiny_models() -> tuple[LoadedTarget, LoadedDrafter]:
    tiny = tiny_target(vocab_size=259, num_hidden_layers=1, max_position_embeddings=256)
    target = as_loaded_target(tiny)
    draft = tiny_drafter(tiny, num_layers=1, taps=(0,), block_len=BLOCK_LEN)
    loaded = as_loaded_drafter(draft)
    return target, loaded


@pytest.fixture
def tiny_engine(monkeypatch, tiny_models) -> None:
    """The commands with the tiny models in place of those on their command lines."""

    def load_tiny_engine(
        *, target: str, drafter: str, config, check: bool = True, thinking: bool = False
    ) -> LoadedEngine:
        assert (target, drafter) == ("smollm2-135m", "shipped")
        loaded, draft = tiny_models
        engine = make_engine(loaded, draft, config)
        return LoadedEngine(engine=engine, target=loaded, chat=ChatTemplate(tokenizer=loaded.tokenizer))

    monkeypatch.setattr(held_out, "load_engine", load_tiny_engine)


@pytest.fixture(scope="session")
def write_lines() -> Callable[[Path, list[dict]], Path]:
    """Writes JSON lines, compressed if the name says so."""

    def write(path: Path, rows: list[dict]) -> Path:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    return write


@pytest.fixture(scope="session")
def prompt_ids() -> dict[bool, list[str]]:
    """Ids by whether they are held out."""
    ids = [f"p{i}" for i in range(1000)]
    return {held_out: [name for name in ids if is_held_out(name) == held_out] for held_out in (True, False)}


@pytest.fixture(scope="session")
def prompt_row() -> Callable[[str, str], dict]:
    """(id, domain) -> a line of a prompt file."""
    return lambda name, domain: {"id": name, "domain": domain, "source": "test", "prompt": f"Say {name}."}


@pytest.fixture
def prompt_files(tmp_path, write_lines, prompt_ids, prompt_row) -> tuple[Path, Path]:
    """A prompt file with four held-out prompts among others, and an evaluation set of three."""
    rows = [prompt_row(name, "chat") for name in [*prompt_ids[True][:4], *prompt_ids[False][:50]]]
    return (
        write_lines(tmp_path / "chat.jsonl.gz", rows),
        write_lines(tmp_path / "gsm8k.jsonl", [{"turns": [f"Add {i}.", "And now?"]} for i in range(3)]),
    )
