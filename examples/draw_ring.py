"""Draws the README's picture: the ring of four devices, and who works when under a causal mask.

python examples/draw_ring.py examples/ring.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from burst_jax import positions

N, LENGTH = 4, 256
STAY, TRAVEL = "#3b6ea8", "#d08a2e"


def draw_ring(axes: Axes) -> None:
    """Four devices; Q, out and lse stay, K and V go round."""
    centres = [(0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0)]
    for device, (x, y) in enumerate(centres):
        box = FancyBboxPatch((x - 0.3, y - 0.26), 0.6, 0.52, boxstyle="round,pad=0.03", fc="white")
        axes.add_patch(box)
        axes.text(x, y + 0.15, f"device {device}", ha="center", va="center", fontsize=10)
        axes.text(x, y, f"Q{device}  out  lse", ha="center", va="center", color=STAY, fontsize=9)
        axes.text(x, y - 0.15, f"K{device}  V{device}", ha="center", va="center", color=TRAVEL)
        start = np.array([x, y])
        end = np.array(centres[(device + 1) % N])
        axes.add_patch(
            FancyArrowPatch(
                tuple(start + 0.42 * (end - start)),
                tuple(start + 0.58 * (end - start)),
                arrowstyle="-|>",
                mutation_scale=22,
                color=TRAVEL,
                linewidth=2.5,
            )
        )
    note = "every step:\npermute beside\nthe local kernel,\nmerge by\nlog-sum-exp"
    axes.text(0, 0, note, ha="center", va="center", fontsize=9)
    axes.set(xlim=(-1.45, 1.45), ylim=(-1.4, 1.4), aspect="equal")
    axes.set_title("K and V travel, queries stay")
    axes.axis("off")


def causal_work(layout: str) -> np.ndarray:
    """``[step, device]``: the share of its scores that a device computes at a step."""
    shards = positions(layout, LENGTH, N).reshape(N, -1)  # pyrefly: ignore[bad-argument-type]
    return np.array(
        [
            [(shards[d][:, None] >= shards[(d - step) % N][None, :]).mean() for d in range(N)]
            for step in range(N)
        ]
    )


def draw_work(axes: Axes, layout: str) -> None:
    """A cell a step and device; a step lasts as long as its busiest device."""
    work = causal_work(layout)
    axes.imshow(work, cmap="Blues", vmin=0, vmax=1.3)
    for (step, device), share in np.ndenumerate(work):
        color = "white" if share > 0.8 else "black"
        axes.text(device, step, f"{share:.0%}", ha="center", va="center", fontsize=9, color=color)
    axes.set_xticks(range(N), [f"dev {d}" for d in range(N)], fontsize=8)
    axes.set_yticks(range(N), [f"step {s}" for s in range(N)], fontsize=8)
    axes.set_title(f"{layout}\n{work.max(1).sum():.2f} blocks of time", fontsize=10)


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description="Draw the ring and its causal work.")
    parser.add_argument("path", type=Path, help="where to write the PNG")
    path = parser.parse_args().path
    figure = plt.figure(figsize=(12, 4.2), layout="constrained")
    grid = figure.add_gridspec(1, 4, width_ratios=[1.5, 1, 1, 1])
    draw_ring(figure.add_subplot(grid[0]))
    for column, layout in enumerate(("contiguous", "zigzag", "striped"), start=1):
        draw_work(figure.add_subplot(grid[column]), layout)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
