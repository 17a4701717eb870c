"""Cases of whole rings: meshes, inputs, what the ring makes of them, and the truth."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import compare
import dense
import functions
import jax
import jax.numpy as jnp
import numpy as np
from cases import packed_segments, value_dim
from implementations import IMPLEMENTATIONS, QUICK
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import burst_jax

MASKS = {
    "full": dense.Mask(),
    "causal": dense.Mask(is_causal=True),
    "window96": dense.Mask(is_causal=True, window=96),
    "window40_17": dense.Mask(window=(40, 17)),
    "packed": dense.Mask(segments=True),
    "packed_causal": dense.Mask(is_causal=True, segments=True),
    "packed_window_cap": dense.Mask(is_causal=True, window=50, segments=True, soft_cap=4.0),
}


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices that a sequence is split over.

    "4": on a ring. "2x3": on two levels. "2+h4", "h4": four Ulysses devices for each of the ring's
    shards.
    """

    sizes: tuple[int, ...]
    exchange: int

    @classmethod
    def of(cls, case):
        ring, _, exchange = str(case["ring"]).partition("h")
        sizes = tuple(int(size) for size in ring.rstrip("+").split("x") if size)
        return cls(sizes, int(exchange or 1))

    @property
    def size(self):
        """Shards of the layout."""
        return math.prod(self.sizes)

    @property
    def names(self):
        """Mesh axes that the sequence is split over."""
        ring = {0: (), 1: ("seq",), 2: ("outer", "inner")}[len(self.sizes)]
        return ring + (("heads",) if self.exchange > 1 else ())

    @property
    def options(self) -> dict[str, Any]:
        """As burst_attention's arguments."""
        names = self.names
        if self.exchange == 1:
            return {"seq_axis": names if len(names) > 1 else names[0]}
        return {"seq_axis": names[:-1] or None, "ulysses_axis": names[-1]}

    def mesh(self):
        shape = self.sizes + ((self.exchange,) if self.exchange > 1 else ())
        return mesh_of(AxisType.Auto, **dict(zip(self.names, shape, strict=True)))


DROPOUT_KEY = functools.partial(jax.random.key, 5)


def a_case(ring, layout, mask, backward="rotate_kv", implementation="xla", shard="even"):
    case = {"ring": ring, "layout": layout, "mask": mask, "backward": backward, "shard": shard}
    rest = {"heads": (4, 2), "head_dim": 16, "dtype": "float32", "implementation": implementation}
    return case | rest


def case_id(case):
    heads, kv_heads = case["heads"]
    dims = dict.fromkeys((case["head_dim"], value_dim(case)))
    words = [
        case["layout"], f"n{case['ring']}", case["mask"], f"h{heads}gqa{heads // kv_heads}",
        case["backward"], case["shard"], f"dim{'_'.join(map(str, dims))}", case["dtype"],
        "" if case.get("numbers", "none") == "none" else case["numbers"],
        *(name for name in ("dropout", "functions") if case.get(name)),
    ]  # fmt: skip
    return "-".join(filter(None, words))


