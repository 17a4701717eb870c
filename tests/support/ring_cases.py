"""Cases of whole rings, by the levels of their factors."""

from __future__ import annotations

import math
from typing import Any

import dense
import functions
import implementations
import numpy as np
import valid_calls as valid
from cases import MASKS, value_dim

import burst_jax


def a_case(ring, layout, mask, backward="rotate_kv", implementation="xla", shard="even"):
    """``ring``: "4", on two levels "2x3", or "2+h4", "h4": four Ulysses devices for each shard."""
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


def mesh_of_ring(ring) -> dict[str, int]:
    """The sizes of a ring's mesh axes."""
    ring, _, ulysses = str(ring).partition("h")
    sizes = [int(size) for size in ring.rstrip("+").split("x") if size]
    names = ("outer", "inner") if len(sizes) == 2 else ("seq",)
    return dict(zip(names, sizes, strict=False)) | ({"ulysses": int(ulysses)} if ulysses else {})


def lengths(shard, layout, mesh):
    """T and S whose shards have the odd sizes that the layout permits.

    ``shard`` names the tokens of a shard of queries and of keys.
    """
    # A zigzag shard is two equal halves; Ulysses devices split a shard equally.
    ulysses = mesh.get("ulysses", 1)
    n = math.prod(mesh.values()) // ulysses
    step = math.lcm(2 if layout == "zigzag" else int(layout.partition(":")[2] or 1), ulysses)
    named = {"even": (64, 64), "longer_keys": (20, 57), "longer_queries": (70, 31)}
    by_shard = named[shard] if shard in named else (int(shard),) * 2
    return tuple(-(-length // step) * step * n for length in by_shard)


def program_of(case, **options: Any) -> valid.Program:
    """The program of a case; ``options`` are further arguments of the call."""
    mesh, masks = mesh_of_ring(case["ring"]), dict(MASKS[case["mask"]])
    features = ["segments"] if masks.pop("segments", False) else []
    features += ["dropout"] if case.get("dropout") else []
    features += [*dense.per_head(case.get("numbers", "none"), 1)]
    features += [*functions.called(case.get("functions"))]
    t, s = lengths(case["shard"], case["layout"], mesh)
    names = {"layout", "backward", "implementation", "heads", "dtype"} & case.keys()
    given = {name: case[name] for name in names}
    dims = case["head_dim"], value_dim(case)
    return valid.program_of(mesh, tuple(features), t=t, s=s, dims=dims, **given | masks | options)


def assert_exact(
    case, attention=burst_jax.burst_attention, jit=implementations.quick_jit, **options: Any
):
    """As exact as one device, and exactly zero where there is nothing to see."""
    valid.assert_exact(program_of(case, **options), attention, factor=1.5, jit=jit)


def kept_scores(sizes, layout, lengths, window, rotates_query, step, table=None):
    """How many scores count at a ring step, by device; ``lengths`` of a shard's T and S."""
    n = math.prod(sizes)
    t, s = (n * length for length in lengths)
    keep = dense.kept(t, s, local_window_size=window, block_mask=table)[0, 0]
    q, kv = (burst_jax.positions(layout, length, n).reshape(n, -1) for length in (t, s))
    counts = []
    for device in range(n):
        place = np.subtract(np.unravel_index(device, sizes), step) % sizes
        source = np.ravel_multi_index(tuple(place), sizes)
        at_q, at_kv = (source, device) if rotates_query else (device, source)
        counts.append(int(keep[np.ix_(q[at_q], kv[at_kv])].sum()))
    return counts
