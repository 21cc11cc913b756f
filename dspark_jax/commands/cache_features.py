"""`dspark cache-features`: run the target over the sequences once and keep what the drafter reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dspark_jax.checkpoints.targets import load_target, open_source
from dspark_jax.core.buckets import round_up
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.data.feature_record import FeatureRecord, dry_run_bytes
from dspark_jax.data.feature_store import FeatureStoreWriter, StoreDescription
from dspark_jax.data.sources import Example, common_template, read_responses
from dspark_jax.targets.families import decoder_config_from_hf
from dspark_jax.training.features import TargetFeatures, target_features

LENGTH_MULTIPLE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFeatures:
    """Write a feature store (ArrayRecord, bfloat16) for sequences that several epochs will train on."""

    responses: tuple[Path, ...]
    """Response files (JSONL or .jsonl.gz), as `dspark regenerate` writes them."""
    output: Path
    """Directory of the store; an unfinished one is continued."""
    target: str = "smollm2-135m"
    """Target model: embedded name, .gguf file, Hugging Face directory or hub id."""
    thinking: bool = False
    """Mode of the chat template in which prompts were rendered, where their files do not say it."""
    taps: tuple[int, ...]
    """Target layers whose outputs are stored; -1 is the embedding."""
    max_length: int = 512
    """Longer sequences are cut, in tokens."""
    batch_tokens: int = 4096
    """Tokens per forward pass, padding included."""
    dtype: str = "bfloat16"
    """dtype in which the target runs."""
    dry_run: bool = False
    """Only print how many bytes the store would take."""


def run(config: CacheFeatures) -> None:
    """Fills the store, longest sequences last; safe to kill and repeat."""
    target_config = decoder_config_from_hf(open_source(config.target).config)
    width = target_config.block.width
    responses = read_responses(config.responses, vocab_size=target_config.vocab_size)
    template = common_template(responses)
    examples = [_cut(example, config.max_length) for example in responses]
    size_bytes = dry_run_bytes(examples, len(config.taps), width)
    tokens = sum(len(example.tokens_np) for example in examples)
    print(f"{len(examples)} sequences, {tokens} tokens, {size_bytes / 1e9:.2f} GB")
    if config.dry_run:
        return
    target = load_target(config.target, dtype=config.dtype)
    description = StoreDescription(
        identity=target.identity,
        taps=config.taps,
        width=width,
        template=template or ChatTemplate.of(target.tokenizer, thinking=config.thinking).name,
    )
    with FeatureStoreWriter(config.output, description) as writer:
        done = writer.done_ids()
        todo = [example for example in examples if example.id not in done]
        forward = jax.jit(
            functools.partial(
                target_features, config=target.config, taps=config.taps, dtype=jnp.dtype(config.dtype)
            )
        )
        with tqdm(
            total=sum(len(example.tokens_np) for example in todo), unit="tok", unit_scale=True
        ) as progress:
            for batch in _batches(todo, config.batch_tokens):
                length = round_up(len(batch[-1].tokens_np), LENGTH_MULTIPLE)
                rows = max(config.batch_tokens // length, 1)
                tokens_np = np.zeros((rows, length), np.int32)
                for i, example in enumerate(batch):
                    tokens_np[i, : len(example.tokens_np)] = example.tokens_np
                output = jax.device_get(forward(target.params, tokens_np))
                for i, example in enumerate(batch):
                    writer.write(_record(example, output, i))
                progress.update(sum(len(example.tokens_np) for example in batch))


def _cut(example: Example, max_length: int) -> Example:
    return dataclasses.replace(
        example, tokens_np=example.tokens_np[:max_length], loss_mask_np=example.loss_mask_np[:max_length]
    )


def _batches(examples: Sequence[Example], batch_tokens: int) -> Iterator[list[Example]]:
    """Sequences of like length together, so that few shapes compile and little is padded."""
    batch: list[Example] = []
    for example in sorted(examples, key=lambda example: len(example.tokens_np)):
        length = round_up(len(example.tokens_np), LENGTH_MULTIPLE)
        bigger = batch and length != round_up(len(batch[-1].tokens_np), LENGTH_MULTIPLE)
        if bigger or len(batch) == max(batch_tokens // length, 1):
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def _record(example: Example, output: TargetFeatures, row: int) -> FeatureRecord:
    T = len(example.tokens_np)
    return FeatureRecord(
        example=example,
        features_TCD_np=np.asarray(output.features_BTCD[row, :T], jnp.bfloat16),
        hidden_TD_np=np.asarray(output.hidden_BTD[row, :T], jnp.bfloat16),
        logz_T_np=np.asarray(output.logz_BT[row, :T]),
    )
