"""Draws the documentation's figures of a ring of four devices.

python examples/draw_ring.py docs/images

ring.svg: what rotates, and how much each device works at each step under a causal mask.
schedule.svg: which kernel runs on which device at which step, and what is sent during it.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from burst_jax import positions
from burst_jax.command_line import Parser
from burst_jax.layouts import Contiguous
from burst_jax.ring.route import RingMask, make_route
from burst_jax.ring.schedule import Schedule, backward_schedule, forward_schedule
from pallas_kernels.mask import Mask

N, LENGTH = 4, 256
ROUTE = make_route(("seq",), RingMask((N,), Contiguous(), LENGTH // N, LENGTH // N, Mask()))
# On white the contrast of each is at least 5.5:1.
STATIONARY, ROTATING, GRADIENT = "#2f5d93", "#8f4f00", "#a8325a"
# A colour for each block of keys and values; the block rotates along a diagonal of the figure.
SHADES = ("#cfe0f3", "#fbe3c0", "#d5ecd2", "#e6d9f2")


def draw_ring(axes: Axes) -> None:
    """Draws four devices: Q, out and lse are stationary, K and V rotate."""
    centres = [(0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0)]
    for device, (x, y) in enumerate(centres):
        box = FancyBboxPatch((x - 0.46, y - 0.3), 0.92, 0.6, boxstyle="round,pad=0.03", fc="white")
        axes.add_patch(box)
        lines = (f"device {device}", f"Q{device} out lse", f"K{device} V{device}")
        for line, text in enumerate(lines):
            color = ("black", STATIONARY, ROTATING)[line]
            height = y + 0.19 * (1 - line)
            axes.text(x, height, text, ha="center", va="center", fontsize=9.5, color=color)
        start = np.array([x, y])
        end = np.array(centres[(device + 1) % N])
        axes.add_patch(
            FancyArrowPatch(
                tuple(start + 0.42 * (end - start)),
                tuple(start + 0.58 * (end - start)),
                arrowstyle="-|>",
                mutation_scale=18,
                color=ROTATING,
                linewidth=2.5,
            )
        )
    axes.text(0, 0, "K, V sent\nduring\nthe kernel", ha="center", va="center", fontsize=9)
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.35, 1.35), aspect="equal")
    axes.set_title("K, V rotate; Q is stationary", fontsize=11)
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
    """Draws a cell per step and device; a step lasts as long as its busiest device works."""
    work = causal_work(layout)
    axes.imshow(work, cmap="Blues", vmin=0, vmax=1.3)
    for (step, device), share in np.ndenumerate(work):
        color = "white" if share > 0.8 else "black"
        text = f"{share:.0%}"
        axes.text(device, step, text, ha="center", va="center", fontsize=10, color=color)
    axes.set_xticks(range(N), [f"dev {d}" for d in range(N)], fontsize=9.5)
    axes.set_yticks(range(N), [f"step {s}" for s in range(N)], fontsize=9.5)
    axes.set_title(f"{layout}: time {work.max(1).sum():.2f}", fontsize=11)


def drawn(device: int, schedule: Schedule) -> list[tuple[str, list[str]]]:
    """``(kernel, sends)`` of one device at each step, K and V rotating.

    At ring step s a device has the block of the device s places before it; a send from one step's
    place to another's goes that many devices ahead.
    """
    steps = []
    for step in schedule:
        (here,) = step.offset
        block = (device - here) % N
        sends = []
        for send in sorted(step.sends, key=lambda send: send.what):
            (start,), (end,) = send.start, send.end
            sent, to = (device - start) % N, (device + end - start) % N
            names = f"K{sent} V{sent}" if send.what == "block" else f"dK{sent} dV{sent}"
            sends.append(f"{names} → dev {to}")
        half = {"whole": "", "first": ", half 1", "second": ", half 2"}[step.part]
        steps.append((f"Q{device} · K{block} V{block}{half}", sends))
    return steps


def forward_steps(device: int) -> list[tuple[str, list[str]]]:
    """What one device does in the forward pass."""
    return drawn(device, forward_schedule(ROUTE))


def backward_steps(device: int) -> list[tuple[str, list[str]]]:
    """What one device does in the backward pass."""
    return drawn(device, backward_schedule(ROUTE))


def draw_schedule(axes: Axes, title: str, steps: list[list[tuple[str, list[str]]]]) -> None:
    """Draws a row per device, time to the right: its kernels, and below each what it sends."""
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
        name = f"step {step}" if step < N else "last step"
        axes.text(step + 0.48, 1.0, name, ha="center", va="center", fontsize=9.5, color="#555555")
    axes.set(xlim=(-0.62, N + 1), ylim=(-N + 0.95, 1.15))
    axes.set_title(title, loc="left", fontsize=11)
    axes.axis("off")


def main(argv: list[str] | None = None) -> None:
    """Writes the figures."""
    parser = Parser(description="Draw the ring, its causal work and its schedule.")
    parser.add_argument("folder", type=Path, help="where to write ring.svg and schedule.svg")
    folder = parser.parse_args(argv).folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    # Without a date and with ids from a fixed salt the files are the same at every run.
    matplotlib.rcParams["svg.hashsalt"] = "burst-jax"
    # Narrow, so that the text stays readable on a phone.
    figure, panels = plt.subplots(2, 2, figsize=(5.8, 5.6), layout="constrained")
    draw_ring(panels.flat[0])
    for axes, layout in zip(panels.flat[1:], ("contiguous", "zigzag", "striped"), strict=True):
        draw_work(axes, layout)
    figure.savefig(folder / "ring.svg", metadata={"Date": None})

    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 7.2), layout="constrained")
    forward = [forward_steps(device) for device in range(N)]
    draw_schedule(
        upper, "Forward: each device merges each block's result into out and lse", forward
    )
    backward = [backward_steps(device) for device in range(N)]
    draw_schedule(
        lower, "Backward (rotate_kv, one kernel): the gradient follows its block", backward
    )
    figure.savefig(folder / "schedule.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
