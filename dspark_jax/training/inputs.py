"""What a run is made of, without its tensors: whatever can be refused is refused here, before any work."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.drafter import LoadedDrafter, load_drafter
from dspark_jax.checkpoints.sources import TensorSource
from dspark_jax.checkpoints.targets import open_source
from dspark_jax.core.errors import InputError, require
from dspark_jax.core.files import atomic_write
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.data.deepspec_cache import DeepSpecCache, is_deepspec_cache
from dspark_jax.data.draft_vocab import most_frequent_tokens
from dspark_jax.data.feature_store import FeatureStore
from dspark_jax.data.sources import Example, read_training_examples, split_held_out
from dspark_jax.drafters.contract import Drafter, Params
from dspark_jax.drafters.registry import make_drafter
from dspark_jax.targets.families import decoder_config_from_hf
from dspark_jax.training.config import TrainConfig, as_json

# What may change when a run goes on: where it lies, and how the same steps are computed, watched and saved.
MAY_CHANGE = frozenset(
    "run_name runs checkpoint_root mesh microbatches target_parts log_every_steps save_every_steps keep "
    "watch evaluation distributed".split()
)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What the files of a run say.

    Attributes:
      drafter: the drafter to train.
      records: the sequences, or their features.
      given_params: parameters to start from, or None.
      vocabulary_np: target ids of a reduced draft vocabulary, or None.
      cache: the DeepSpec cache that the batches come from, or None.
    """

    drafter: Drafter
    records: Sequence[Example] | FeatureStore | DeepSpecCache
    given_params: Params | None
    vocabulary_np: np.ndarray | None
    cache: DeepSpecCache | None


def read_inputs(config: TrainConfig) -> RunInputs:
    """Reads everything but the tensors of the target.

    Raises:
      InputError: the inputs do not fit together.
    """
    source = open_source(config.target)
    drafter_config = config.drafter.resolve(
        decoder_config_from_hf(source.config), padding_id=source.config.get("pad_token_id")
    )
    drafter = make_drafter(drafter_config, jnp.dtype(config.dtype))
    vocab_size = drafter.config.target_vocab_size
    given = _given_drafter(config, drafter)
    cache = _cache(config, drafter)
    if cache is None:
        examples = _examples(config, source, vocab_size)
        records = _records(config, source, examples, drafter.config.taps)
    else:  # a cache holds its own sequences; they are read for a draft vocabulary only
        examples = cache.examples() if config.drafter.draft_vocab_size and given is None else []
        records = cache
    return RunInputs(
        drafter=drafter,
        records=records,
        given_params=None if given is None else given.params,
        vocabulary_np=_draft_vocabulary(config, given, examples, vocab_size),
        cache=cache,
    )


def run_fingerprint(config: TrainConfig) -> str:
    """A short hash of everything that a run must not change when it goes on."""
    return hashlib.sha256(json.dumps(_binding(config), sort_keys=True).encode()).hexdigest()[:16]


def claim_run(config: TrainConfig) -> None:
    """Writes the resolved configuration into the run directory.

    Raises:
      InputError: the directory holds another run.
    """
    path = config.run_dir / "config.json"
    binding = _binding(config)
    if path.exists():
        before = json.loads(path.read_text())
        changed = sorted(name for name in binding if binding[name] != before.get(name))
        if changed:
            raise InputError(
                given=f"{config.run_dir} holds a run with other values of {changed}",
                expected="the configuration with which the run was started",
                fix="use a new --run-name (with --init-from to start from its drafter), or the old values",
            )
    resolved = {**as_json(config), "fingerprint": run_fingerprint(config)}
    with atomic_write(path, "w") as file:
        json.dump(resolved, file, indent=2)


def _binding(config: TrainConfig) -> dict[str, Any]:
    return {name: value for name, value in as_json(config).items() if name not in MAY_CHANGE}


def _cache(config: TrainConfig, drafter: Drafter) -> DeepSpecCache | None:
    """The feature store, if it is a cache of DeepSpec."""
    if config.feature_store is None or not is_deepspec_cache(config.feature_store):
        return None
    cache = DeepSpecCache(config.feature_store, taps=drafter.config.taps)
    require(
        cache.width == drafter.config.block.width,
        given=f"{config.feature_store} with features of width {cache.width}",
        expected=f"{drafter.config.block.width}, the target's",
        fix="use the target with which the cache was made",
    )
    return cache


def _examples(config: TrainConfig, source: TensorSource, vocab_size: int) -> list[Example]:
    """The training part of the responses; those too long to be of use are left out."""

    def template() -> ChatTemplate:
        return ChatTemplate(tokenizer=source.tokenizer())

    examples, _ = split_held_out(read_training_examples(config.responses, template, vocab_size=vocab_size))

    def has_anchor(example: Example) -> bool:
        mask_np = example.loss_mask_np[: config.data.max_length]
        return bool((mask_np[:-1] & mask_np[1:]).any())

    kept = [example for example in examples if has_anchor(example)]
    if len(kept) < len(examples):
        _log.warning(
            "left out %d of %d sequences: nothing to learn within %d tokens",
            len(examples) - len(kept),
            len(examples),
            config.data.max_length,
        )
    return kept


def _records(
    config: TrainConfig, source: TensorSource, examples: list[Example], taps: tuple[int, ...]
) -> Sequence[Example] | FeatureStore:
    """The examples, or their records in the feature store."""
    if config.feature_store is None:
        return examples
    store = FeatureStore(config.feature_store, taps=taps)
    store.require(identity=source.identity())
    records = store.select({example.id for example in examples}.__contains__)
    if len(records) < len(examples):
        _log.warning(
            "the feature store lacks %d of %d sequences", len(examples) - len(records), len(examples)
        )
    return records


def _given_drafter(config: TrainConfig, drafter: Drafter) -> LoadedDrafter | None:
    """The drafter to start from; its parameters must be those of the recipe."""
    if config.init_from is None:
        return None
    given = load_drafter(config.init_from)
    wanted, found = as_json(drafter.config), as_json(given.drafter.config)
    # Where no parameter depends on it, a drafter may be trained on for another block length.
    free = {"block_len"} if _shapes(drafter) == _shapes(given.drafter) else set()
    changed = [name for name in wanted if wanted[name] != found.get(name) and name not in free]
    if changed:
        raise InputError(
            given=f"init_from={config.init_from} with { ({name: found.get(name) for name in changed}) }",
            expected=f"{ ({name: wanted[name] for name in changed}) }, as the run's drafter has",
            fix="change the recipe to the drafter's own values, or start without init_from",
        )
    return given


def _shapes(drafter: Drafter) -> Params:
    return jax.tree.map(lambda x: x.shape, nn.meta.unbox(jax.eval_shape(drafter.init, jax.random.key(0))))


def _draft_vocabulary(
    config: TrainConfig, given: LoadedDrafter | None, examples: list[Example], vocab_size: int
) -> np.ndarray | None:
    """Target ids of the draft vocabulary; a given drafter keeps its own, to which its W2 belongs."""
    if given is not None:
        return given.draft_to_target_np
    size = config.drafter.draft_vocab_size
    return None if size is None else most_frequent_tokens(examples, size, vocab_size=vocab_size)
