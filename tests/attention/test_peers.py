"""Cases that other projects test their own ring attention with.

Small ones in the quick and slow tiers; all of them at the other projects' sizes in the tier
``replay``. All must meet this project's error bounds.

Three more are elsewhere: flash_attn_jax's (nothing is gathered, and every permute overlaps a
kernel) in tests/compiled/test_compiled_ring.py, Flax's layers with another ``attention_fn`` in
tests/layers/test_attention_fn.py, and MaxText's permutes in a decoder's gradient in
tests/models/test_decoder.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import compare
import dense
import pytest
import valid_calls as valid

from burst_jax.layouts.parse import LAYOUTS
from burst_jax.ring.rotation import ROTATIONS
from pallas_kernels import XLA

replay = pytest.mark.replay


@dataclasses.dataclass(frozen=True)
class PeerCase:
    """Random arrays and a mask.

    Attributes:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      masks: arguments of ``burst_attention``, with their values.
      packed: whether sequences are documents with padding after each.
      dtype: of the arrays.
    """

    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    masks: tuple[tuple[str, Any], ...]
    packed: bool
    dtype: str

    def __str__(self):
        sizes, packed = "x".join(map(str, self.query)), "-packed" if self.packed else ""
        return f"{sizes}-group{self.query[2] // self.key[2]}-{self.dtype}{packed}"

    def program(self, mesh: dict[str, int], **options: Any) -> valid.Program:
        """On a mesh; ``options`` override the case's masks."""
        (batch, t, heads, dim), (_, s, kv_heads, _) = self.query, self.key
        features = ("segments",) if self.packed else ()
        options = {"heads": (heads, kv_heads), "dims": (dim, dim), "dtype": self.dtype} | options
        program = valid.program_of(
            mesh, features, t=t, s=s, implementation=XLA, **dict(self.masks) | options
        )
        return dataclasses.replace(program, sizes=program.sizes | {"B": batch})


# Consecutive tests have the same case, and its reference takes up to a minute.
@functools.lru_cache(maxsize=1)
def solved(problem: PeerCase):
    """The arrays and cotangents, and dense attention of them."""
    arrays, cotangents = valid.draw(problem.program({"seq": 1}), 0)
    ids = {name: x for name, x in arrays.items() if name not in valid.QKV}
    keep = dense.kept(problem.query[1], problem.key[1], **dict(problem.masks), **ids)
    given = *(arrays[name] for name in valid.QKV), keep, *cotangents
    truth, one = (
        dense.by_row_and_key_head(results, *given) for results in (dense.truth, dense.one_device)
    )
    return arrays, cotangents, dense.Reference(truth, one, keep, 0.0)


def assert_as_good_as_dense(problem: PeerCase, mesh: dict[str, int], **options: Any):
    """Asserts that out, lse and gradients are as exact as dense attention in the same dtype."""
    arrays, cotangents, reference = solved(problem)
    got = valid.compiled(problem.program(mesh, **options), arrays)(arrays, cotangents)
    compare.assert_exact(got, reference, problem.dtype)


def case_id(value):
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return "+".join(value) or "full" if isinstance(value, dict) else str(value)


# --- TransformerEngine ---------------------------------------------------------------------------
#
# tests/jax/test_distributed_fused_attn.py: data x context x tensor, bfloat16, rows packed with
# padding inside every segment's slot and at the end, groups of 1 and of 8 query heads, windows of
# (20, 0). Its own tolerance, 0.039, would pass a gradient of zeros.

AXES = ("data", "seq", "tensor")
CAUSAL, WINDOW = {"is_causal": True}, {"local_window_size": (20, 0)}


def bfloat16_problem(sizes, groups, mask, packed):
    batch, length, heads, dim = sizes
    shapes = sizes, (batch, length, heads // groups, dim)
    return PeerCase(*shapes, tuple(mask.items()), packed, "bfloat16")


def test_transformer_engine_s_distributed_matrix():
    mesh = 1, 2, 2
    problem = bfloat16_problem((2, 32 * mesh[1], 16, 16), 8, CAUSAL, packed=True)
    assert_as_good_as_dense(problem, dict(zip(AXES, mesh, strict=True)), layout="zigzag")


MESHES = [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2), (1, 4, 1), (1, 4, 2), (2, 4, 1), (1, 8, 1)]
# For one device on the context axis.
SIZES = [(2, 256, 8, 128), (4, 512, 16, 64)]


