"""Train a drafter: `python train.py configs/dspark.py --target smollm2_135m [--run-dir DIR, other flags]`."""

import logging
import runpy
import sys

import tyro

from dspark_jax.commands.cli import run_or_explain
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.loop import train


def main(argv: list[str]) -> None:
    """Reads `configs/<method>.py`, lets flags override it, and trains."""
    if len(argv) < 3 or argv[1] != "--target":
        sys.exit(__doc__)
    path, _, target, *flags = argv

    def run() -> None:
        default = runpy.run_path(path)["get_config"](target=target)
        train(tyro.cli(TrainConfig, default=default, args=flags, prog=f"train.py {path} --target {target}"))

    run_or_explain(run)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    main(sys.argv[1:])
