"""Pages on the host: who holds which, which prompts they hold, and which may be shared.

Nothing here touches the device. Programs run in the order of their dispatch, so a page that was given back
may be handed out at once: whatever still writes to it runs before its next owner does.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

Key = tuple[int, ...]
"""The tokens from the start of a prompt that decide what a page holds."""


class PagePool:
    """Counts the holders of every page. A page without one keeps its content until it is handed out again.

    Args:
      num_pages: pages that exist.

    Attributes:
      peak: most pages that were ever held at the same time.
    """

    def __init__(self, num_pages: int):
        self._holders = [0] * num_pages
        self._free: collections.OrderedDict[int, None] = collections.OrderedDict.fromkeys(range(num_pages))
        self._by_key: dict[Key, int] = {}
        self._keys: dict[int, list[Key]] = collections.defaultdict(list)
        self.peak = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages that somebody holds."""
        return len(self._holders) - len(self._free)

    def holders(self, page: int) -> int:
        """How many requests hold a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int] | None:
        """`count` pages for one holder, those that were free longest first; None if there are not so many."""
        if count > len(self._free):
            return None
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            for key in self._keys.pop(page, ()):
                del self._by_key[key]
        self.peak = max(self.peak, self.num_held)
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page that is held or still has its content."""
        if self._holders[page] == 0:
            del self._free[page]
        self._holders[page] += 1
        self.peak = max(self.peak, self.num_held)

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder fewer of each.

        Raises:
          RuntimeError: a page that nobody holds.
        """
        for page in pages:
            if self._holders[page] == 0:
                raise RuntimeError(f"page {page} was given back twice")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free[page] = None

    def remember(self, page: int, key: Key) -> None:
        """Notes that a held page holds what `key` decides, for others to share."""
        if key not in self._by_key:
            self._by_key[key] = page
            self._keys[page].append(key)

    def find(self, key: Key) -> int | None:
        """The page that holds what `key` decides."""
        return self._by_key.get(key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """The part of a prompt that lies in pages already.

    Attributes:
      pages: to be shared, whole.
      copied: a page to be copied, of which only the beginning fits; or None.
      num_tokens: tokens that need no computation.
    """

    pages: tuple[int, ...] = ()
    copied: int | None = None
    num_tokens: int = 0


def find_prefix(pool: PagePool, tokens: Sequence[int], page_len: int) -> Prefix:
    """The longest prefix of a prompt that other requests have left, its last token excluded.

    What a drafter keeps of a position may depend on the token behind it, so a page counts only if that agrees
    as well; and the prompt's last token always runs, since the answer starts from it.
    """
    pages: list[int] = []
    while True:
        end = (len(pages) + 1) * page_len
        page = pool.find(tuple(tokens[: end + 1])) if end < len(tokens) else None
        if page is None:
            break
        pages.append(page)
    start = len(pages) * page_len
    # The page behind them may hold the same prompt's beginning of a page: n samples of one prompt do.
    copied = pool.find(_partial_key(tokens)) if len(tokens) - 1 > start else None
    if copied is not None:
        return Prefix(pages=tuple(pages), copied=copied, num_tokens=len(tokens) - 1)
    return Prefix(pages=tuple(pages), num_tokens=start)


def remember_prompt(pool: PagePool, tokens: Sequence[int], pages: Sequence[int], page_len: int) -> None:
    """Notes which of a request's pages hold its prompt, once the programs that fill them are dispatched."""
    for number in range((len(tokens) - 1) // page_len):
        pool.remember(pages[number], tuple(tokens[: (number + 1) * page_len + 1]))
    if (len(tokens) - 1) % page_len:
        pool.remember(pages[(len(tokens) - 1) // page_len], _partial_key(tokens))


def _partial_key(tokens: Sequence[int]) -> Key:
    """Of the page that holds a prompt's last position but one, and less than a page's worth of it."""
    return (-1, *tokens)
