"""A cost table for a reader: as text, and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dspark_jax.evaluation.plotting import COLOURS, light_grid, png
from dspark_jax.speculation.cost import CostTable


def cost_table(table: CostTable) -> str:
    """ms of every program, one line for requests and rows, one column for each context."""
    header = "".join(f"{context:>9d}" for context in table.context_buckets)
    lines = [f"ms at a context of{header}"]
    for r, requests in enumerate(table.request_buckets):
        draft = "".join(f"{ms:9.2f}" for ms in table.draft_ms_np[r])
        lines.append(f"{requests:3d} draft          {draft}")
        for m, rows in enumerate(table.row_buckets):
            if np.isfinite(table.verify_ms_np[r, m, 0]):
                verify = "".join(f"{ms:9.2f}" for ms in table.verify_ms_np[r, m])
                lines.append(f"{requests:3d} verify{rows:5d}    {verify}")
    return "\n".join(lines)


def plot_costs(table: CostTable, path: Path) -> None:
    """ms over target rows, a line for each number of requests, at the shortest and the longest context."""
    with png(path, width=7, height=4.2) as figure:
        axes = figure.add_subplot()
        light_grid(axes)
        for r, requests in enumerate(table.request_buckets):
            declared = np.isfinite(table.verify_ms_np[r, :, 0])
            rows_np = np.asarray(table.row_buckets)[declared]
            colour = COLOURS[r % len(COLOURS)]
            for context, style in ((0, "-"), (-1, "--")):
                ms_np = table.verify_ms_np[r, declared, context]
                label = f"{requests} requests" if context == 0 else None
                axes.plot(rows_np, ms_np, style, color=colour, marker="o", markersize=3, label=label)
            axes.plot(rows_np[:1], table.draft_ms_np[r, :1], "x", color=colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("target rows in a step (a cross: drafting)")
        axes.set_ylabel("ms")
        shortest, longest = table.context_buckets[0], table.context_buckets[-1]
        axes.set_title(f"One step at a context of {shortest} (lines) and {longest} tokens (dashes)")
        axes.legend(frameon=False)