def lengths(shard, layout, ring):
    """T and S whose shards have the odd sizes that the layout permits.

    ``shard`` names the tokens of a shard of queries and of keys, or is a pair of them.
    """
    # A zigzag shard is two equal halves; Ulysses devices split a shard equally.
    stripe = int(layout.partition(":")[2] or 1)
    step = math.lcm(2 if layout == "zigzag" else stripe, ring.exchange)
    named = {
        "even": (64, 64),
        "63": (63, 63),
        "50": (50, 50),
        "100": (100, 100),
        "longer_keys": (20, 57),
        "longer_queries": (70, 31),
    }
    t, s = named[shard] if isinstance(shard, str) else shard
    return tuple(-(-length // step) * step * ring.size for length in (t, s))


def mask_of(case):
    """The mask of a case, which names one of ``MASKS`` or is one."""
    return MASKS[case["mask"]] if isinstance(case["mask"], str) else case["mask"]


def make_inputs(case, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    t, s = lengths(case["shard"], case["layout"], Ring.of(case))
    heads, kv_heads = case["heads"]
    dim, value, batch = case["head_dim"], value_dim(case), 2
    dtype = jnp.dtype(case["dtype"])
    shapes = [(batch, t, heads, dim), *((batch, s, kv_heads, lanes) for lanes in (dim, value))]
    shapes.append((batch, t, heads, value))
    # Rounded to the tested dtype first: the truth starts from the same numbers.
    q, k, v, do = (rng.normal(size=x).astype(dtype) for x in shapes)
    q, k = (q * dtype.type(scale)), (k * dtype.type(scale))
    dlse = rng.normal(size=(batch, t, heads)).astype(np.float32)
    segments = (None, None)
    if mask_of(case).segments:
        segments = (packed_segments(rng, batch, t), packed_segments(rng, batch, s))
        if t == s:
            segments = (segments[0], segments[0])
    return (q, k, v), (do, dlse), segments


def ring_results(
    case, arrays, cotangents, segments, attention=burst_jax.burst_attention, **options: Any
):
    """(out, lse, dq, dk, dv) in natural order, then gradients of per-head parameters.

    ``attention`` takes the arguments of ``burst_attention``.
    In small tiles unless ``options`` names another implementation: in the tiles that ship a shard
    here is one tile, so that the second half of the local block's work would be empty.
    """
    ring, layout = Ring.of(case), case["layout"]
    mesh, n = ring.mesh(), ring.size
    sharding = jax.NamedSharding(mesh, P(None, ring.names))
    put = functools.partial(jax.device_put, device=sharding)
    arrays, cotangents, segments = jax.tree.map(
        lambda x: put(in_layout(case, x)), (arrays, cotangents, segments)
    )
    given: dict[str, Any] = ring.options | mask_of(case).options | {"backward": case["backward"]}
    given |= {"implementation": IMPLEMENTATIONS["xla"], **options}
    given |= {"mesh": mesh, "layout": layout, "return_residual": True}
    if case.get("dropout"):
        given |= {"dropout_rate": case["dropout"], "dropout_key": DROPOUT_KEY()}
    given |= functions.called(case.get("functions"))
    numbers = dense.per_head(case.get("numbers", "none"), case["heads"][0])

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(arrays, cotangents, segments, numbers):
        of_tokens = {"query_segment_ids": segments[0], "key_value_segment_ids": segments[1]}

        def attend(query, key, value, numbers):
            return attention(query, key, value, **of_tokens, **numbers, **given)

        primal, vjp = jax.vjp(attend, *arrays, numbers)
        *gradients, of_numbers = vjp(cotangents)
        return (*primal, *gradients), of_numbers

    results, of_numbers = run(arrays, cotangents, segments, numbers)
    results = [np.asarray(x) for x in results]
    if layout != "contiguous":
        results = [burst_jax.from_layout(x, layout, n) for x in results]
    return [*results, *(np.asarray(of_numbers[name]) for name in sorted(numbers))]


def in_layout(case, x, axis=1):
    """Tokens along an axis in the order of a case's layout; the contiguous one may be padded."""
    if case["layout"] == "contiguous":
        return x
    return burst_jax.to_layout(x, case["layout"], Ring.of(case).size, axis)


def oracle(case, arrays, cotangents, segments, hiding=None, mask=None):
    """``(truth, one device's results, keep)``; ``hiding`` are further masks' arrays."""
    mask = mask or mask_of(case)
    q_ids, kv_ids = segments
    lengths = arrays[0].shape[1], arrays[1].shape[1]
    keep = mask.dense(q_ids, kv_ids, *lengths, **(hiding or {}))
    keep = np.broadcast_to(keep, (arrays[0].shape[0] if hiding else len(keep), *keep.shape[1:]))
    numbers = dense.per_head(case.get("numbers", "none"), case["heads"][0])
    distance = dense.distances(*lengths, **(hiding or {}))
    batch, _, heads, _ = arrays[0].shape
    q, kv = dense.places(*lengths, **(hiding or {}))
    score, factors, called = None, None, functions.called(case.get("functions"))
    if called:
        score, seen = functions.on_all(batch, heads, q[0], kv)
        score = score if "score_mod" in called else None
        keep = functions.both(keep, seen) if "mask_mod" in called else keep
    args = (*arrays, keep, *cotangents, mask.soft_cap, numbers, distance)
    if case.get("dropout"):
        seeds = jax.random.bits(DROPOUT_KEY(), (batch, heads))
        factors = dense.dropout_factors(seeds, case["dropout"], q[0], kv)
    of_scores = {"factors": factors, "score": score}
    return dense.truth(*args, **of_scores), dense.one_device(*args, **of_scores), keep


def assert_exact(case, *, hiding=None, mask=None, **options):
    """As exact as one device, and exactly zero where there is nothing to see.

    ``hiding`` are arguments that say further masks and positions, in natural order;
    ``mask`` is the mask that all arguments together say, if it is not the case's.
    """
    inputs = make_inputs(case)
    given = dict(hiding or {})
    by_token = {"key_starts", "key_ends", "query_positions", "key_value_positions"}
    for name in by_token & given.keys():
        given[name] = in_layout(case, given[name], axis=-1)
    got = ring_results(case, *inputs, **given, **options)
    truth, one_device, keep = oracle(case, *inputs, hiding, mask)
    kinds = (case["dtype"], "float32", *[case["dtype"]] * 3)
    assert tuple(x.dtype.name for x in got[:5]) == kinds
    compare.assert_as_good_as(got, one_device, truth, case["dtype"])
    blind = ~np.broadcast_to(dense.sees(keep), truth[1].shape)
    unseen = ~np.broadcast_to(dense.is_seen(keep, truth[3].shape[2]), truth[3].shape[:3])
    out, lse, dq, dk, dv, *_ = got
    for x, rows in ((out, blind), (dq, blind), (dk, unseen), (dv, unseen)):
        assert not x[rows].any()
    numbers = dense.per_head(case.get("numbers", "none"), case["heads"][0])
    sinks = np.broadcast_to(numbers.get("sink_logits", -np.inf), lse.shape)
    np.testing.assert_allclose(lse[blind], sinks[blind], rtol=1e-6, atol=1e-6)


def kept_scores(sizes, layout, lengths, window, rotates_query, stop):
    """How many scores a window keeps at a stop, by device; ``lengths`` of a shard's T and S."""
    n = math.prod(sizes)
    q, kv = (burst_jax.positions(layout, length * n, n).reshape(n, -1) for length in lengths)
    left, right = (10**9 if side is None else side for side in window)
    kept = []
    for device in range(n):
        place = np.subtract(np.unravel_index(device, sizes), stop) % sizes
        source = np.ravel_multi_index(tuple(place), sizes)
        at_q, at_kv = (source, device) if rotates_query else (device, source)
        ahead = q[at_q][:, None] - kv[at_kv][None, :]
        kept.append(int(((ahead <= left) & (ahead >= -right)).sum()))
    return kept
