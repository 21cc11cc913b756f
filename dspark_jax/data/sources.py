"""Training sequences and prompts from raw rows: checked, numbered, divided into training and held out."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.data.rows import Paths, Row, open_rows

_log = logging.getLogger(__name__)

MIN_SUPERVISED_TOKENS = 14
"""Shorter answers are dropped, as the reference does."""
HELD_OUT_FRACTION = 0.02
HELD_OUT_SALT = "dspark-held-out"
_SHOWN_BAD_ROWS = 20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One training sequence."""

    id: str
    domain: str
    tokens_np: np.ndarray
    """int32 [T]."""
    loss_mask_np: np.ndarray
    """bool [T]: true on the tokens that the target produced."""
    template: str | None = None
    """Name of the chat template that rendered the prompt, where the source says it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One user message, still without an answer."""

    id: str
    domain: str
    source: str
    text: str


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


_Item = TypeVar("_Item", bound=_HasId)
_Parsed = TypeVar("_Parsed")


def read_responses(
    source: Paths | Iterator[Row],
    *,
    min_supervised_tokens: int = MIN_SUPERVISED_TOKENS,
    vocab_size: int | None = None,
    max_bad_share: float = 0.01,
) -> list[Example]:
    """Reads rows of `{"id", "domain", "prompt_ids", "response_ids", "template"}`: a target's own answers.

    The loss covers the response; "template" may be missing. A second response under the same id becomes
    `id#1`, the third `id#2`, so that ids are unique; the order of files decides, hence name new files after
    old ones.

    Args:
      source: what `open_rows` takes, or rows.
      min_supervised_tokens: responses with fewer tokens are dropped and counted.
      vocab_size: token ids from here upwards make a row bad.
      max_bad_share: with a larger share of bad rows, nothing is returned.

    Raises:
      InputError: naming file and line of the bad rows, when they are more than `max_bad_share`.
    """

    parse = functools.partial(_response, vocab_size=vocab_size)
    return _enough_supervision(_unique_ids(_parse_rows(source, parse, max_bad_share)), min_supervised_tokens)


def common_template(examples: Iterable[Example]) -> str | None:
    """The chat template that all prompts were rendered with; None where no source says it.

    Raises:
      InputError: there are several.
    """
    names = sorted({example.template for example in examples if example.template is not None})
    if len(names) > 1:
        raise InputError(
            given=f"responses to prompts of the chat templates {names}",
            expected="one template in one mode",
            fix="leave out the files of the other ones",
        )
    return names[0] if names else None


def read_conversations(
    source: Paths | Iterator[Row],
    template: ChatTemplate,
    *,
    min_supervised_tokens: int = MIN_SUPERVISED_TOKENS,
    max_bad_share: float = 0.01,
) -> list[Example]:
    """Reads rows of `{"id", "conversations": [{"role", "content"}, ...]}`, with an optional "domain".

    The loss covers every assistant turn with its end-of-turn token. Arguments and errors: `read_responses`.
    """

    parse = functools.partial(_conversation, template=template)
    return _enough_supervision(_unique_ids(_parse_rows(source, parse, max_bad_share)), min_supervised_tokens)


def read_training_examples(
    source: Paths | Iterator[Row],
    template: Callable[[], ChatTemplate],
    *,
    min_supervised_tokens: int = MIN_SUPERVISED_TOKENS,
    vocab_size: int | None = None,
    max_bad_share: float = 0.01,
) -> list[Example]:
    """Reads rows of `read_responses` and of `read_conversations`, told apart by their fields.

    Args:
      source: as for both.
      template: makes the chat template; called at the first conversation.
      min_supervised_tokens: as for both.
      vocab_size: as for `read_responses`.
      max_bad_share: as for both.

    Raises:
      InputError: as both do.
    """
    made = functools.cache(template)

    def parse(fields: dict) -> Example:
        if fields.get("conversations") is not None:  # parquet has all fields in every row
            return _conversation(fields, template=made())
        return _response(fields, vocab_size=vocab_size)

    return _enough_supervision(_unique_ids(_parse_rows(source, parse, max_bad_share)), min_supervised_tokens)


def read_prompts(source: Paths | Iterator[Row], *, max_bad_share: float = 0.01) -> list[Prompt]:
    """Reads rows of `{"id", "domain", "source", "prompt"}`. Arguments and errors: `read_responses`."""

    def parse(fields: dict) -> Prompt:
        return Prompt(
            id=_text(fields, "id"),
            domain=_text(fields, "domain"),
            source=_text(fields, "source"),
            text=_text(fields, "prompt"),
        )

    return _unique_ids(_parse_rows(source, parse, max_bad_share))


