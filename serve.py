"""Answer prompts: `python serve.py --input prompts.jsonl --output out.jsonl [--help]`."""

import logging
import sys

import tyro

from dspark_jax.commands.cli import run_or_explain
from dspark_jax.serving.jsonl import ServeConfig, serve_file

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    run_or_explain(lambda config: sys.exit(serve_file(config)), tyro.cli(ServeConfig, description=__doc__))
