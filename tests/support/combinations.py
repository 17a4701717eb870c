"""Random combinations of the arguments of ``burst_attention`` that are legal together."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import dense
import jax.numpy as jnp
import numpy as np
from cases import key_ranges, packed_segments
from fuzz_valid import pick
from ring_cases import Ring, whole_lengths

BATCH = 2
LAYOUTS = ("contiguous", "zigzag", "striped", "striped:3")
# Dealt to one combination after the other. Small ones come more often: what a ring costs is
# compiling, which grows with its hops.
RINGS = (1, "2+h2", 3, "2x2", 2, 8, "h4", 3, "2x2+h2", 2, 5, 1, "3+h2", 2, "2x3", "2+h2")
# Dealt, too. Interpreted kernels take longer.
KERNELS = ("xla", "triton", "xla", "xla", "reference", "xla", "xla")
HEADS = ((4, 4), (4, 2), (6, 2), (4, 1), (8, 2), (3, 3))
# Where queries are, of which a call says one at most; by_row: at other positions in each row.
PLACES = ("offset", "traced_offset", "offset_by_row", "query_positions", "positions_by_row")
READ_POSITIONS = ("alibi_slopes", "dropout", "score_mod", "mask_mod")
MASKS = (
    *("is_causal", "window", "traced_window", "segments", "prefix_lengths", "query_seq_lengths"),
    *("key_value_seq_lengths", "key_starts", "key_ends", "block_mask", "key_value_positions"),
)
MODIFIERS = (
    *MASKS,
    *PLACES,
    *("pad", "cap", "scale", "traced_scale", "sink_logits", *READ_POSITIONS, "value_dim"),
    "deterministic",
)
# How many of the draws have a modifier that nothing else rules out.
SHARES = dict.fromkeys(MODIFIERS, 0.35) | dict.fromkeys(PLACES, 0.15)
SHARES |= {"block_mask": 0.6, "score_mod": 0.45, "pad": 0.2, "deterministic": 0.15}


def _pairs(*groups):
    """Each of a group with each of the next one."""
    return {frozenset((a, b)) for first, second in groups for a in first for b in second if a != b}


# What the documentation says cannot be together.
CONFLICTS = _pairs(
    (PLACES, PLACES),
    (("block_mask",), (*PLACES, "key_value_positions", "pad")),
    (("offset_by_row", "positions_by_row"), READ_POSITIONS),
    (("window",), ("traced_window",)),
    (("scale",), ("traced_scale",)),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Combination:
    """A call of ``burst_attention`` with several modifiers.

    Attributes:
      modifiers: those that it has.
      case: the rest of it, as ``ring_cases`` describes cases.
      hiding: its arrays of masks and positions in natural order, by the arguments' names.
      options: further arguments of the call.
    """

    modifiers: frozenset[str]
    case: dict[str, Any]
    hiding: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self):
        case, (heads, kv_heads) = self.case, self.case["heads"]
        return (
            f"{case['layout']}-n{case['ring']}-h{heads}gqa{heads // kv_heads}-{case['backward']}"
            f"-{case['dtype']}-{case['implementation']}-{'+'.join(sorted(self.modifiers))}"
        )


@functools.cache
def draw(seed):
    """The combination of a seed. Its masks leave some of the scores, and hide others."""
    rng = np.random.default_rng(seed)
    modifiers = draw_modifiers(rng)
    case = draw_case(rng, modifiers, seed)
    options: dict[str, Any] = {"deterministic": True} if "deterministic" in modifiers else {}
    for _ in range(100):
        mask, hiding = draw_masks(rng, modifiers, case)
        segments = (np.ones((BATCH, length), np.int32) for length in whole_lengths(case))
        if mask.segments:
            segments = (packed_segments(rng, BATCH, length) for length in whole_lengths(case))
        seen = mask.dense(*segments, *whole_lengths(case), **hiding)
        if seen.mean() > 0.05:
            break
    else:
        raise AssertionError(f"seed {seed}: {sorted(modifiers)} leave no scores")
    if "traced_window" in modifiers:
        assert isinstance(mask.window, tuple)
        # Either side may be one that is not known where the program is made.
        kinds = pick(rng, ((jnp.int32, jnp.int32), (jnp.int32, int), (int, jnp.int32)))
        options["local_window_size"] = tuple(
            kind(side) for kind, side in zip(kinds, mask.window, strict=True)
        )
    return Combination(modifiers, case | {"mask": mask}, hiding, options)


def draw_modifiers(rng):
    """A set of modifiers that are legal together."""
    taken: set[str] = set()
    for name in map(str, rng.permutation(MODIFIERS)):
        legal = not any(frozenset((name, other)) in CONFLICTS for other in taken)
        if rng.random() < SHARES[name] and legal:
            taken.add(name)
    if "prefix_lengths" in taken:
        taken.add("is_causal")
    return frozenset(taken)


def draw_case(rng, modifiers, seed):
    """All of a case but its masks."""
    ring = RINGS[seed % len(RINGS)]
    exchange = Ring.of({"ring": ring}).exchange
    heads = [
        (n, k) for n, k in HEADS if n % exchange == 0 and (k % exchange == 0 or exchange % k == 0)
    ]
    numbers = {
        (False, False): "none",
        (True, False): "sinks",
        (False, True): "slopes",
        (True, True): "both",
    }["sink_logits" in modifiers, "alibi_slopes" in modifiers]
    mods = {"score_mod", "mask_mod"} & modifiers
    # Tokens of a shard, but with ``pad`` of the whole sequences.
    tokens = 8, 33
    if "pad" in modifiers:
        tokens = 25, 100
    t = int(rng.integers(*tokens))
    s = t if rng.random() < 0.5 else int(rng.integers(*tokens))
    case = {
        "ring": ring,
        "layout": "contiguous" if "pad" in modifiers else pick(rng, LAYOUTS),
        "heads": pick(rng, heads),
        "backward": pick(rng, ("auto", "rotate_kv", "rotate_query")),
        "shard": (t, s),
        "head_dim": pick(rng, (8, 16, 33)),
        "value_dim": pick(rng, (5, 24, 40)) if "value_dim" in modifiers else "same",
        "dtype": pick(rng, ("float32", "float32", "bfloat16")),
        "implementation": KERNELS[seed % len(KERNELS)],
        "numbers": numbers,
        "dropout": 0.3 if "dropout" in modifiers else 0.0,
        "functions": mods.pop() if len(mods) == 1 else bool(mods),
    }
    if "pad" in modifiers:
        case["pad"] = True
    if "scale" in modifiers:
        case["scale"] = pick(rng, (0.3, -0.2, 0.1))
    elif "traced_scale" in modifiers:
        # A power of two: the factor on the query does not round.
        case["scale"] = 0.25
    return case


def draw_masks(rng, modifiers, case):
    """``(mask, hiding)`` of a combination."""
    t, s = whole_lengths(case)
    window: Any = None
    if {"window", "traced_window"} & modifiers:
        window = tuple(int(side) for side in rng.integers((s // 4, 0), (s, s)))
        if "window" in modifiers:
            window = pick(rng, (window, window[0], (window[0], None), (None, window[1])))
    mask = dense.Mask(
        is_causal="is_causal" in modifiers,
        window=window,
        soft_cap=2.0 if "cap" in modifiers else None,
        segments="segments" in modifiers,
    )
    starts, ends = key_ranges(rng, BATCH, max(t, s))
    rows = pick(rng, (slice(None), 0))
    drawn = {
        "prefix_lengths": rng.integers(-1, s + 2, BATCH),
        "query_seq_lengths": rng.integers(t // 2, t + 2, BATCH),
        "key_value_seq_lengths": rng.integers(s // 2, s + 2, BATCH),
        "key_starts": starts[rows, :t],
        "key_ends": ends[rows, :t],
        "key_value_positions": rng.permutation(s + s // 4)[:s],
    }
    # The argument that each of these is, and its value.
    places = {
        "offset": ("query_offset", int(rng.integers(-t // 3, s))),
        "traced_offset": ("query_offset", jnp.int32(rng.integers(-t // 3, s))),
        "offset_by_row": ("query_offset", rng.integers(-t // 3, s, BATCH)),
        "query_positions": ("query_positions", rng.integers(-5, s + 5, t)),
        "positions_by_row": ("query_positions", rng.integers(-5, s + 5, (BATCH, t))),
    }
    hiding = {name: x.astype(np.int32) for name, x in drawn.items() if name in modifiers}
    hiding |= dict(places[name] for name in PLACES if name in modifiers)
    if "block_mask" in modifiers:
        hiding["block_mask"] = draw_table(rng, case["heads"][0], t, s)
    return mask, hiding


def draw_table(rng, heads, t, s):
    """A table of blocks, one of the program's constants or not, for all heads or each of them."""
    rows, columns = (
        pick(rng, [count for count in range(2, length + 1) if not length % count][:6])
        for length in (t, s)
    )
    shape = pick(rng, ((rows, columns), (heads, rows, columns)))
    return pick(rng, (np.asarray, jnp.asarray))(rng.random(shape) < 0.6)
