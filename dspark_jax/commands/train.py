"""What `train.py` calls: one process of a training job, and how it ends."""

from __future__ import annotations

import sys
import traceback

import jax

from dspark_jax.commands.cli import EXIT_REFUSED, explain
from dspark_jax.core.distributed import EXIT_LOST_PEER, join_processes, leave_at_once
from dspark_jax.core.errors import InputError
from dspark_jax.evaluation.during_training import TrainingEvaluation
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.loop import train

EXIT_FAILED = 1


def run(config: TrainConfig) -> None:
    """Joins the other processes of the job, trains, and evaluates on the way if the configuration says so.

    Among several processes a failure ends this one at once, with a code other than 0: so the others learn of
    it. Where the failure is that another process is gone, the code is 75.
    """
    join_processes(config.distributed)
    try:
        train(config, evaluate=TrainingEvaluation(config) if config.evaluation.prompts else None)
    except Exception as error:
        if jax.process_count() == 1:
            raise
        leave_at_once(_explain(error))


def _explain(error: Exception) -> int:
    """Says what ended this process; the exit code that tells it."""
    if isinstance(error, InputError):
        explain(error)
        return EXIT_REFUSED
    traceback.print_exception(error)
    if not _peer_is_gone(error):
        return EXIT_FAILED
    print(
        f"error: process {jax.process_index()} of {jax.process_count()} lost another process of this job, "
        "which died or cannot be reached. Everything up to the last checkpoint is kept: start all of "
        "them again with the same command, on as many machines as there are.",
        file=sys.stderr,
    )
    return EXIT_LOST_PEER


def _peer_is_gone(error: Exception) -> bool:
    """Collectives and the coordination service fail with these words when a process is missing."""
    words = ("gloo", "Connection", "UNAVAILABLE", "DEADLINE_EXCEEDED", "heartbeat", "NCCL", "peer", "ABORTED")
    return isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in words)
