"""From names on the command line to an engine that is ready to run."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax
import jax.numpy as jnp

from dspark_jax.checkpoints.calibration import CalibrationIdentity, find_calibration, load_calibration
from dspark_jax.checkpoints.drafter import LoadedDrafter, load_drafter
from dspark_jax.checkpoints.shipped import shipped_drafter
from dspark_jax.checkpoints.sources import SafetensorsDirectory
from dspark_jax.checkpoints.targets import LoadedTarget, load_target, open_source
from dspark_jax.core.file_stamps import Stamps, stamp
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.placement import check_divides
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.engine.self_check import refuse_misfit, self_check
from dspark_jax.engine.state import Weights
from dspark_jax.speculation.schedule import Lagged
from dspark_jax.speculation.verify_length import FullBlock
from dspark_jax.targets.decoder import embedding_table, lm_head_kernel
from dspark_jax.targets.families import decoder_config_from_hf

SHIPPED, NONE = "shipped", "none"

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedEngine:
    """An engine with what belongs to it on the host.

    Attributes:
      engine: ready to take requests.
      target: the loaded target, tokenizer included.
      chat: its chat template.
      drafter_path: the drafter's directory, or None without one.
      drafter_identity: short hash of the drafter's checkpoint, or None without one.
      stamps: the files of both, as they were before they were read.
    """

    engine: Engine
    target: LoadedTarget
    chat: ChatTemplate
    drafter_path: Path | None = None
    drafter_identity: str | None = None
    stamps: Stamps = dataclasses.field(default_factory=dict)

    def calibrate(self, sampling: SamplingOptions, file: Path | None = None) -> None:
        """Makes the scheduler's predictions true, if it makes any and there is a calibration.

        Args:
          sampling: how requests draw.
          file: of `dspark calibrate`; None: what lies beside the drafter, if any of it is for exactly this.

        Raises:
          InputError: the file belongs to something else.
        """
        engine, directory = self.engine, self.drafter_path
        if directory is None or not engine.config.decides_on_device:
            return
        identity = CalibrationIdentity(
            target=self.target.identity,
            drafter=self.drafter_identity or "",
            template=self.chat.name,
            sampling=sampling.law,
            numerics=f"{jnp.dtype(engine.config.dtype).name} on {jax.default_backend()}",
        )
        G = engine.models.block_len
        found = (
            find_calibration(directory, identity, block_len=G)
            if file is None
            else load_calibration(file, identity, block_len=G)
        )
        if found is not None:
            engine.calibrate(found.scaling_np)
        else:
            log.warning(
                "NO CALIBRATION for %s on %s (%s): the scheduler takes the drafter's confidences "
                "as they are; `dspark calibrate` makes one",
                identity.sampling,
                identity.template,
                identity.numerics,
            )


def load_engine(
    *,
    target: str,
    drafter: str,
    config: EngineConfig,
    check: bool = True,
    thinking: bool = False,
) -> LoadedEngine:
    """Loads a target and a drafter.

    Args:
      target: embedded name, .gguf file, Hugging Face directory or hub id.
      drafter: directory or hub id of a drafter, "shipped" for the one in this repository, or "none" for plain
        decoding.
      config: shapes and policy; `Lagged` becomes `FullBlock` where no confidence head can inform it.
      check: try whether the drafter fits the target (`self_check.py`).
      thinking: mode of the chat template, where it has two.

    Raises:
      InputError: a checkpoint is not understood, or the drafter does not fit the target.
    """
    directory = None if drafter == NONE else drafter_directory(target, drafter)
    source, mesh = open_source(target), config.mesh()
    check_divides(decoder_config_from_hf(source.config), config.tensor)
    # Before anything is read: a file that is replaced while it is read shows as well.
    stamps = stamp(
        [
            *model_files(source.path),
            *(() if directory is None else model_files(SafetensorsDirectory(directory).path)),
        ]
    )
    loaded = load_target(target, dtype=config.dtype, mesh=mesh)
    draft = None if directory is None else load_drafter(directory, dtype=config.dtype, mesh=mesh)
    chat = ChatTemplate.of(loaded.tokenizer, thinking=thinking)
    config = _with_a_policy_for(draft, config)
    engine = make_engine(loaded, draft, config)
    if draft is not None and check:
        self_check(engine, loaded, draft, chat)
    drafter_identity = None if directory is None else SafetensorsDirectory(directory).identity()
    return LoadedEngine(
        engine=engine,
        target=loaded,
        chat=chat,
        drafter_path=directory,
        drafter_identity=drafter_identity,
        stamps=stamps,
    )


def _with_a_policy_for(draft: LoadedDrafter | None, config: EngineConfig) -> EngineConfig:
    """The default scheduler listens to a confidence head; what has none verifies full blocks."""
    if not isinstance(config.policy, Lagged) or (draft and draft.drafter.config.confidence is not None):
        return config
    if draft is not None:
        log.warning("this drafter has no confidence head: full blocks are verified")
    return dataclasses.replace(config, policy=FullBlock())


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