def whole_matrix():
    """Every case, consecutive ones with one reference: ``(problem, mesh, layout, options)``."""
    cases = []
    for seq, (batch, each, heads, dim), groups, packed, mask in itertools.product(
        (2, 4, 8), SIZES, (1, 8), (False, True), ({}, CAUSAL, WINDOW)
    ):
        problem = bfloat16_problem((batch, each * seq, heads, dim), groups, mask, packed)
        # A window of (20, 0) hides what is ahead, whether the call is causal or not.
        calls = [mask, mask | CAUSAL] if mask is WINDOW else [mask]
        # The balanced order is two chunks a device for whole rows, stripes for packed ones.
        layouts = "contiguous", "striped" if packed else "zigzag"
        for mesh, layout, call in itertools.product(MESHES, layouts, calls):
            if mesh[1] == seq and problem.key[2] % mesh[2] == 0:
                cases.append((problem, mesh, layout, call))
    return cases


@replay
@pytest.mark.parametrize(
    ("problem", "mesh", "layout", "mask"),
    [pytest.param(*case, id="-".join(map(case_id, case))) for case in whole_matrix()],
)
def test_transformer_engine_s_whole_distributed_matrix(problem, mesh, layout, mask):
    assert_as_good_as_dense(problem, dict(zip(AXES, mesh, strict=True)), layout=layout, **mask)


def test_the_whole_matrix_lacks_only_key_heads_that_the_mesh_cannot_split():
    met = {(problem.query[2:], case[0], mesh) for problem, mesh, *case in whole_matrix()}
    assert {mesh for *_, mesh in met} == set(MESHES)
    kept = {
        (sizes, groups, mesh)
        for sizes, groups, mesh in itertools.product(SIZES, (1, 8), MESHES)
        if sizes[2] // groups % mesh[2] == 0
    }
    # Each with two layouts, rows packed or not, and four masks.
    assert len(whole_matrix()) == len(kept) * 2 * 2 * 4


# --- jondeaton/ring-attention-jax-pallas ---------------------------------------------------------


@pytest.mark.parametrize(
    ("q_length", "kv_length", "head_dim", "is_causal"),
    [
        pytest.param(64, 512, 16, True, marks=pytest.mark.slow),
        pytest.param(2048, 128, 128, False, marks=replay),
        pytest.param(2048, 2048, 128, True, marks=replay),
    ],
)
def test_jondeaton_s_lengths(q_length, kv_length, head_dim, is_causal):
    """Lengths of query and key, on four devices."""
    shapes = (1, q_length, 2, head_dim), (1, kv_length, 2, head_dim)
    problem = PeerCase(*shapes, (("is_causal", is_causal),), False, "float32")
    assert_as_good_as_dense(problem, {"seq": 4}, layout="striped")


# --- Burst-Attention -----------------------------------------------------------------------------


def burst_cases():
    """``(problem, ring, layout, rotation)``: 2 rows of 256 tokens a device, 32 heads of 128."""
    rings = {2: [(2,)], 4: [(4,), (2, 2)], 8: [(8,), (2, 4), (4, 2)]}
    cases = []
    for n, is_causal in itertools.product(rings, (False, True)):
        shape = 2, 256 * n, 32, 128
        problem = PeerCase(shape, shape, (("is_causal", is_causal),), False, "float16")
        layouts = LAYOUTS if is_causal else ("contiguous",)
        cases += [(problem, *case) for case in itertools.product(rings[n], layouts, ROTATIONS)]
    return cases


@replay
@pytest.mark.parametrize(
    ("problem", "ring", "layout", "rotation"),
    [pytest.param(*case, id="-".join(map(case_id, case))) for case in burst_cases()],
)
def test_burst_s_sizes(problem, ring, layout, rotation):
    mesh = dict(zip(("outer", "inner") if len(ring) == 2 else ("seq",), ring, strict=True))
    assert_as_good_as_dense(problem, mesh, layout=layout, backward=rotation)
