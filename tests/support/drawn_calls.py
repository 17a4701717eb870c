"""Drawn calls of local attention's kernels: programs from a seed, held to float64.

A seed is one program: lengths of queries and keys, masks, head dims, dtype, terms of the scores and
data. Lengths are drawn apart from each other, from all small ones and around the multiples that
kernels know, so that every combination of whole and partial tiles occurs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import compare
import interpreted_callbacks
import interpreted_sm80
import jax
import local_cases
import numpy as np
from cases import MASKS, value_dim
from implementations import IMPLEMENTATIONS, QUICK
from local_cases import attend, case_id, lse_factor_on_gpu

from pallas_kernels import REFERENCE, Tiles, mosaic_sm80, mosaic_sm90, xla
from pallas_kernels.mosaic.sm80 import configs as sm80
from pallas_kernels.mosaic.sm90.configs import MosaicConfig

MULTIPLES, AROUND = (16, 32, 64, 128), (-1, 0, 1, 32)
# Scores of all heads of a large program: NumPy's arrays of them have 128 MiB each.
_MOST_SCORES = 2**24
# A statistical comparison with one device's errors needs this many queries, and keys.
_LEAST_FOR_STATISTICS = 64
# The largest head dim at which the Hopper backward has registers for a score_mod's derivative.
_WIDEST_DERIVATIVE = 64


@dataclasses.dataclass(frozen=True)
class Levels:
    """What programs are drawn from.

    Attributes:
      most: the largest length, apart from large programs.
      head_dims: common head dims; half of the programs have another one, up to the largest.
      heads: query and key heads.
      shards: numbers of key shards that a call visits one after the other.
      large: the fraction of programs with thousands of queries or keys.
    """

    most: int = 600
    head_dims: tuple[int, ...] = (32, 64, 80, 96, 128, 192, 256)
    heads: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (4, 2), (3, 1))
    shards: tuple[int, ...] = (1, 1, 1, 2)
    large: float = 0.04


ON_GPU = Levels()
# On a CPU, in the smallest tiles.
FAMILIES = {
    "reference": REFERENCE,
    "xla": xla.in_tiles(Tiles(16, 24)),
    "mosaic_sm80": mosaic_sm80(sm80.ForwardConfig(64, 32), sm80.BackwardConfig(64, 64)),
    "mosaic_sm90": mosaic_sm90(MosaicConfig(128, 64, 2), MosaicConfig(64, 128, 2)),
}
# Interpreted kernels compile and run for seconds.
ON_CPU = Levels(280, (16, 32, 64), ((1, 1), (2, 1)), (1, 1, 2), 0.0)


def draw_length(rng: np.random.Generator, most: int) -> int:
    """From 1 to ``most``, or next to a multiple of what tiles are multiples of."""
    if rng.random() < 0.4:
        return int(rng.integers(1, most + 1))
    multiple = int(rng.choice(MULTIPLES))
    near = multiple * int(rng.integers(1, most // multiple + 1)) + int(rng.choice(AROUND))
    return max(1, near)


def draw(seed: int, family: str, levels: Levels = ON_GPU) -> dict[str, Any]:
    """The program of a seed, as :func:`local_cases.make_inputs` takes it.

    ``family``: a name of :data:`FAMILIES`.
    """
    rng = np.random.default_rng(seed)

    def pick(choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def dim() -> int:
        return pick(levels.head_dims) if rng.random() < 0.5 else int(rng.integers(1, most_dim + 1))

    most_dim = max(levels.head_dims)
    # A third without any mask: nothing but the lengths then decides which tiles are whole.
    case: dict[str, Any] = {
        "mask": "full" if rng.random() < 0.3 else pick(tuple(MASKS)),
        "blocks": pick(levels.shards),
        "heads": pick(levels.heads),
        "lengths": (draw_length(rng, levels.most), draw_length(rng, levels.most)),
        "head_dim": dim(),
        "value_dim": dim() if rng.random() < 0.3 else "same",
        "dtype": pick(("bfloat16", "bfloat16", "float16")),
        "numbers": pick(("none", "none", "sinks", "slopes", "both")),
        "dropout": pick((0.0, 0.0, 0.0, 0.2)),
        "functions": pick((*[None] * 5, "mask_mod", "tile_mask", "functions", f"drawn{seed}")),
        "batch": pick((1, 1, 2)),
        "deterministic": rng.random() < 0.25,
    }
    case["padded"] = bool(MASKS[case["mask"]].get("segments")) and rng.random() < 0.4
    if rng.random() < levels.large:
        case |= _large(rng, pick)
    orders = ["contiguous", "striped", "shuffled"]
    if all(length % 2 == 0 for length in case["lengths"]):
        orders.append("zigzag")
    case["order"] = pick(orders)
    if rng.random() < 0.1:
        # The tokens of a block are neighbors on a device.
        blocks = [64 * int(rng.integers(1, levels.most // 64 + 1)) for _ in range(2)]
        case |= {"order": "contiguous", "lengths": tuple(blocks)}
        case["table"] = (64, 64, bool(rng.integers(2)))
    return _supported(case, family)


def _large(rng: np.random.Generator, pick: Any) -> dict[str, Any]:
    """Thousands of queries or keys, or of both, with few heads."""
    heads = pick(((1, 1), (1, 1), (2, 1)))
    long = int(rng.integers(2048, 16385))
    short = _MOST_SCORES // (long * heads[0])
    short = short - int(rng.integers(0, 64)) if rng.random() < 0.7 else draw_length(rng, 600)
    lengths = (long, short) if rng.random() < 0.5 else (short, long)
    return {"heads": heads, "lengths": lengths, "head_dim": pick((64, 96, 128)), "batch": 1}


def _supported(case: dict[str, Any], family: str) -> dict[str, Any]:
    """The case without what the family's kernels do not support."""
    if family == "mosaic_sm90":
        if case["head_dim"] <= 128 < value_dim(case):
            # Its backward supports values above 128 if keys are, too.
            case |= {"head_dim": case["value_dim"], "value_dim": case["head_dim"]}
        widest = max(case["head_dim"], value_dim(case))
        if widest > _WIDEST_DERIVATIVE and case["functions"] == "functions":
            case["functions"] = "mask_mod"
    # Fixed point has a bound that holds for derivatives up to 1.
    case["deterministic"] &= case["functions"] != "functions"
    return case


