"""Draws the documentation's pictures of a ring of four devices.

python examples/draw_ring.py docs/images

ring.png: what rotates, and the causal work of each device at each step, by layout.
schedule.svg: kernels by device and step, and the transfers that overlap them.
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
from burst_jax.ring.route import RingMask, make_route
from burst_jax.ring.schedule import Schedule, backward_schedule, forward_schedule
from pallas_kernels.mask import Mask

N, LENGTH = 4, 256
ROUTE = make_route(("seq",), RingMask((N,), "contiguous", LENGTH // N, LENGTH // N, Mask()))
STATIONARY, ROTATING, GRADIENT = "#3b6ea8", "#b56a10", "#a8325a"
# One colour per K/V block, which moves along a diagonal of the picture.
SHADES = ("#cfe0f3", "#fbe3c0", "#d5ecd2", "#e6d9f2")


def draw_ring(axes: Axes) -> None:
    """Draws four devices: Q, out and lse are stationary, K and V rotate."""
    centres = [(0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0)]
    for device, (x, y) in enumerate(centres):
        box = FancyBboxPatch((x - 0.3, y - 0.26), 0.6, 0.52, boxstyle="round,pad=0.03", fc="white")
        axes.add_patch(box)
        axes.text(x, y + 0.15, f"device {device}", ha="center", va="center", fontsize=10)
        axes.text(
            x, y, f"Q{device}  out  lse", ha="center", va="center", color=STATIONARY, fontsize=9
        )
        axes.text(x, y - 0.15, f"K{device}  V{device}", ha="center", va="center", color=ROTATING)
        start = np.array([x, y])
        end = np.array(centres[(device + 1) % N])
        axes.add_patch(
            FancyArrowPatch(
                tuple(start + 0.42 * (end - start)),
                tuple(start + 0.58 * (end - start)),
                arrowstyle="-|>",
                mutation_scale=22,
                color=ROTATING,
                linewidth=2.5,
            )
        )
    note = "every step:\nlocal kernel,\noverlapped with\nthe permute;\nmerge by\nlog-sum-exp"
    axes.text(0, 0, note, ha="center", va="center", fontsize=9)
    axes.set(xlim=(-1.45, 1.45), ylim=(-1.4, 1.4), aspect="equal")
    axes.set_title("K and V rotate, Q is stationary")
    axes.axis("off")


def causal_work(layout: str) -> np.ndarray:
    """The share of a block's scores that each device computes at each step, ``[step, device]``."""
    shards = positions(layout, LENGTH, N).reshape(N, -1)  # pyrefly: ignore[bad-argument-type]
    return np.array(
        [
            [(shards[d][:, None] >= shards[(d - step) % N][None, :]).mean() for d in range(N)]
            for step in range(N)
        ]
    )


def draw_work(axes: Axes, layout: str) -> None:
    """Draws a cell per step and device; the slowest device determines a step's time."""
    work = causal_work(layout)
    axes.imshow(work, cmap="Blues", vmin=0, vmax=1.3)
    for (step, device), share in np.ndenumerate(work):
        color = "white" if share > 0.8 else "black"
        axes.text(device, step, f"{share:.0%}", ha="center", va="center", fontsize=9, color=color)
    axes.set_xticks(range(N), [f"dev {d}" for d in range(N)], fontsize=8)
    axes.set_yticks(range(N), [f"step {s}" for s in range(N)], fontsize=8)
    axes.set_title(f"{layout}\n{work.max(1).sum():.2f} blocks of time", fontsize=10)


def drawn(device: int, schedule: Schedule) -> list[tuple[str, list[str]]]:
    """``(kernel, sends)`` of one device at each step, with K and V rotating.

    At ring step s a device holds the block of the device s places before it.
    """
    steps = []
    for step in schedule:
        (here,) = step.stop
        block = (device - here) % N
        sends = []
        for send in sorted(step.all_sends, key=lambda send: send.what):
            (start,), (end,) = send.start, send.end
            sent, to = (device - start) % N, (device + end - start) % N
            names = f"K{sent} V{sent}" if send.what == "block" else f"dK{sent} dV{sent}"
            sends.append(f"{names} → dev {to}")
        half = {"whole": "", "first": ", half 1", "second": ", half 2"}[step.part]
        steps.append((f"Q{device} · K{block} V{block}{half}", sends))
    return steps


def forward_steps(device: int) -> list[tuple[str, list[str]]]:
    """Kernels and sends of one device in the forward pass."""
    return drawn(device, forward_schedule(ROUTE))


def backward_steps(device: int) -> list[tuple[str, list[str]]]:
    """Kernels and sends of one device in the backward pass with a fused kernel."""
    return drawn(device, backward_schedule(ROUTE, fused=True))


def draw_schedule(axes: Axes, title: str, steps: list[list[tuple[str, list[str]]]]) -> None:
    """Draws a row per device, time to the right: its kernels, and below them its sends."""
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
                    color=ROTATING if send.startswith("K") else GRADIENT,
                )
    count = len(steps[0])
    for step in range(count):
        name = f"step {step}" if step < N else "final transfer"
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

    # No date and a fixed salt make the file reproducible.
    matplotlib.rcParams["svg.hashsalt"] = "burst-jax"
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 7.2), layout="constrained")
    forward = [forward_steps(device) for device in range(N)]
    draw_schedule(upper, "Forward: each device merges partial results into out and lse", forward)
    backward = [backward_steps(device) for device in range(N)]
    draw_schedule(
        lower, "Backward (rotate_kv, fused kernel): dK and dV follow their block", backward
    )
    figure.savefig(folder / "schedule.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
