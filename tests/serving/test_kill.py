"""A real process, killed at random moments with SIGKILL: every record once, and the right one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark_jax.checkpoints.drafter import save_drafter
from dspark_jax.testing.directory import save_tiny_target
from dspark_jax.testing.tiny import tiny_drafter, tiny_target

NUM_PROMPTS, NUM_KILLS = 300, 10
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """Of a job over tiny models in directories, drafted and at a temperature."""
    tiny = tiny_target(
        vocab_size=259, num_hidden_layers=1, max_position_embeddings=256, tie_word_embeddings=False
    )
    draft = tiny_drafter(tiny, num_layers=1, taps=(0,), block_len=2)
    save_tiny_target(tiny, tmp_path / "target")
    save_drafter(
        tmp_path / "drafter",
        drafter=draft.drafter,
        params=draft.params,
        draft_to_target_np=None,
        target_hf_config=tiny.hf_config,
        num_anchors=4,
    )
    lines = [{"id": f"p{n}", "prompt": f"say {n}", "max_new_tokens": 2 + n % 9} for n in range(NUM_PROMPTS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = {"input": "in.jsonl", "output": "out.jsonl", "target": "target", "drafter": "drafter"}
    flags = [part for name, file in names.items() for part in (f"--{name}", f"{tmp_path / file}")]
    return [
        *flags,
        "--resume",
        "--no-self-check",
        *"--slots 2 --max-context 64 --temperature 0.8 --scheduler full".split(),
    ]


class Jobs:
    """The process that forks jobs."""

    def __init__(self, flags: list[str]):
        self._parent = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("job_process.py"), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        )

    def start(self) -> int:
        """Starts a job: its pid."""
        self._parent.stdin.write("\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def end(self) -> int:
        """Waits for the job: its exit code."""
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        self._parent.stdin.close()
        self._parent.wait(60)
        self._parent.stdout.close()


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_killed_ten_times(flags, tmp_path):
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    moments, kept = random.Random(5), []
    jobs = Jobs(flags)
    try:
        for _ in range(NUM_KILLS):
            # Random in what has been written, so that it means the same on a slow machine, and then in time.
            enough = size(partial) + moments.choice([0, 1, *[moments.randrange(5000)] * 4])
            pid = jobs.start()
            while size(partial) < enough and not output.exists():
                time.sleep(0.002)
            time.sleep(moments.random() * 0.02)
            os.kill(pid, signal.SIGKILL)
            assert jobs.end() == -signal.SIGKILL
            kept.append(partial.read_bytes().count(b"\n"))
        jobs.start()
        assert jobs.end() == 0
        killed = output.read_bytes()

        jobs.start()  # and once more, with nothing left to do
        assert jobs.end() == 0
        assert output.read_bytes() == killed

        output.unlink()
        (tmp_path / "out.jsonl.job.json").unlink()
        jobs.start()
        assert jobs.end() == 0
    finally:
        jobs.close()

    assert kept == sorted(kept) and len(set(kept)) > NUM_KILLS / 2  # kills fell between records
    assert [record["id"] for record in records(output)] == [f"p{n}" for n in range(NUM_PROMPTS)]
    assert killed == output.read_bytes()  # what a job answers that nobody disturbs