def describe(case: dict[str, Any]) -> str:
    """All levels of a case in one word."""
    suffixes = {"padded": "padded", "deterministic": "deterministic"}
    parts = [name for key, name in suffixes.items() if case[key]]
    return "-".join([case_id(case), f"batch{case['batch']}", *parts])


_attend = jax.jit(attend, static_argnums=(0, 1), compiler_options=QUICK)


def run_of(
    case: dict[str, Any], family: str, *, on_gpu: bool = False, kernels: Any = None
) -> Callable[[Any], list[np.ndarray]]:
    """``inputs -> results``: what :func:`local_cases.attend` makes of them, as NumPy arrays.

    Args:
      case: of :func:`draw`.
      family: a name of :data:`FAMILIES`.
      on_gpu: whether Mosaic kernels are compiled; else they are interpreted.
      kernels: an implementation; None: the shipped one on a GPU, else that of :data:`FAMILIES`.
    """
    if kernels is None:
        kernels = IMPLEMENTATIONS[family] if on_gpu else FAMILIES[family]
    if case["deterministic"]:
        kernels = kernels.deterministic_variant or kernels
    interprets = family.startswith("mosaic") and not on_gpu

    def run(inputs: Any) -> list[np.ndarray]:
        return [np.asarray(x) for x in _attend(kernels, inputs.spec, *inputs.arrays)]

    def interpreted(inputs: Any) -> list[np.ndarray]:
        call = functools.partial(attend, kernels, inputs.spec)
        with _interpreter(family)(detect_races=False):
            return list(interpreted_callbacks.run(call, *inputs.arrays))

    return interpreted if interprets else run


def _interpreter(family: str) -> Any:
    if family == "mosaic_sm80":
        return interpreted_sm80.interpreted
    import interpreted  # Needs JAX 0.12.

    return interpreted.interpreted


def check(case: dict[str, Any], seed: int, run: Any, repeats: int = 1) -> None:
    """Raises AssertionError, with the case, if a result is wrong or differs from run to run.

    Args:
      case: of :func:`draw`.
      seed: of the data.
      run: ``inputs -> results``, those of :func:`local_cases.attend` as NumPy arrays.
      repeats: number of runs; out and lse repeat bit for bit, reproducible gradients, too.
    """
    inputs = local_cases.make_inputs(case, seed, batch=case["batch"])
    got, *others = (run(inputs) for _ in range(repeats))
    try:
        bounds = inputs.largest_errors(dq_in_fixed_point=case["deterministic"])
        compare.assert_within(got, inputs.reference, bounds)
        truth, one_device, keep, largest_bias = inputs.reference
        # Where no score counts, all is zero, which assert_within has compared.
        if min(case["lengths"]) >= _LEAST_FOR_STATISTICS and keep.any():
            options = 2.0, lse_factor_on_gpu(case), inputs.number_noise(), largest_bias
            compare.assert_as_good_as(got, one_device, truth, case["dtype"], *options)
        repeating = 5 if case["deterministic"] else 2
        for again in others:
            for first, second in zip(got[:repeating], again, strict=False):
                np.testing.assert_array_equal(first, second, "another run differs")
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {describe(case)}: {error}") from error
