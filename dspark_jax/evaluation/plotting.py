"""The look of every picture here: quiet axes, colours that stay apart under colour blindness, whole files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_jax.core.errors import InputError
from dspark_jax.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart under every common colour blindness, without their pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, FAINT = "#333333", "#DDDDDD"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextlib.contextmanager
def png(path: Path, *, width: float, height: float) -> Iterator[Figure]:
    """An empty figure to draw on; written to `path` at the end of the block.

    Args:
      path: the file.
      width: inches.
      height: inches.

    Raises:
      InputError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure  # not pyplot: no display, no global state
    except ImportError as error:
        raise InputError(
            given="no matplotlib", expected="the extra [eval]", fix="pip install 'dspark_jax[eval]'"
        ) from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with atomic_write(path) as file:
            figure.savefig(file, format="png", dpi=160)


def light_grid(axes: Axes) -> None:
    """Faint horizontal lines behind the data."""
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
