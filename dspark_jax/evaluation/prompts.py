"""The prompts of an evaluation: never trained on, the same ones every time."""

from __future__ import annotations

import collections
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from dspark_jax.core.errors import InputError
from dspark_jax.data.rows import Row
from dspark_jax.data.sources import Prompt, is_held_out, read_prompts


def read_evaluation_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """Held-out prompts of prompt files, and the first turn of every line of evaluation sets.

    Args:
      paths: JSON lines, plain or .gz: prompt files as `read_prompts` takes them, of which only held-out
        prompts are used, or evaluation sets with lines `{"turns": [...]}`, whose domain is the file's name.

    Raises:
      InputError: bad lines, or no prompt left.
    """
    sets = [path for path in paths if _is_evaluation_set(path)]
    candidates = read_prompts([path for path in paths if path not in sets])
    prompts = [prompt for prompt in candidates if is_held_out(prompt.id)]
    prompts += read_prompts(row for path in sets for row in first_turns(path, path.name.partition(".")[0]))
    if not prompts:
        raise InputError(
            given=f"no held-out prompt in {', '.join(map(str, paths))}",
            expected="prompts that no drafter was trained on",
            fix='pass more prompts (one in fifty is held out), or sets with lines {"turns": [...]}',
        )
    return prompts


def choose_prompts(
    prompts: Iterable[Prompt], per_domain: int | Mapping[str, int], fits: Callable[[Prompt], bool]
) -> list[Prompt]:
    """At most `per_domain` prompts of every domain, in the order of a hash of their ids.

    The choice does not depend on the order of files, and a smaller one is part of every larger one.

    Args:
      prompts: candidates.
      per_domain: wanted of each domain, or of each by its name.
      fits: false for prompts to leave out, such as those that are too long.
    """
    chosen: list[Prompt] = []
    counts: collections.Counter[str] = collections.Counter()
    for prompt in sorted(prompts, key=lambda prompt: prompt_hash(prompt.id)):
        wanted = per_domain if isinstance(per_domain, int) else per_domain[prompt.domain]
        if counts[prompt.domain] < wanted and fits(prompt):
            counts[prompt.domain] += 1
            chosen.append(prompt)
    return chosen


def prompt_hash(prompt_id: str, salt: str = "dspark-evaluate") -> int:
    """32 bits that belong to a prompt for ever: its place in the order, or with another salt a seed."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{prompt_id}".encode()).digest()[:4], "big")


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _is_evaluation_set(path: Path) -> bool:
    """Whether the first line has turns; whatever is wrong with the file, its reader will say."""
    try:
        with _open(path) as lines:
            return "turns" in json.loads(next(lines, b"[]"))
    except (OSError, ValueError, TypeError):
        return False


def first_turns(path: Path, name: str) -> Iterator[Row]:
    """Rows of prompts from lines `{"turns": [...]}`, plain or .gz, of a set with this name."""
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{path}:{number}"
            try:
                text = json.loads(line)["turns"][0]
            except (ValueError, LookupError, TypeError):
                yield Row(place, None, "no list 'turns'")
            else:
                yield Row(place, {"id": f"{name}-{number}", "domain": name, "source": name, "prompt": text})
