"""Chat templates: messages to token ids, and which of those ids the loss covers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np

from dspark_jax.core.errors import InputError

if TYPE_CHECKING:  # transformers takes seconds to import, and whoever has a tokenizer has paid for it
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, str]
THINKING = "enable_thinking"
"""The variable with which templates of thinking models (Qwen3, Gemma 4) are told to think or not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A tokenizer with the one mode of its chat template that a run uses everywhere.

    Training, serving and evaluation must agree on the mode: a drafter trained on another one accepts less.
    """

    tokenizer: PreTrainedTokenizerFast
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Variables for the template, as `{"enable_thinking": False}` for Qwen3."""

    def __post_init__(self):
        if not self.tokenizer.chat_template:
            raise InputError(
                given="a tokenizer without a chat template",
                expected="an instruction-tuned model's tokenizer",
                fix="set tokenizer.chat_template",
            )

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, *, thinking: bool = False) -> ChatTemplate:
        """A tokenizer's template in one of its modes; not to think is what the paper's drafters learn from.

        Raises:
          InputError: there is no template, or it has no mode of thinking.
        """
        has_modes = THINKING in str(tokenizer.chat_template)
        if thinking and not has_modes:
            raise InputError(
                given="thinking, for a chat template that knows no such mode",
                expected=f"a template that reads {THINKING!r}",
                fix="leave --thinking out",
            )
        return cls(tokenizer=tokenizer, options={THINKING: thinking} if has_modes else {})

    @property
    def name(self) -> str:
        """Short name of the mode, to be stored with data made in it: "chat(enable_thinking=False)"."""
        return f"chat({', '.join(f'{key}={value}' for key, value in sorted(self.options.items()))})"

    def render_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids that ask the model for the next assistant turn."""
        _check_messages(messages)
        return self._encode(self._render(messages, answer_next=True)).tokens_np.tolist()

    def tokenize_conversation(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [T] of a whole conversation and its loss mask bool [T].

        The mask is true on the content of every assistant turn and on the end-of-turn token after it: on what
        the model would have generated itself. Empty thoughts that the template puts before it are not.

        Raises:
          InputError: an answer cannot be found, because the template rewrites what stands before it or its
            content, or because the tokens before it are not those of the prompt alone.
        """
        _check_messages(messages)
        whole = self._encode(self._render(messages, answer_next=False))
        loss_mask_np = np.zeros(len(whole.tokens_np), np.bool_)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise InputError(
                given="a conversation without an assistant turn",
                expected="at least one answer",
                fix="leave it out",
            )
        for turn in turns:
            start, end = self._answer_span(messages, turn, whole)
            mask = (whole.starts_np >= start) & (whole.ends_np <= end) & (whole.ends_np > whole.starts_np)
            self._check_boundary(whole, start, first_token=int(mask.argmax()))
            loss_mask_np |= mask
        return whole.tokens_np, loss_mask_np

    def _render(self, messages: Sequence[Message], *, answer_next: bool) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=answer_next,
                **self.options,
            )
        except jinja2.TemplateError as error:  # templates refuse what they were not written for
            raise InputError(
                given=f"messages of roles {[message['role'] for message in messages]}: {error}",
                expected="messages that the target's chat template takes",
                fix="leave out or merge the messages that it does not know",
            ) from error
        return str(rendered)

    def _encode(self, text: str) -> _Encoded:
        # The template writes the special tokens itself.
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts_np, ends_np = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        return _Encoded(text, np.asarray(encoded["input_ids"], np.int32), starts_np, ends_np)

    def _answer_span(self, messages: Sequence[Message], turn: int, whole: _Encoded) -> tuple[int, int]:
        """Characters [start, end) of one answer and its end-of-turn token in the rendered conversation."""
        before = self._render(messages[:turn], answer_next=False)
        header = self._render(messages[:turn], answer_next=True)[len(before) :]
        if not whole.text.startswith(before):
            raise _unsafe(turn, "the messages before it read differently once it is there")
        # In a finished conversation the header may lack its end: Qwen3 drops the empty thoughts of earlier
        # turns. So the answer begins after the longest part of the header that content and mark follow.
        content = messages[turn]["content"].strip()
        reason = "its content does not follow the generation prompt"
        for length in range(len(header), 0, -1):
            start = len(before) + length
            end = whole.behind_space(start)
            if whole.text.startswith(header[:length], len(before)) and whole.text.startswith(content, end):
                token = whole.token_at(whole.behind_space(end + len(content)))
                if token is not None and int(whole.tokens_np[token]) in self.tokenizer.added_tokens_decoder:
                    return start, int(whole.ends_np[token])
                reason = "no special end-of-turn token follows its content"
        raise _unsafe(turn, reason)

    def _check_boundary(self, whole: _Encoded, start: int, first_token: int) -> None:
        """The tokens before an answer must be the ones that the model sees when it is asked for it."""
        before = whole.text[:start]
        if not np.array_equal(whole.tokens_np[:first_token], self._encode(before).tokens_np):
            raise InputError(
                given=f"an answer that melts into the last token before it: ...{before[-20:]!r}",
                expected="a token boundary before the answer",
                fix="strip white space from the start of the answer",
            )


class _Encoded(NamedTuple):
    """A rendered conversation: its tokens [T] and the characters [start, end) that each covers."""

    text: str
    tokens_np: np.ndarray
    starts_np: np.ndarray
    ends_np: np.ndarray

    def behind_space(self, position: int) -> int:
        return len(self.text) - len(self.text[position:].lstrip())

    def token_at(self, position: int) -> int | None:
        here = np.flatnonzero((self.starts_np == position) & (self.ends_np > position))
        return int(here[0]) if here.size else None


def _unsafe(turn: int, reason: str) -> InputError:
    return InputError(
        given=f"a chat template under which the answer in message {turn} cannot be found: {reason}",
        expected="the rendered conversation to be the prompt, the content as given and an end-of-turn token",
        fix="choose other template options, or split the conversation into one answer each",
    )


def _check_messages(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        allowed = ("system", "user") if number == 0 else ("user", "assistant")
        if role not in allowed or not isinstance(message.get("content"), str):
            raise InputError(
                given=f"message {number}: {str(message)[:80]!r}",
                expected=f"a role among {allowed} and a text as content",
                fix="start with a user message (or a system message), then user and assistant",
            )
    if not any(message["role"] == "user" for message in messages):
        raise InputError(given="no user message", expected="at least one", fix="add what the user says")
