"""Train a drafter: `python train.py configs/dspark.py --target smollm2_135m [--run-name NAME, other flags]`.

What the recipe itself takes (`--target`, for some methods `--head` or `--k`) stands before all other flags.
"""

import inspect
import logging
import runpy
import sys

import tyro

from dspark_jax.commands.cli import run_or_explain
from dspark_jax.commands.train import run as run_training
from dspark_jax.training.config import TrainConfig


def main(argv: list[str]) -> None:
    """Reads `configs/<method>.py`, lets flags override it, and trains."""
    if len(argv) < 3 or argv[1] != "--target":
        sys.exit(__doc__)
    path, *flags = argv

    def run() -> None:
        get_config = runpy.run_path(path)["get_config"]
        names = {f"--{name}" for name in inspect.signature(get_config).parameters}
        arguments: dict[str, str] = {}
        rest = flags
        while len(rest) > 1 and rest[0] in names:
            name, value, *rest = rest
            arguments[name.removeprefix("--")] = value
        run_training(
            tyro.cli(
                tyro.conf.AvoidSubcommands[TrainConfig],
                default=get_config(**arguments),
                args=rest,
                prog=f"train.py {path} --target {arguments['target']}",
            )
        )

    run_or_explain(run)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    main(sys.argv[1:])
