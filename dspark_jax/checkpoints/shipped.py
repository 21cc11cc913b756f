"""The drafters that come with this repository."""

from __future__ import annotations

from pathlib import Path

from dspark_jax.core.errors import InputError

# In a checkout the assets lie beside the package, in a wheel inside it.
_PACKAGE = Path(__file__).resolve().parent.parent
_PLACES = (_PACKAGE.parent / "assets", _PACKAGE / "assets")
SHIPPED_DRAFTERS = {"smollm2-135m": "dspark-smollm2-135m"}


def shipped_drafter(target: str) -> Path:
    """Directory of the drafter for a target.

    Raises:
      InputError: there is none.
    """
    if name := SHIPPED_DRAFTERS.get(target):
        for place in _PLACES:
            if (place / name / "config.json").exists():
                return place / name
    raise InputError(
        given=f"target {target!r} and no drafter",
        expected=f"a target with a shipped drafter: {sorted(SHIPPED_DRAFTERS)}",
        fix="train one with train.py and pass --drafter DIR, or pass --drafter none for plain decoding",
    )
