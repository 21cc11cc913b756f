"""The one error that bad input raises: what was given, what was expected, what to do."""

from __future__ import annotations


class InputError(ValueError):
    """A problem in what the user supplied, found before any work is lost.

    Args:
      given: what was found, with its place (file, line, field).
      expected: what would have been accepted.
      fix: the next step that the user can take.
    """

    def __init__(self, *, given: str, expected: str, fix: str):
        self.given, self.expected, self.fix = given, expected, fix
        super().__init__(f"given: {given}; expected: {expected}; to fix it: {fix}")


def require(legal: bool, *, given: str, expected: str, fix: str) -> None:
    """Raises the `InputError` unless `legal`."""
    if not legal:
        raise InputError(given=given, expected=expected, fix=fix)
