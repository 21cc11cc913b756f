"""Runs one job again and again, each time in a process of its own that may be killed.

Usage: job_process.py [flags of serve.py]. For each line on stdin a child is forked; its pid is printed, and
once it is gone, its exit code (negative: the signal that ended it). Forking after the imports and before JAX
has started a thread saves each child the seconds that Python needs to find and read the packages.
"""

from __future__ import annotations

import os
import sys

import transformers.tokenization_utils_tokenizers  # noqa: F401 otherwise each child imports it
import tyro

from dspark_jax.serving.jsonl import ServeConfig, serve_file


def main() -> None:
    """Answers the requests on stdin."""
    config = tyro.cli(ServeConfig)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            # What the job prints would mix with the answers to the test.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os._exit(serve_file(config))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
