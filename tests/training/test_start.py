"""What a run may start from, and what it refuses before any work."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from jax import tree

from dspark_jax.checkpoints.drafter import LoadedDrafter, load_drafter, save_drafter
from dspark_jax.checkpoints.tap_sketches import layer_sketches, sketches_of
from dspark_jax.checkpoints.targets import load_target
from dspark_jax.commands import cache_features
from dspark_jax.core.errors import InputError
from dspark_jax.data.pipeline import DataConfig
from dspark_jax.data.sources import is_held_out
from dspark_jax.drafters.config import Gated
from dspark_jax.testing.tiny import DRAFTERS, TinyDrafter, tiny_drafter, tiny_target
from dspark_jax.training import loop
from dspark_jax.training.config import MeshConfig
from dspark_jax.training.inputs import read_inputs
from dspark_jax.training.recipes import Eagle3Recipe, MTPRecipe

# One batch holds every record with all of its anchors, so that its loss does not depend on the order.
EVERYTHING = DataConfig(batch_size=20, max_length=30, num_anchors=28)


TARGET = tiny_target(vocab_size=40, num_hidden_layers=2, tie_word_embeddings=False)


def save(tiny: TinyDrafter, directory: Path, vocabulary_np: np.ndarray | None) -> None:
    save_drafter(
        directory,
        drafter=tiny.drafter,
        params=tiny.params,
        draft_to_target_np=vocabulary_np,
        target_hf_config=TARGET.hf_config,
        num_anchors=4,
    )


@pytest.fixture(scope="module")
def store(target_directory, responses, tmp_path_factory) -> Path:
    """The features of all responses, as `dspark cache-features` writes them."""
    directory = tmp_path_factory.mktemp("store")
    flags = {
        "responses": (responses,),
        "output": directory,
        "target": str(target_directory),
        "taps": (1, -1),
    }
    cache_features.run(
        cache_features.CacheFeatures(**flags, max_length=30, batch_tokens=256, dtype="float32")
    )
    return directory


@pytest.fixture
def train_once(make_config, on_devices) -> Callable[..., tuple[dict, LoadedDrafter]]:
    """One step on one device: (metrics, exported drafter). Its learning rate is 0, as warm-up starts."""

    def run(run_dir: Path, **changes) -> tuple[dict, LoadedDrafter]:
        on_devices(1)
        settings = {"steps": 1, "data": EVERYTHING, "mesh": MeshConfig(), **changes}
        rows = []
        exported = loop.train(make_config(run_dir, **settings), on_log=lambda step, row: rows.append(row))
        return rows[0], load_drafter(exported)

    return run


def test_a_feature_store_and_a_given_drafter_change_only_where_a_run_starts(
    train_once, store, target_directory, tmp_path
):
    online, first = train_once(tmp_path / "online")
    given = tmp_path / "online" / "drafter"
    stored, second = train_once(tmp_path / "stored", feature_store=store, init_from=given)
    tree.map(np.testing.assert_array_equal, second.params, first.params)
    # The store and the drafter's file keep bfloat16: 8 bits.
    np.testing.assert_allclose(stored["loss"], online["loss"], rtol=1e-2)
    assert stored["rows"] == online["rows"] > 100
    assert first.template == second.template == "chat()"
    target = load_target(target_directory)
    taps, layers_LS = first.drafter.config.taps, layer_sketches(target.config, target.params)
    for draft in (first, second):  # both record what their taps read
        assert draft.tap_sketches_CS is not None
        np.testing.assert_allclose(draft.tap_sketches_CS, sketches_of(taps, layers_LS), atol=0.02)


def test_a_given_drafter_keeps_its_own_vocabulary(make_config, tmp_path):
    """The columns of its W2 belong to it, however often other tokens occur by now."""
    recipe = make_config(tmp_path).drafter
    vocabulary_np = np.arange(10, 34, dtype=np.int32)
    settings = {"taps": recipe.taps, "head": recipe.head, "num_layers": recipe.num_layers, "mask_token": 39}
    given = tiny_drafter(TARGET, draft_to_target_np=vocabulary_np, block_len=5, **settings)
    save(given, tmp_path / "given", vocabulary_np)
    inputs = read_inputs(make_config(tmp_path, init_from=tmp_path / "given"))  # another block length is fine
    np.testing.assert_array_equal(inputs.vocabulary_np, vocabulary_np)
    assert not np.array_equal(read_inputs(make_config(tmp_path)).vocabulary_np, vocabulary_np)


def test_another_block_length_is_fine_only_where_no_parameter_depends_on_it(make_config, tmp_path):
    recipes = {"eagle3": Eagle3Recipe(taps=(-1, 0, 1)), "mtp-3": MTPRecipe(taps=(-1, 1), block_len=4)}
    given = {name: tiny_drafter(TARGET, **DRAFTERS[name] | {"taps": recipes[name].taps}) for name in recipes}
    for name, tiny in given.items():
        save(tiny, tmp_path / name, None)

    def read(name: str):
        return read_inputs(make_config(tmp_path, drafter=recipes[name], init_from=tmp_path / name))

    assert read("eagle3").drafter.config.block_len == 7
    with pytest.raises(InputError, match=r"'block_len': 3.*'block_len': 4"):
        read("mtp-3")


@pytest.fixture
def refused(make_config, monkeypatch, tmp_path) -> Callable[..., None]:
    """Checks that a run is refused before a tensor is read, and leaves nothing behind."""

    def check(match: str, **changes) -> None:
        monkeypatch.setattr(loop, "load_target", lambda *args, **kwargs: pytest.fail("work before the check"))
        with pytest.raises(InputError, match=match):
            loop.train(make_config(tmp_path / "refused", **changes))
        assert not (tmp_path / "refused").exists()

    return check


def test_prompts_of_other_templates_are_refused(refused, store, responses, tmp_path):
    thinking = tmp_path / "thinking.jsonl"
    thinking.write_text(responses.read_text().replace("chat()", "chat(enable_thinking=True)"))
    refused("one template in one mode|templates .*chat", responses=(responses, thinking))
    refused(r"template 'chat\(\)' instead of 'chat\(enable", responses=(thinking,), feature_store=store)


def test_responses_that_teach_nothing_are_refused(refused, write_responses, tmp_path):
    empty, outside = tmp_path / "empty.jsonl", tmp_path / "outside.jsonl"
    empty.touch()
    refused("no records", responses=(empty,))
    refused("no such file", responses=(tmp_path / "absent.jsonl",))
    record = json.loads(write_responses(outside, seed=1, count=1).read_text())
    outside.write_text(json.dumps({**record, "prompt_ids": [1, 40]}) + "\n")  # the vocabulary ends at 39
    refused("outside of the vocabulary", responses=(outside,))
    held_out = next(name for name in map(str, range(1000)) if is_held_out(name))
    outside.write_text(json.dumps({**record, "id": held_out}) + "\n")
    refused("no records", responses=(outside,))


def test_sequences_cut_before_their_answer_are_left_out(refused, write_responses, tmp_path, caplog):
    path = write_responses(tmp_path / "long.jsonl", seed=1, count=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["prompt_ids"] = [5] * 30
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The other sequence remains, so this run gets as far as the mesh.
    with caplog.at_level(logging.WARNING):
        refused("number of devices", responses=(path,), mesh=MeshConfig(data=3))
    assert "left out 1 of 2 sequences" in caplog.text


def test_recipes_that_do_not_fit_the_target_are_refused(refused, make_config, tmp_path):
    recipe = make_config(tmp_path).drafter
    refused("taps", drafter=dataclasses.replace(recipe, taps=(0, 2)))
    refused("padding id", drafter=dataclasses.replace(recipe, mask_token=0))
    refused("mask_token=40", drafter=dataclasses.replace(recipe, mask_token=40))
    refused("vocab_size=41", drafter=dataclasses.replace(recipe, draft_vocab_size=41))


def test_stores_and_drafters_of_something_else_are_refused(refused, store, make_config, tmp_path):
    recipe = make_config(tmp_path).drafter
    refused(r"without \[0\]", feature_store=store, drafter=dataclasses.replace(recipe, taps=(0, 1)))
    manifest = json.loads((store / "manifest.json").read_text())
    copy = tmp_path / "store"
    copy.mkdir()
    for path in store.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").write_text(json.dumps({**manifest, "identity": "another"}))
    refused("target 'another'", feature_store=copy)

    other = tiny_drafter(TARGET, head=Gated(rank=4), taps=recipe.taps, num_layers=recipe.num_layers)
    save(other, tmp_path / "gated", None)
    refused("Gated", init_from=tmp_path / "gated", drafter=dataclasses.replace(recipe, draft_vocab_size=None))


def test_the_store_may_lack_a_few_sequences(refused, store, write_responses, tmp_path, caplog):
    more = write_responses(tmp_path / "more.jsonl", seed=0, count=22)
    with caplog.at_level(logging.WARNING):
        refused("number of devices", responses=(more,), feature_store=store, mesh=MeshConfig(data=3))
    assert "the feature store lacks 2 of 22 sequences" in caplog.text
