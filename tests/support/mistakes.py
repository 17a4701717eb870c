"""Callers' mistakes, by name: what is wrong, and what the message must say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from meshes import make_mesh


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


B, T, N, K, H = 2, 16, 4, 2, 8
KV = (B, T, K, H)


def good() -> dict[str, Any]:
    """Arguments that burst_attention takes."""
    return {
        "query": zeros(B, T, N, H),
        "key": zeros(*KV),
        "value": zeros(*KV),
        "mesh": make_mesh(seq=4),
    }


def arrays_of_numpy() -> dict[str, Any]:
    return {name: np.zeros(KV, np.float32) for name in ("query", "key", "value")}


def ids(*shape, dtype=np.int32):
    return np.ones(shape, dtype)


# What burst_attention and ring_attention check alike; the shapes hold on one device of a ring of 1.
SHARED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "query-rank": (
        lambda: {"query": zeros(T, N, H)},
        r"query has shape \(16, 4, 8\): it must be \[B, T, N, H\]",
    ),
    "key-rank": (
        lambda: {"key": zeros(1, *KV)},
        r"key has shape \(1, 2, 16, 2, 8\): it must be \[B, S, K, H\]",
    ),
    "value-rank": (lambda: {"value": zeros(B, T)}, r"value has shape \(2, 16\): it must be \[B, S"),
    "query-list": (
        lambda: {"query": [[1.0]]},
        "query is a list: it must be an array",
    ),
    "value-number": (lambda: {"value": 3.0}, "value is a float: it must be an array"),
    "key-none": (lambda: {"key": None}, "key is a NoneType: it must be an array"),
    "query-struct": (
        lambda: {"query": jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)},
        "query is a ShapeDtypeStruct: it must be an array",
    ),
    "key-class": (lambda: {"key": np.ndarray}, "key is a type: it must be an array"),
    "query-random-keys": (
        lambda: {"query": jax.random.split(jax.random.key(0), (B, T, N, H))},
        "query has dtype key<fry>: cast it to one of bfloat16, float16, float32",
    ),
    "value-byte-order": (
        lambda: {"value": np.zeros(KV, ">f4")},
        "value has dtype >f4: cast it to one of bfloat16, float16, float32",
    ),
    "query-int": (
        lambda: {"query": zeros(B, T, N, H, dtype=jnp.int32)},
        "query has dtype int32: cast it to one of bfloat16, float16, float32",
    ),
    "key-float64": (
        lambda: {"key": np.zeros(KV, np.float64)},
        "key has dtype float64: cast it to one of bfloat16, float16, float32",
    ),
    "value-complex": (
        lambda: {"value": zeros(*KV, dtype=jnp.complex64)},
        "value has dtype complex64: cast it",
    ),
    "query-variable": (
        lambda: {"query": nnx.Param(zeros(B, T, N, H))},
        r"query is a Param: pass the array in it, query=the_variable\[...\]",
    ),
    "query-ids-variable": (
        lambda: {
            "query_segment_ids": nnx.Variable(ids(B, T)),
            "key_value_segment_ids": ids(B, T),
        },
        r"query_segment_ids is a Variable: pass the array in it",
    ),
    "sinks-ref": (
        lambda: {"sink_logits": jax.new_ref(zeros(N))},
        r"sink_logits is a Ref: pass the array in it, sink_logits=the_variable\[...\]",
    ),
    "slopes-variable-dtype": (
        lambda: {"alibi_slopes": nnx.Param(zeros(N, dtype=jnp.bfloat16))},
        "alibi_slopes has dtype bfloat16: cast it to float32",
    ),
    "slopes-variable-shape": (
        lambda: {"alibi_slopes": nnx.Param(zeros(K))},
        r"alibi_slopes has shape \(2,\): it must be \[N\], \(4,\)",
    ),
    "sinks-list": (
        lambda: {"sink_logits": [0.0] * N},
        "sink_logits is a list: it must be a float32 array",
    ),
    "slopes-dtype": (
        lambda: {"alibi_slopes": zeros(N, dtype=jnp.bfloat16)},
        "alibi_slopes has dtype bfloat16: cast it to float32",
    ),
    "sinks-shape": (
        lambda: {"sink_logits": zeros(K)},
        r"sink_logits has shape \(2,\): it must be \[N\], \(4,\)",
    ),
    "slopes-rank": (
        lambda: {"alibi_slopes": zeros(1, N)},
        r"alibi_slopes has shape \(1, 4\): it must be \[N\], \(4,\)",
    ),
    "dtypes": (
        lambda: {"key": zeros(*KV, dtype=jnp.bfloat16)},
        "query has dtype float32, key bfloat16, value float32: cast them to one dtype",
    ),
    "key-value-shapes": (
        lambda: {"value": zeros(B, T + 16, K, H)},
        r"key has shape \(2, 16, 2, 8\), value \(2, 32, 2, 8\): they must be equal but for t",
    ),
    "batch": (
        lambda: {"key": zeros(3, T, K, H), "value": zeros(3, T, K, H)},
        "query has batch size 2, key 3: they must be equal",
    ),
    "head-dim": (
        lambda: {"key": zeros(B, T, K, 16), "value": zeros(B, T, K, 16)},
        "query has head dim 8, key 16: they must be equal",
    ),
    "heads": (
        lambda: {"key": zeros(B, T, 3, H), "value": zeros(B, T, 3, H)},
        "key has 3 heads, query 4: N must be a multiple of K",
    ),
    "more-key-heads": (
        lambda: {"key": zeros(B, T, 8, H), "value": zeros(B, T, 8, H)},
        "key has 8 heads, query 4: N must be a multiple of K",
    ),
    "empty-query": (
        lambda: {"query": zeros(B, 0, N, H)},
        r"query has shape \(2, 0, 4, 8\): no axis of \[B, T, N, H\] may be empty",
    ),
    "empty-key": (
        lambda: {"key": zeros(B, T, 0, H)},
        r"key has shape \(2, 16, 0, 8\): no axis of \[B, S, K, H\] may be empty",
    ),
    "layout": (
        lambda: {"layout": "zig-zag"},
        "layout is 'zig-zag': use one of 'contiguous', 'zigzag', 'striped', or 'striped:k' for",
    ),
    "layout-array": (
        lambda: {"layout": np.array(["zigzag"])},
        r"layout is array\(\['zigzag'\].*\): use one of 'contiguous'",
    ),
    "backward-array": (
        lambda: {"backward": np.array("auto")},
        r"backward is array\('auto'.*\): use one of 'auto'",
    ),
    "layout-none": (lambda: {"layout": None}, "layout is None: use one of 'contiguous'"),
    "backward": (
        lambda: {"backward": "rotate_q"},
        "backward is 'rotate_q': use one of 'auto', 'rotate_kv', 'rotate_query'",
    ),
    "implementation": (
        lambda: {"implementation": "flash"},
        "implementation is 'flash': use None, an Implementation, or one of 'mosaic_sm90', "
        "'triton', 'xla'",
    ),
    "implementation-unhashable": (
        lambda: {"implementation": ["xla"]},
        r"implementation is \['xla'\]: use None, an Implementation, or one of",
    ),
    "implementation-type": (
        lambda: {"implementation": 3},
        "implementation is 3: use None, an Implementation, or one of 'mosaic_sm90', 'triton', "
        "'xla'",
    ),
    "causal-string": (lambda: {"is_causal": "yes"}, "is_causal is 'yes': it must be True or False"),
    "deterministic": (lambda: {"deterministic": 1}, "deterministic is 1: it must be True or False"),
    "causal-int": (lambda: {"is_causal": 1}, "is_causal is 1: it must be True or False"),
    "scale-nan": (lambda: {"scale": float("nan")}, "scale is nan: it must be a finite number"),
    "scale-inf": (lambda: {"scale": float("inf")}, "scale is inf: it must be a finite number"),
    "scale-too-large-for-a-float": (
        lambda: {"scale": -(10**400)},
        "scale is -inf: it must be a finite number",
    ),
    "scale-too-large-for-float32": (
        lambda: {"scale": 1e39},
        r"scale is 1e\+39: float32 cannot hold such logits; it must lie between -2\*\*127 and 2",
    ),
    "scale-string": (lambda: {"scale": "auto"}, "scale is 'auto': it must be a Python number or"),
    "scale-of-each-head": (
        lambda: {"scale": jnp.ones(N)},
        r"scale is Array\(.*: it must be a Python number or None, and is static",
    ),
    "window-float": (
        lambda: {"local_window_size": 4.0},
        r"local_window_size is 4.0: it must be an int or a pair \(left, right\) of ints",
    ),
    "window-triple": (
        lambda: {"local_window_size": (1, 2, 3)},
        r"local_window_size is \(1, 2, 3\): it must be an int or a pair",
    ),
    "window-negative": (
        lambda: {"local_window_size": -1},
        r"local_window_size is -1: .* from 0 to 2\*\*31 - 1, or None",
    ),
    "window-half-negative": (
        lambda: {"local_window_size": (4, -1)},
        r"local_window_size is \(4, -1\): .* from 0 to 2",
    ),
    "window-half-text": (
        lambda: {"local_window_size": (4, "4")},
        r"local_window_size is \(4, '4'\): it must be an int or a pair",
    ),
    "window-of-each-row": (
        lambda: {"local_window_size": (jnp.zeros(B, jnp.int32), 0)},
        r"local_window_size is \(Array.*: it must be .* a side may be a JAX array too, an int",
    ),
    "window-float-array": (
        lambda: {"local_window_size": jnp.float32(3)},
        r"local_window_size is Array\(3.*: it must be an int or a pair",
    ),
    "window-list": (
        lambda: {"local_window_size": [4, 4]},
        r"local_window_size is \[4, 4\]: it must be an int or a pair",
    ),
    "window-bool": (
        lambda: {"local_window_size": True},
        "local_window_size is True: it must be an int or a pair",
    ),
    "window-too-large": (
        lambda: {"local_window_size": (2**31, 0)},
        r"local_window_size is \(2147483648, 0\): .* to 2\*\*31 - 1, or None",
    ),
    "cap-zero": (
        lambda: {"logits_soft_cap": 0.0},
        "logits_soft_cap is 0.0: it must be positive and finite, or None",
    ),
    "cap-negative": (
        lambda: {"logits_soft_cap": -30},
        "logits_soft_cap is -30.0: it must be positive and finite, or None",
    ),
    "cap-inf": (
        lambda: {"logits_soft_cap": float("inf")},
        "logits_soft_cap is inf: it must be positive and finite, or None",
    ),
    "cap-too-large-for-a-float": (
        lambda: {"logits_soft_cap": 10**400},
        "logits_soft_cap is inf: it must be positive and finite, or None",
    ),
    "cap-too-large-for-float32": (
        lambda: {"logits_soft_cap": 1e39},
        r"logits_soft_cap is 1e\+39, scale .*: float32 must hold the cap and scale / logits",
    ),
    "cap-too-small": (
        lambda: {"logits_soft_cap": 1e-40, "scale": 1.0},
        r"logits_soft_cap is 1e-40, scale 1.0: float32 must hold .*; neither may exceed 2\*\*127",
    ),
    "residual-none": (
        lambda: {"return_residual": None},
        "return_residual is None: it must be True or False",
    ),
    "residual-string": (
        lambda: {"return_residual": "lse"},
        "return_residual is 'lse': it must be True or False",
    ),
    "cap-string": (
        lambda: {"logits_soft_cap": "30"},
        "logits_soft_cap is '30': it must be a Python number or None",
    ),
    "segments-query-only": (
        lambda: {"query_segment_ids": ids(B, T)},
        "key_value_segment_ids is None but the other side's segment ids are given: pass both",
    ),
    "segments-key-only": (
        lambda: {"key_value_segment_ids": ids(B, T)},
        "query_segment_ids is None but the other side's segment ids are given: pass both",
    ),
    "segments-dtype": (
        lambda: {
            "query_segment_ids": ids(B, T),
            "key_value_segment_ids": ids(B, T, dtype=np.float32),
        },
        "key_value_segment_ids has dtype float32: convert it to int32",
    ),
    "segments-bool": (
        lambda: {
            "query_segment_ids": ids(B, T, dtype=bool),
            "key_value_segment_ids": ids(B, T),
        },
        "query_segment_ids has dtype bool: convert it to int32",
    ),
    "segments-list": (
        lambda: {"query_segment_ids": [[1] * T] * B, "key_value_segment_ids": ids(B, T)},
        "query_segment_ids is a list: it must be an int32 array",
    ),
    "segments-shape": (
        lambda: {"query_segment_ids": ids(B, T), "key_value_segment_ids": ids(B, T - 1)},
        r"key_value_segment_ids has shape \(2, 15\): it must be \[B, [TS]\], \(2, 16\)",
    ),
    "segments-rank": (
        lambda: {"query_segment_ids": ids(T), "key_value_segment_ids": ids(B, T)},
        r"query_segment_ids has shape \(16,\): it must be \[B, [TS]\], \(2, 16\)",
    ),
    "prefix-not-causal": (
        lambda: {"prefix_lengths": ids(B)},
        "prefix_lengths is given but is_causal is False, .*: set is_causal=True, or leave",
    ),
    "prefix-number": (
        lambda: {"prefix_lengths": 3, "is_causal": True},
        "prefix_lengths is a int: it must be an int32 array",
    ),
    "prefix-shape": (
        lambda: {"prefix_lengths": ids(B, T), "is_causal": True},
        r"prefix_lengths has shape \(2, 16\): it must be \[B\], \(2,\)",
    ),
    "query-lengths-dtype": (
        lambda: {"query_seq_lengths": ids(B, dtype=np.float32)},
        "query_seq_lengths has dtype float32: convert it to int32",
    ),
    "key-lengths-shape": (
        lambda: {"key_value_seq_lengths": ids(B + 1)},
        r"key_value_seq_lengths has shape \(3,\): it must be \[B\], \(2,\)",
    ),
    "starts-shape": (
        lambda: {"key_starts": ids(1, T)},
        r"key_starts has shape \(1, 16\): it must be \[B, T\], \(2, 16\) or \[T\], \(16,\)",
    ),
    "ends-bool": (
        lambda: {"key_ends": ids(B, T, dtype=bool)},
        "key_ends has dtype bool: convert it to int32",
    ),
}

# What only burst_attention can see: the mesh and global lengths.
GLOBAL: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "length-query": (
        lambda: {"query": zeros(B, 18, N, H), "layout": "zigzag"},
        r"query's length T is 18: the zigzag layout over 4 shards needs a multiple of 8; pad to 24 "
        r"\(pad_to_layout pads and masks the padding\)",
    ),
    "length-key": (
        lambda: {"key": zeros(B, 17, K, H), "value": zeros(B, 17, K, H)},
        "length S is 17: the contiguous layout over 4 shards needs a multiple of 4; pad to 20",
    ),
    "seq-axis-unknown": (
        lambda: {"seq_axis": "sequence"},
        "seq_axis is 'sequence': the mesh's axes are 'data', 'seq'",
    ),
    "seq-axis-list": (
        lambda: {"seq_axis": ["data", "seq"]},
        r"seq_axis is \['data', 'seq'\]: it must be the name of a mesh axis, a pair \(outer,",
    ),
    "seq-axes-three": (
        lambda: {"seq_axis": ("pod", "data", "seq")},
        r"seq_axis is \('pod', 'data', 'seq'\): it must be .* a pair \(outer, inner\) of",
    ),
    "seq-axis-empty": (
        lambda: {"seq_axis": ()},
        r"seq_axis is \(\): it must be .* or None for no ring",
    ),
    "seq-axes-equal": (
        lambda: {"seq_axis": ("seq", "seq")},
        r"seq_axis is \('seq', 'seq'\): it must be the name of a mesh axis, a pair",
    ),
    "seq-axes-unknown": (
        lambda: {"seq_axis": ("node", "seq")},
        "seq_axis is 'node': the mesh's axes are 'data', 'seq'",
    ),
    "ulysses-axis-tuple": (
        lambda: {"ulysses_axis": ("data",)},
        r"ulysses_axis is \('data',\): it must be the name of a mesh axis, or None",
    ),
    "ulysses-axis-is-the-ring": (
        lambda: {"ulysses_axis": "seq"},
        "ulysses_axis is 'seq', and so is seq_axis: use different mesh axes",
    ),
    "ulysses-axis-unknown": (
        lambda: {"ulysses_axis": "heads"},
        "ulysses_axis is 'heads': the mesh's axes are 'data', 'seq'",
    ),
    "ulysses-axis-twice": (
        lambda: {"ulysses_axis": "data", "batch_axis": "data"},
        "batch_axis is 'data', and so is ulysses_axis: use different mesh axes",
    ),
    "ulysses-length": (
        lambda: {
            "query": zeros(B, 20, N, H),
            "mesh": make_mesh(data=2, seq=4),
            "ulysses_axis": "data",
        },
        r"query's length T is 20: it must be a multiple of 8, the devices on seq_axis 'seq'",
    ),
    "ulysses-query-heads": (
        lambda: {
            "query": zeros(B, T, 3, H),
            "key": zeros(B, T, 3, H),
            "value": zeros(B, T, 3, H),
            "mesh": make_mesh(data=2, seq=4),
            "ulysses_axis": "data",
        },
        "ulysses_axis 'data' has 2 devices, the query 3 heads on each: N must be a multiple",
    ),
    "ulysses-key-heads": (
        lambda: {
            "query": zeros(B, T, 6, H),
            "key": zeros(B, T, 3, H),
            "value": zeros(B, T, 3, H),
            "mesh": make_mesh(data=2, seq=4),
            "ulysses_axis": "data",
        },
        "ulysses_axis 'data' has 2 devices, the key 3 heads on each: K must be a multiple or",
    ),
    "batch-axis-unknown": (
        lambda: {"batch_axis": ("data", "fsdp")},
        "batch_axis is 'fsdp': the mesh's axes are 'data', 'seq'",
    ),
    "head-axis-list": (
        lambda: {"tensor_axis": ["data"]},
        r"tensor_axis is \['data'\]: it must be a mesh axis, a tuple of them, or None",
    ),
    "batch-axis-number": (
        lambda: {"batch_axis": 0},
        "batch_axis is 0: it must be a mesh axis, a tuple of them, or None",
    ),
    "axis-twice": (
        lambda: {"batch_axis": "data", "tensor_axis": "data"},
        "tensor_axis is 'data', and so is batch_axis: use different mesh axes",
    ),
    "seq-axis-twice": (
        lambda: {"tensor_axis": "seq"},
        "tensor_axis is 'seq', and so is seq_axis: use different mesh axes",
    ),
    "axis-twice-in-one": (
        lambda: {"batch_axis": ("data", "data")},
        "batch_axis is 'data', and so is batch_axis",
    ),
    "batch-not-divisible": (
        lambda: {
            "query": zeros(3, T, N, H),
            "key": zeros(3, T, K, H),
            "value": zeros(3, T, K, H),
            "mesh": make_mesh(data=2, seq=4),
            "batch_axis": "data",
        },
        r"batch size B is 3: it must be a multiple of 2, the size of mesh axes \('data',\)",
    ),
    "heads-not-divisible": (
        lambda: {
            "query": zeros(B, T, 3, H),
            "key": zeros(B, T, 3, H),
            "value": zeros(B, T, 3, H),
            "mesh": make_mesh(data=2, seq=4),
            "tensor_axis": "data",
        },
        "number of query heads N is 3: it must be a multiple of 2, the size of mesh axes",
    ),
    "key-heads-not-divisible": (
        lambda: {
            "key": zeros(B, T, 1, H),
            "value": zeros(B, T, 1, H),
            "mesh": make_mesh(data=2, seq=4),
            "tensor_axis": "data",
        },
        "number of key/value heads K is 1: it must be a multiple of 2",
    ),
    "mesh-none": (
        lambda: {"mesh": None},
        r"mesh is None and no mesh is set: pass mesh=, or enter jax.set_mesh\(mesh\)",
    ),
    "mesh-devices": (
        lambda: {"mesh": jax.devices()},
        "mesh is a list: it must be a jax.sharding.Mesh",
    ),
    "mesh-abstract": (
        lambda: {"mesh": make_mesh(seq=4).abstract_mesh} | arrays_of_numpy(),
        r"mesh is an AbstractMesh, and neither it nor an array names devices: pass a jax.sharding",
    ),
    "mesh-string": (lambda: {"mesh": "seq"}, "mesh is a str: it must be a jax.sharding.Mesh"),
}

IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "triton-on-cpu": (
        {"implementation": "triton"},
        "'triton' cannot run: it needs an NVIDIA GPU, the arrays are on 'cpu'; use None or 'xla'",
    ),
    "mosaic-gpu-on-cpu": (
        {"implementation": "mosaic_sm90"},
        r"'mosaic_sm90' cannot run: it needs compute capability 9.0 \(Hopper\), the arrays are on "
        "'cpu'; use None, 'triton' or 'xla'",
    ),
}
