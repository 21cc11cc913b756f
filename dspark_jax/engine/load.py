"""From names on the command line to an engine that is ready to run."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax

from dspark_jax.checkpoints.calibration import CalibrationIdentity, load_calibration
from dspark_jax.checkpoints.drafter import LoadedDrafter, load_drafter
from dspark_jax.checkpoints.shipped import shipped_drafter
from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.checkpoints.targets import LoadedTarget, load_target, open_source
from dspark_jax.core.file_stamps import Stamps, stamp
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.engine.self_check import refuse_misfit, self_check
from dspark_jax.engine.state import Weights
from dspark_jax.speculation.schedule import Algorithm1, Lagged
from dspark_jax.speculation.verify_length import ConfidenceThreshold
from dspark_jax.targets.decoder import embedding_table, lm_head_kernel

SHIPPED, NONE = "shipped", "none"

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedEngine:
    """An engine with what belongs to it on the host.

    Attributes:
      engine: ready to take requests.
      target: the loaded target, tokenizer included.
      chat: its chat template.
      drafter_identity: short hash of the drafter's checkpoint, or None without one.
      stamps: the files of both, as they were before they were read.
    """

    engine: Engine
    target: LoadedTarget
    chat: ChatTemplate
    drafter_identity: str | None = None
    stamps: Stamps = dataclasses.field(default_factory=dict)


def load_engine(
    *,
    target: str,
    drafter: str,
    config: EngineConfig,
    check: bool = True,
    thinking: bool = False,
    calibration: Path | None = None,
    calibrated_for: SamplingOptions | None = None,
) -> LoadedEngine:
    """Loads a target and a drafter.

    Args:
      target: embedded name, .gguf file, Hugging Face directory or hub id.
      drafter: directory or hub id of a drafter, "shipped" for the one in this repository, or "none" for plain
        decoding.
      config: shapes and policy.
      check: try whether the drafter fits the target (`self_check.py`).
      thinking: mode of the chat template, where it has two.
      calibration: file of `dspark calibrate` for these models; None: confidences are taken as they are.
      calibrated_for: the way of sampling that the file must be for; greedy by default.

    Raises:
      InputError: a checkpoint is not understood, the drafter does not fit the target, or the calibration
        belongs to something else.
    """
    directory = None if drafter == NONE else drafter_directory(target, drafter)
    # Before anything is read: a file that is replaced while it is read shows as well.
    stamps = stamp(
        [
            *model_files(open_source(target).path),
            *(() if directory is None else model_files(SafetensorsDirectory(directory).path)),
        ]
    )
    loaded = load_target(target, dtype=config.dtype)
    draft = None if directory is None else load_drafter(directory, dtype=config.dtype)
    chat = ChatTemplate.of(loaded.tokenizer, thinking=thinking)
    engine = make_engine(loaded, draft, config)
    if draft is not None and check:
        self_check(engine, loaded, draft, chat)
    drafter_identity = None if directory is None else SafetensorsDirectory(directory).identity()
    if drafter_identity is not None and calibration is not None:
        identity = CalibrationIdentity(
            target=loaded.identity,
            drafter=drafter_identity,
            sampling=str(calibrated_for or SamplingOptions(temperature=0.0)),
            template=chat.name,
            numerics=f"{config.dtype} on {jax.default_backend()}",
        )
        found = load_calibration(calibration, identity, block_len=engine.models.block_len)
        engine.calibrate(found.temperatures)
    elif isinstance(config.policy, Lagged | Algorithm1 | ConfidenceThreshold):
        log.warning("no calibration: the drafter's confidences are taken as they are (`dspark calibrate`)")
    return LoadedEngine(
        engine=engine, target=loaded, chat=chat, drafter_identity=drafter_identity, stamps=stamps
    )


def model_files(path: Path) -> list[Path]:
    """The files of a checkpoint: a file is one, a directory holds weights, configuration and tokenizer."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in (".json", ".safetensors", ".jinja"))


def drafter_directory(target: str, drafter: str) -> Path:
    """Where a drafter lies that is named on the command line."""
    return shipped_drafter(target) if drafter == SHIPPED else Path(drafter)


def make_engine(target: LoadedTarget, draft: LoadedDrafter | None, config: EngineConfig) -> Engine:
    """An engine over loaded models; without a drafter it decodes plainly.

    Raises:
      InputError: the drafter was made for another target, as its checkpoint shows.
    """
    if draft is None:
        weights = Weights(target=target.params, drafter=None, shared=None)
        return Engine(target=target.config, drafter=None, weights=weights, config=config)
    refuse_misfit(target, draft)
    shared = draft.shared_weights(
        embedding_table(target.params), lm_head_kernel(target.params), target.config.scaling
    )
    weights = Weights(target=target.params, drafter=draft.params, shared=shared)
    return Engine(target=target.config, drafter=draft.drafter, weights=weights, config=config)