def is_held_out(item_id: str, fraction: float = HELD_OUT_FRACTION, salt: str = HELD_OUT_SALT) -> bool:
    """Whether this id belongs to the held-out part: by a hash, so the same for ever and everywhere.

    All responses to one prompt (`id`, `id#1`, ...) fall on the same side, and a larger fraction keeps every
    id that a smaller one holds out.
    """
    digest = hashlib.sha256(f"{salt}:{item_id.split('#')[0]}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def split_held_out(
    items: Iterable[_Item], fraction: float = HELD_OUT_FRACTION, salt: str = HELD_OUT_SALT
) -> tuple[list[_Item], list[_Item]]:
    """Divides examples or prompts into (training, held out) by `is_held_out`."""
    training: list[_Item] = []
    held_out: list[_Item] = []
    for item in items:
        (held_out if is_held_out(item.id, fraction, salt) else training).append(item)
    return training, held_out


def _response(fields: dict, *, vocab_size: int | None) -> Example:
    prompt_np = _token_ids(fields, "prompt_ids", vocab_size)
    response_np = _token_ids(fields, "response_ids", vocab_size)
    return Example(
        id=_text(fields, "id"),
        domain=_text(fields, "domain"),
        tokens_np=np.concatenate([prompt_np, response_np]),
        loss_mask_np=np.arange(len(prompt_np) + len(response_np)) >= len(prompt_np),
        template=_text(fields, "template") if fields.get("template") is not None else None,
    )


def _conversation(fields: dict, *, template: ChatTemplate) -> Example:
    messages = fields.get("conversations")
    if not isinstance(messages, list):
        raise ValueError("no list 'conversations'")
    tokens_np, loss_mask_np = template.tokenize_conversation(messages)
    domain = _text(fields, "domain") if fields.get("domain") is not None else "chat"
    return Example(
        id=_text(fields, "id"),
        domain=domain,
        tokens_np=tokens_np,
        loss_mask_np=loss_mask_np,
        template=template.name,
    )


def _parse_rows(
    source: Paths | Iterator[Row], parse: Callable[[dict], _Parsed], max_bad_share: float
) -> list[_Parsed]:
    """Parses every row; bad ones are reported together, at the end."""
    parsed: list[_Parsed] = []
    problems: list[str] = []
    for row in source if isinstance(source, Iterator) else open_rows(source):
        try:
            if row.fields is None:
                raise ValueError(row.problem)
            parsed.append(parse(row.fields))
        except ValueError as error:
            problems.append(f"{row.place}: {error}")
    if problems:
        shown = "\n".join(problems[:_SHOWN_BAD_ROWS])
        rest = f"\nand {len(problems) - _SHOWN_BAD_ROWS} more" if len(problems) > _SHOWN_BAD_ROWS else ""
        total = len(parsed) + len(problems)
        if len(problems) > max_bad_share * total:
            raise InputError(
                given=f"{len(problems)} bad rows of {total}:\n{shown}{rest}\n",
                expected=f"at most {max_bad_share:.1%} bad rows",
                fix="repair the rows, or raise max_bad_share to go on without them",
            )
        _log.warning("skipped %d bad rows of %d:\n%s%s", len(problems), total, shown, rest)
    return parsed


def _enough_supervision(examples: list[Example], min_supervised_tokens: int) -> list[Example]:
    kept = [example for example in examples if example.loss_mask_np.sum() >= min_supervised_tokens]
    if len(kept) < len(examples):
        dropped = len(examples) - len(kept)
        _log.warning(
            "dropped %d examples with fewer than %d supervised tokens", dropped, min_supervised_tokens
        )
    return kept


def _unique_ids(items: list) -> list:
    """Numbers the repeats of an id: a, a#1, a#2."""
    seen: collections.Counter[str] = collections.Counter()
    unique = []
    for item in items:
        repeat = seen[item.id]
        seen[item.id] += 1
        unique.append(dataclasses.replace(item, id=f"{item.id}#{repeat}") if repeat else item)
    return unique


def _text(fields: dict, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"no text in {name!r}")
    return value


def _token_ids(fields: dict, name: str, vocab_size: int | None) -> np.ndarray:
    ids_np = np.asarray(fields.get(name))
    if ids_np.ndim != 1 or not ids_np.size or ids_np.dtype.kind != "i":
        raise ValueError(f"{name!r} is not a list of token ids")
    if ids_np.min() < 0 or ids_np.max() >= (vocab_size or 2**31):
        raise ValueError(f"{name!r} has an id outside of the vocabulary")
    return ids_np.astype(np.int32)
