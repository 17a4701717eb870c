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
    centres = [(0.0, 0.85), (1.25, 0.0), (0.0, -0.85), (-1.25, 0.0)]
    for device, (x, y) in enumerate(centres):
        box = FancyBboxPatch((x - 0.5, y - 0.32), 1.0, 0.64, boxstyle="round,pad=0.03", fc="white")
        axes.add_patch(box)
        lines = (f"device {device}", f"Q{device}, out, lse", f"K{device} V{device}")
        for line, text in enumerate(lines):
            color = ("black", STATIONARY, ROTATING)[line]
            height = y + 0.2 * (1 - line)
            axes.text(x, height, text, ha="center", va="center", fontsize=10, color=color)
        start = np.array([x, y])
        end = np.array(centres[(device + 1) % N])
        axes.add_patch(
            FancyArrowPatch(
                tuple(start + 0.42 * (end - start)),
                tuple(start + 0.6 * (end - start)),
                arrowstyle="-|>",
                mutation_scale=16,
                color=ROTATING,
                linewidth=2.5,
            )
        )
    axes.text(0, 0, "K, V sent\nduring\nthe kernel", ha="center", va="center", fontsize=10)
    axes.set(xlim=(-1.85, 1.85), ylim=(-1.25, 1.25), aspect="equal")
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
        text = f"{100 * share:.0f}"
        axes.text(device, step, text, ha="center", va="center", fontsize=9.5, color=color)
    names = [str(number) for number in range(N)]
    axes.set_xticks(range(N), names, fontsize=9.5)
    axes.set_yticks(range(N), names, fontsize=9.5)
    axes.set_xlabel("device", fontsize=9.5)
    axes.set_title(f"{layout}\ntime {work.max(1).sum():.2f}", fontsize=10)


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
            sends.append(f"{names} → {to}")
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
    """Draws a column per device, time downwards: its kernels, and below each what it sends."""
    for device, column in enumerate(steps):
        axes.text(device + 0.48, 0.1, f"device {device}", ha="center", va="bottom", fontsize=10)
        for step, (kernel, sends) in enumerate(column):
            color = SHADES[(device - step) % N] if step < N else SHADES[device]
            # "Q0 · K0 V0, half 1" takes two lines; all boxes are as high as those.
            lines = kernel.replace(", ", "\n")
            axes.add_patch(Rectangle((device, -step - 0.42), 0.96, 0.42, fc=color, ec="none"))
            axes.text(device + 0.48, -step - 0.21, lines, ha="center", va="center", fontsize=9)
            for line, send in enumerate(sends):
                axes.text(
                    device + 0.48,
                    -step - 0.55 - 0.21 * line,
                    send,
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=ROTATING if send.startswith("K") else GRADIENT,
                )
    count = len(steps[0])
    for step in range(count):
        name = f"step {step}" if step < N else "last\nstep"
        axes.text(-0.08, -step - 0.21, name, ha="right", va="center", fontsize=9.5, color="#555555")
    axes.set(xlim=(-0.62, N), ylim=(-count + 0.05, 0.3))
    axes.set_title(title, loc="left", fontsize=10.5)
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
    figure = plt.figure(figsize=(4.6, 5.5), layout="constrained")
    upper, lower = np.asarray(figure.subfigures(2, 1, height_ratios=(3, 2.3)))
    draw_ring(upper.subplots())
    lower.suptitle("Causal work, % of a block's scores, by step and device", fontsize=11)
    panels = lower.subplots(1, 3)
    panels[0].set_ylabel("ring step", fontsize=9.5)
    for axes, layout in zip(panels, ("contiguous", "zigzag", "striped"), strict=True):
        draw_work(axes, layout)
    figure.savefig(folder / "ring.svg", metadata={"Date": None})

    forward = [forward_steps(device) for device in range(N)]
    backward = [backward_steps(device) for device in range(N)]
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(4.8, 8.8), height_ratios=(4, 5), layout="constrained"
    )
    draw_schedule(upper, "Forward: each result is merged into out and lse", forward)
    draw_schedule(lower, "Backward (rotate_kv): the gradient follows its block", backward)
    figure.savefig(folder / "schedule.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
