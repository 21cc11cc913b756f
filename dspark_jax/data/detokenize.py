"""Text out of tokens as they come, and the place where a stop string cuts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for the first bytes of a character whose last ones are still to come."""


class TextStream:
    """The growing text of one answer: told token by token, searched for stop strings across their borders.

    A byte-level token may end inside a character. What it has of the character stays out of the text until
    the rest is there, so text that has been given out never changes. Only a window of tokens is decoded
    again for each new one: the last tokens that ended at the border of a character give the decoder the
    context that some need for spaces, those behind them are new.

    Args:
      decode: token ids -> text, the same function that decodes whole answers.
      stops: strings that end the answer; the text ends where the first of them begins.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self._decode = decode
        self._stops = tuple(stops)
        self._window: list[int] = []
        self._context_tokens = 0
        self._context_text = ""
        self._settled = ""
        self._text = ""
        self._cut: int | None = None

    @property
    def text(self) -> str:
        """All characters that are complete, or those before the stop string that the last token completed."""
        return self._text if self._cut is None else self._text[: self._cut]

    @property
    def stopped(self) -> bool:
        """Whether the last token completed a stop string."""
        return self._cut is not None

    def push(self, token: int) -> bool:
        """Takes in a token; true where it completes a stop string."""
        known = len(self._text)
        self._window.append(token)
        new = self._decode(self._window)[len(self._context_text) :]
        self._text = self._settled + new.removesuffix(UNFINISHED)
        if new and not new.endswith(UNFINISHED):
            self._settled = self._text
            self._window = self._window[self._context_tokens :]
            self._context_tokens = len(self._window)
            self._context_text = self._decode(self._window)
        # A match that ends in old text has been answered for by an earlier token.
        cuts = [self._text.find(stop, max(known - len(stop) + 1, 0)) for stop in self._stops]
        self._cut = min((cut for cut in cuts if cut >= 0), default=None)
        return self.stopped
