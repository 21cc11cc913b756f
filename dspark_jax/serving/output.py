"""The answers of a job: a journal while it runs, one file at its end, exactly one record for each answer.

Steps of the end, each of which may be the last before a kill: OUTPUT.job.json names the job and says that it
is complete; OUTPUT appears; the journal goes. As long as the journal is there it is what counts, so that a
resumed job repeats the steps, and once it is gone there is nothing left to do.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import IO, Any, Literal

import numpy as np
from tqdm import tqdm

from dspark_jax.core import storage
from dspark_jax.core.errors import InputError
from dspark_jax.core.jsonl import json_line
from dspark_jax.serving.journal import Journal, has_lines, open_journal

Identity = Mapping[str, Any]
MAX_SAMPLES = 1024
"""Answers to one prompt."""


class Output:
    """Takes a job's records and remembers which ones are there.

    Args:
      name: path or URL of the output.
      identity: what the answers depend on, plain JSON.
      resume: go on with a job that was stopped; without it such a job is not touched.

    Attributes:
      complete: what the job file says of a job that has nothing left to do, else None.
      failed_before: those of `done_records` that tell of a failure.

    Raises:
      InputError: an unfinished job would be overwritten, or another job's answers mixed with this one's.
    """

    def __init__(self, name: str, identity: Identity, *, resume: bool):
        self.name, self._identity = name, identity
        self._journal_name, self._job_name = f"{name}.partial", f"{name}.job.json"
        self._open: Journal | None = None
        self.complete: dict[str, Any] | None = None
        self.failed_before = 0
        self._done = array("q")
        if resume and not has_lines(self._journal_name) and storage.exists(name):
            self.complete = self._finished_job()
            return
        self._open = open_journal(self._journal_name)
        try:
            if not self._begun_job(resume):
                self._journal.clear()
                self._journal.append(json_line({"job": identity}))
        except BaseException:
            self.close()
            raise

    @property
    def _journal(self) -> Journal:
        assert self._open is not None, "the job is complete or closed"
        return self._open

    @property
    def done_records(self) -> int:
        """Records that were there at the beginning."""
        return len(self._done)

    def is_done(self, line: int, sample: int) -> bool:
        """Whether the answer was there at the beginning."""
        key = _key(line, sample)
        place = bisect_left(self._done, key)
        return place < len(self._done) and self._done[place] == key

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds an answer; `line` and `sample` say which one it is."""
        self._journal.append(json_line(record))

    def close(self) -> None:
        """Leaves the job resumable."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def finish(self, order: Literal["input", "completion"], facts: Mapping[str, Any]) -> None:
        """Gives the answers their name; `facts` go into the job file."""
        job = {"job": self._identity, **facts}
        storage.write(self._job_name, [json.dumps(job, indent=2).encode() + b"\n"])
        with self._journal.open() as file:
            file.readline()
            lines = file if order == "completion" else _sorted_lines(file)
            storage.write(self.name, tqdm(lines, desc="writing the answers", unit=" lines", delay=2))
        journal = self._journal
        self.close()
        journal.remove()

    def _begun_job(self, resume: bool) -> bool:
        """Whether the journal holds answers of this job, which are then known."""
        with self._journal.open() as file:
            header = file.readline()
            records = bool(header and file.readline())
            if records and not resume:
                raise InputError(
                    given=f"{self._journal_name} holds the answers of a job that was stopped",
                    expected="no such file, or the word that it shall go on",
                    fix="add --resume to go on, or remove the file to begin again",
                )
            if not records:
                return False
            begun = json.loads(header).get("job")
            _refuse_another_job(self._journal_name, begun, self._identity)
            file.seek(len(header))
            for key, _, failed in _keyed_lines(file, desc="reading what is there"):
                self._done.append(key)
                self.failed_before += failed
        self._done = array("q", np.sort(np.array(self._done, np.int64)).tobytes())
        return True

    def _finished_job(self) -> dict[str, Any]:
        if not storage.exists(self._job_name):
            raise InputError(
                given=f"{self.name} exists, but neither {self._journal_name} nor {self._job_name}",
                expected="a job to go on with",
                fix="leave out --resume to replace the file, or choose another --output",
            )
        with storage.open_read(self._job_name) as file:
            job = json.load(file)
        _refuse_another_job(self._job_name, job["job"], self._identity)
        return job


def _refuse_another_job(name: str, begun: Identity, identity: Identity) -> None:
    """Refuses to mix answers that depend on different things, and names each of them."""
    mine = json.loads(json.dumps(identity))
    if begun == mine:
        return
    different = [
        f"{key}: {begun.get(key)!r} then, {mine.get(key)!r} now"
        for key in sorted({*begun, *mine})
        if begun.get(key) != mine.get(key)
    ]
    raise InputError(
        given=f"{name} belongs to another job: {'; '.join(different)}",
        expected="the job that was begun: same input, target, drafter and options",
        fix="restore what has changed, or choose another --output",
    )


def _key(line: int, sample: int) -> int:
    return line * MAX_SAMPLES + sample


def _keyed_lines(file: IO[bytes], desc: str) -> Iterator[tuple[int, int, bool]]:
    """(key, offset of its line, whether it failed) of every record behind the file's place."""
    offset = file.tell()
    for line in tqdm(file, desc=desc, unit=" lines", delay=2):
        try:
            record = json.loads(line)
            key = _key(record["line"], record["sample"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                given=f"a journal that holds no record at byte {offset}",
                expected="what an earlier run wrote there",
                fix="cut the file before that byte, or remove it to begin again",
            ) from error
        yield key, offset, "error" in record
        offset += len(line)


def _sorted_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The records in the order of the input. Memory: 40 bytes a record."""
    keys, offsets = array("q"), array("q")
    for key, offset, _ in _keyed_lines(file, desc="sorting the answers"):
        keys.append(key)
        offsets.append(offset)
    order_np = np.argsort(np.frombuffer(keys, np.int64), kind="stable") if keys else ()
    for place in order_np:
        file.seek(offsets[place])
        yield file.readline()
