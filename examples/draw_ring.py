"""Draws the documentation's pictures of a ring of four devices.

python examples/draw_ring.py docs/images

ring.png: what travels, and who works when under a causal mask. schedule.svg: which kernel runs on
which device at which step, and what its links carry beside it.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from burst_jax import positions

N, LENGTH = 4, 256
STAY, TRAVEL, GRADIENT = "#3b6ea8", "#b56a10", "#a8325a"
# A colour a block of keys and values: along a diagonal one sees it travel.
SHADES = ("#cfe0f3", "#fbe3c0", "#d5ecd2", "#e6d9f2")


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


def forward_steps(device: int) -> list[tuple[str, list[str]]]:
    """``(kernel, sends)`` of one device at each step of the forward pass."""
    steps = []
    for step in range(N):
        block = (device - step) % N
        sends = [f"K{block} V{block} → dev {(device + 1) % N}"] if step < N - 1 else []
        steps.append((f"Q{device} · K{block} V{block}", sends))
    return steps


def backward_steps(device: int) -> list[tuple[str, list[str]]]:
    """The same of the backward pass, K and V travelling, where one kernel makes all gradients.

    A sum that a step has made is sent beside the next step's kernel, to where the kernel after that
    one adds to it, or home. Half of the work at home is left for the end, beside the last send.
    """
    blocks = [(device - step) % N for step in range(N)]
    steps = []
    for step, block in enumerate(blocks):
        sends = [f"K{block} V{block} → dev {(device + 1) % N}"] if step < N - 1 else []
        if step >= 2:
            # From the stop before this one: two stops on, or home if there is no such stop.
            sent, reach = blocks[step - 1], step + 1
            to = (sent + reach) % N if reach < N else sent
            sends.append(f"dK{sent} dV{sent} → dev {to}")
        half = ", half 1" if step == 0 else ""
        steps.append((f"Q{device} · K{block} V{block}{half}", sends))
    last = blocks[-1]
    home = f"Q{device} · K{device} V{device}, half 2"
    return [*steps, (home, [f"dK{last} dV{last} → dev {last}"])]


def draw_schedule(axes: Axes, title: str, steps: list[list[tuple[str, list[str]]]]) -> None:
    """A row a device, time to the right: kernels above, what the links carry beside them below."""
    width, height = 1.0, 1.0
    for device, row in enumerate(steps):
        top = -device * height
        axes.text(-0.06, top + 0.36, f"device {device}", ha="right", va="center", fontsize=10)
        for step, (kernel, sends) in enumerate(row):
            color = SHADES[(device - step) % N] if step < N else SHADES[device]
            axes.add_patch(Rectangle((step, top + 0.4), width - 0.04, 0.42, fc=color, ec="none"))
            axes.text(step + 0.48, top + 0.61, kernel, ha="center", va="center", fontsize=9)
            for line, send in enumerate(sends):
                axes.text(
                    step + 0.48,
                    top + 0.26 - 0.19 * line,
                    send,
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=TRAVEL if send.startswith("K") else GRADIENT,
                )
    count = len(steps[0])
    for step in range(count):
        name = f"step {step}" if step < N else "home again"
        axes.text(step + 0.48, 1.0, name, ha="center", va="center", fontsize=9.5, color="#555555")
    axes.set(xlim=(-0.62, N + 1), ylim=(-N + 0.95, 1.15))
    axes.set_title(title, loc="left", fontsize=11)
    axes.axis("off")


def main() -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description="Draw the ring, its causal work and its schedule.")
    parser.add_argument("folder", type=Path, help="where to write ring.png and schedule.svg")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    figure = plt.figure(figsize=(12, 3.9), layout="constrained")
    grid = figure.add_gridspec(1, 4, width_ratios=[1.5, 1, 1, 1])
    draw_ring(figure.add_subplot(grid[0]))
    for column, layout in enumerate(("contiguous", "zigzag", "striped"), start=1):
        draw_work(figure.add_subplot(grid[column]), layout)
    figure.savefig(folder / "ring.png", dpi=110)

    # The same bytes from the same code: no date, and ids that are no random numbers.
    matplotlib.rcParams["svg.hashsalt"] = "burst-jax"
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 7.2), layout="constrained")
    forward = [forward_steps(device) for device in range(N)]
    draw_schedule(upper, "Forward: each device merges what it sees into out and lse", forward)
    backward = [backward_steps(device) for device in range(N)]
    draw_schedule(
        lower, "Backward (rotate_kv, one kernel): the gradient follows its block", backward
    )
    figure.savefig(folder / "schedule.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
