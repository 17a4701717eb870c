"""Callers' mistakes: the arguments that are wrong, and what the message must have.

One row for each message; tests/attention/test_fuzz.py draws further wrong values.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from meshes import make_mesh


def zeros(*shape, dtype=jnp.float32) -> Any:
    return jax.device_put(np.zeros(shape, dtype))  # Compiles nothing.


def ids(*shape, dtype=np.int32) -> Any:
    return np.ones(shape, dtype)


B, T, N, K, H = 2, 16, 4, 2, 8
KV = (B, T, K, H)


def good() -> dict[str, Any]:
    """Arguments that burst_attention accepts."""
    query, key, value = zeros(B, T, N, H), zeros(*KV), zeros(*KV)
    return {"query": query, "key": key, "value": value, "mesh": make_mesh(seq=4)}


def heads(query: int, key: int) -> dict[str, Any]:
    """Arrays with these numbers of heads."""
    return {"query": zeros(B, T, query, H)} | dict.fromkeys(("key", "value"), zeros(B, T, key, H))


Rows = list[tuple[dict[str, Any], str]]
# fmt: off
# What all functions check; the shapes hold on one device of a ring of 1.
SHARED: Rows = [
    ({"query": zeros(T, N, H)}, r"query has shape \(16, 4, 8\): it must be \[B, T, N, H\]"),
    ({"key": zeros(1, *KV)}, r"key has shape \(1, 2, 16, 2, 8\): it must be \[B, S, K, H\]"),
    ({"query": [[1.0]]}, "query is a list: it must be an array"),
    ({"query": jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)},
     "query is a ShapeDtypeStruct: it must be an array"),
    ({"query": jax.random.wrap_key_data(jnp.zeros((B, T, N, H, 2), jnp.uint32))},
     "query has dtype key<fry>: cast it to one of bfloat16, float16, float32"),
    ({"value": np.zeros(KV, ">f4")},
     "value has dtype >f4: cast it to one of bfloat16, float16, float32"),
    ({"query": nnx.Param(zeros(B, T, N, H))},
     r"query is a Param: pass the array in it, query=the_variable\[...\]"),
    ({"sink_logits": jax.new_ref(zeros(N))},
     r"sink_logits is a Ref: pass the array in it, sink_logits=the_variable\[...\]"),
    ({"alibi_slopes": nnx.Param(zeros(N, dtype=jnp.bfloat16))},
     "alibi_slopes has dtype bfloat16: cast it to float32"),
    ({"alibi_slopes": nnx.Param(zeros(K))},
     r"alibi_slopes has shape \(2,\): it must be \[N\], \(4,\), one value per query head \(in r"),
    ({"sink_logits": np.ma.masked_array(np.zeros(N, np.float32))},
     "sink_logits is a MaskedArray: it must be a float32 array"),
    ({"sink_logits": [0.0] * N}, "sink_logits is a list: it must be a float32 array"),
    ({"key": zeros(*KV, dtype=jnp.bfloat16)},
     "query has dtype float32, key bfloat16, value float32: cast them to one dtype"),
    ({"value": zeros(B, T + 16, K, H)},
     r"key has shape \(2, 16, 2, 8\), value \(2, 32, 2, 8\): they must be equal but for t"),
    ({"query": zeros(3, T, N, H)}, "query has batch size 3, key 2: they must be equal"),
    ({"query": zeros(B, T, N, 16)}, "query has head dim 16, key 8: they must be equal"),
    (heads(4, 3), "key has 3 heads, query 4: the number of query heads must be a multiple of"),
    (heads(4, 8), "key has 8 heads, query 4: the number of query heads must be a multiple of"),
    ({"query": zeros(B, 0, N, H)},
     r"query has shape \(2, 0, 4, 8\): no axis of \[B, T, N, H\] may be empty"),
    ({"layout": "zig-zag"},
     "layout is 'zig-zag': use one of 'contiguous', 'zigzag', 'striped', 'striped:k' for"),
    ({"backward": "rotate_q"},
     "backward is 'rotate_q': use one of 'auto', 'rotate_kv', 'rotate_query'"),
    ({"implementation": "flash"},
     "implementation is 'flash': use None, an Implementation, or one of 'mosaic_sm90', "
     "'mosaic_sm80', 'xla'"),
    ({"implementation": ["xla"]},
     r"implementation is \['xla'\]: use None, an Implementation, or one of"),
    ({"is_causal": "yes"}, "is_causal is 'yes': it must be True or False"),
    ({"deterministic": 1}, "deterministic is 1: it must be True or False"),
    ({"return_residual": None}, "return_residual is None: it must be True or False"),
    ({"scale": float("nan")}, "scale is nan: it must be a finite number"),
    ({"scale": -(10**400)}, "scale is -inf: it must be a finite number"),
    ({"scale": 1e+39},
     r"scale is 1e\+39: float32 cannot hold such logits; it must be between -2\*\*127 and 2"),
    ({"scale": jnp.ones(N)},
     r"scale is Array\(.*: it must be a Python number or None, and is static"),
    ({"local_window_size": 4.0},
     r"local_window_size is 4.0: it must be an int or a pair \(left, right\) of ints"),
    ({"local_window_size": (4, -1)}, r"local_window_size is \(4, -1\): .* from 0 to 2"),
    ({"local_window_size": (jnp.zeros(B, jnp.int32), 0)},
     r"local_window_size is \(Array.*: it must be .* a side may be a JAX array too, an int"),
    ({"local_window_size": (2 ** 31, 0)},
     r"local_window_size is \(2147483648, 0\): .* to 2\*\*31 - 1, or None"),
    ({"attention_chunk_size": jnp.int32(8)},
     r"attention_chunk_size is Array\(.*, a JAX array: it must .* a static argument of jax.jit"),
    ({"attention_chunk_size": 0},
     "attention_chunk_size is 0: it must be an integer, at least 1"),
    ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0: it must be positive and finite, or None"),
    ({"logits_soft_cap": 10 ** 400},
     "logits_soft_cap is inf: it must be positive and finite, or None"),
    ({"logits_soft_cap": 1e+39},
     r"logits_soft_cap is 1e\+39, scale .*: float32 must hold the cap and scale / logits"),
    ({"logits_soft_cap": 1e-40, "scale": 1.0},
     r"logits_soft_cap is 1e-40, scale 1.0: float32 must hold .*; neither may exceed 2\*\*127"),
    ({"logits_soft_cap": "30"}, "logits_soft_cap is '30': it must be a Python number or None"),
    ({"query_segment_ids": ids(B, T)},
     "key_value_segment_ids is None but the other side's segment ids are given: pass both"),
    ({"key_value_segment_ids": ids(B, T)},
     "query_segment_ids is None but the other side's segment ids are given: pass both"),
    ({"query_segment_ids": ids(B, T), "key_value_segment_ids": ids(B, T, dtype=np.float32)},
     "key_value_segment_ids has dtype float32: convert it to int32"),
    ({"query_segment_ids": -ids(B, T), "key_value_segment_ids": ids(B, T)},
     "query_segment_ids holds -1, and padding_id is 0: pass padding_id=-1 if that marks "
     "padding, or count documents from 1"),
    ({"query_segment_ids": ids(B, T), "key_value_segment_ids": -jnp.ones((B, T), jnp.int32)},
     "key_value_segment_ids holds -1, and padding_id is 0: pass padding_id=-1 if that marks "
     "padding, or count documents from 1"),
    ({"segment_ids": -2 * ids(B, T), "padding_id": -1},
     "segment_ids holds -2, and padding_id is -1: pass padding_id=-2 if that marks padding"),
    ({"segment_ids": np.full((B, T), 2**31 - 1, np.int32), "padding_id": -1},
     r"segment_ids holds 2147483647, and padding_id is -1: .* must then be below 2\*\*31 - 1"),
    ({"segment_ids": ids(B, T), "padding_id": 0.0},
     "padding_id is 0.0: it must be an integer, at least -2147483648 and at most 2147483647"),
    ({"segment_ids": ids(B, T), "key_value_segment_ids": ids(B, T)},
     "segment_ids and key_value_segment_ids are given: pass segment_ids alone, if queries and"),
    ({"segment_ids": ids(B, T - 1)},
     r"segment_ids has shape \(2, 15\): it must be \[B, T\], \(2, 16\)"),
    ({"query_positions": jnp.full(T, 2**30, jnp.int32)},
     "query_positions holds 1073741824: positions must be between"),
    ({"query_segment_ids": [[1] * T] * B, "key_value_segment_ids": ids(B, T)},
     "query_segment_ids is a list: it must be an int32 array"),
    ({"query_segment_ids": ids(B, T), "key_value_segment_ids": ids(B, T - 1)},
     r"key_value_segment_ids has shape \(2, 15\): it must be \[B, [TS]\], \(2, 16\)"),
    ({"prefix_lengths": ids(B)},
     "prefix_lengths is given but is_causal is False, .*: set is_causal=True, or leave"),
    ({"prefix_lengths": ids(B, T), "is_causal": True},
     r"prefix_lengths has shape \(2, 16\): it must be \[B\], \(2,\)"),
    ({"key_value_seq_lengths": ids(B + 1)},
     r"key_value_seq_lengths has shape \(3,\): it must be \[B\], \(2,\)"),
    ({"key_starts": ids(1, T)},
     r"key_starts has shape \(1, 16\): it must be \[B, T\], \(2, 16\) or \[T\], \(16,\)"),
    ({"key_ends": ids(B, T, dtype=bool)}, "key_ends has dtype bool: convert it to int32"),
    ({"query_offset": True}, "query_offset is True: it must be an integer, an"),
    ({"query_offset": 2 ** 30}, r"query_offset is 1073741824: it must be between -2\*"),
    ({"query_offset": ids(B + 1)},
     r"query_offset has shape \(3,\): it must be \[\], \(\) or \[B\], \(2,\)"),
    ({"query_offset": np.array([0, -2 ** 30])},
     r"query_offset holds -1073741824: positions must be between -2\*\*30 and 2\*\*30"),
    ({"query_offset": 3, "query_positions": ids(T)},
     "query_offset is 3 and query_positions are given, .*: pass one of them"),
    ({"query_offset": jnp.int32(0), "query_positions": ids(T)},
     "query_offset is 0 and query_positions are given, .*: pass one of them"),
    ({"query_positions": ids(1, T)},
     r"query_positions has shape \(1, 16\): it must be \[T\], \(16,\) or \[B, T\], \(2, 16\)"),
    ({"key_value_positions": np.arange(2 ** 30 - T + 1, 2 ** 30 + 1)},
     "key_value_positions holds 1073741824: positions must be between"),
    ({"block_mask": np.ones((4, 4), np.int32)}, "block_mask has dtype int32: convert it to bool"),
    ({"block_mask": np.ones(4, bool)},
     r"block_mask has shape \(4,\): it must be \[T / bq, S / bk\] or"),
    ({"block_mask": np.ones((0, 4), bool)}, r"block_mask has shape \(0, 4\): it must be \[T / bq"),
    ({"block_mask": np.ones((2, 4, 4), bool)},
     r"block_mask has shape \(2, 4, 4\), query 4 heads: its first axis must be N, 4 .*or leave"),
    ({"block_mask": np.ones((5, 4), bool)},
     r"block_mask has shape \(5, 4\), 5 rows, the whole query 16 tokens: the rows must divide"),
    ({"block_mask": np.ones((4, 7), bool)},
     r"block_mask has shape \(4, 7\), 7 columns, the whole key 16 tokens: the columns must"),
    ({"score_mod": 3}, r"score_mod is 3: it must be a function, score_mod\(score, batch, head"),
    ({"mask_mod": np.ones((2, 2), bool)}, r"it must be a function, mask_mod\(batch, head"),
    ({"score_mod": lambda s, q, k: s},
     r"arguments \(s, q, k\), and it is called with 5 by position \(too many positional argum.*: "
     r"write it as score_mod\(score, batch, head, q_position, kv_position\) -> score"),
    ({"score_mod": lambda s, b, h, q, k, table: s}, r"with 5 by position \(missing .*'table'\)"),
    ({"mask_mod": lambda s, b, h, q, k: q >= k}, r"with 4 by .* argument: 'k'\): .* mask_mod\(ba"),
    ({"mask_mod": lambda b, h, q, *, k: q >= k}, r"with 4 by position \(too many positional"),
    ({"score_mod": lambda s, *_: s - s.max()}, "does 'reduce_max': it sees one score at a"),
    ({"score_mod": lambda s, *_: jnp.stack([s, s])}, r"returns float32\[2\] for one score"),
    ({"score_mod": lambda s, b, *_: b},
     r"returns int32\[\] for one score: it must return one fl"),
    ({"mask_mod": lambda b, h, q, k: q - k}, r"returns int32\[\] for one score: it must return"),
    ({"mask_mod": lambda b, h, q, k: q > k and k > 2},
     r"mask_mod is .* needs the value of a traced number \(a Python if, .*: write it with jax.num"),
    ({"score_mod": lambda s, b, h, q, k: s * np.sin(q)},
     r"score_mod is .* needs the value of a traced number \(.* or a NumPy function\): write it"),
    ({"mask_mod": lambda b, h, q, k: None}, "returns nothing for one score"),
    ({"dropout_rate": 0.1}, "dropout_rate is 0.1 and dropout_key is None: pass a new jax.random"),
    ({"dropout_rate": 1.0}, "dropout_rate is 1.0: it must be a probability below 1"),
    ({"dropout_rate": -0.1}, "dropout_rate is -0.1: it must be a probability below 1"),
    ({"dropout_rate": None}, "dropout_rate is None: it must be a Python number below 1"),
    ({"dropout_rate": 0.1, "dropout_key": np.zeros((3, 2), np.uint32)},
     r"dropout_key has shape \(3, 2\) and dtype uint32: it must be one key"),
    ({"dropout_rate": 0.1, "dropout_key": jax.random.wrap_key_data(jnp.zeros((2, 2), jnp.uint32))},
     r"dropout_key has shape \(2,\) and dtype key<fry>: it must be one key"),
    ({"dropout_key": 3}, "dropout_key is a int: it must be a jax.random.key"),
]

# What only burst_attention can see: the mesh and global lengths.
ON_DATA = {"mesh": make_mesh(data=2, seq=4)}
GLOBAL: Rows = [
    ({"query": zeros(B, 18, N, H), "layout": "zigzag"},
     "query's length T is 18: the zigzag layout over 4 shards needs a multiple of 8; pad to 24 "
     r"\(pad_to_layout pads and masks the padding\)"),
    ({"key": zeros(B, 17, K, H), "value": zeros(B, 17, K, H)},
     "length S is 17: the contiguous layout over 4 shards needs a multiple of 4; pad to 20"),
    ({"seq_axis": ["data", "seq"]},
     r"seq_axis is \['data', 'seq'\]: it must be the name of a mesh axis, a pair \(outer,"),
    ({"seq_axis": ("pod", "data", "seq")},
     r"seq_axis is \('pod', 'data', 'seq'\): it must be .* a pair \(outer, inner\) of"),
    ({"seq_axis": ()}, r"seq_axis is \(\): it must be .* or None for no ring"),
    ({"seq_axis": ("seq", "seq")},
     r"seq_axis is \('seq', 'seq'\): it must be the name of a mesh axis, a pair"),
    ({"seq_axis": ("node", "seq")}, "seq_axis is 'node': the mesh's axes are 'data', 'seq'"),
    ({"ulysses_axis": ("data",)},
     r"ulysses_axis is \('data',\): it must be the name of a mesh axis, or None"),
    ({"ulysses_axis": "seq"}, "ulysses_axis is 'seq', and so is seq_axis: use different mesh axes"),
    ({"ulysses_axis": "heads"}, "ulysses_axis is 'heads': the mesh's axes are 'data', 'seq'"),
    ({"ulysses_axis": "data", "batch_axis": "data"},
     "batch_axis is 'data', and so is ulysses_axis: use different mesh axes"),
    (ON_DATA | {"query": zeros(B, 20, N, H), "ulysses_axis": "data"},
     "query's length T is 20: it must be a multiple of 8, the devices on seq_axis 'seq'"),
    (ON_DATA | heads(3, 3) | {"ulysses_axis": "data"},
     "ulysses_axis 'data' has 2 devices, the query 3 heads on each: N must be a multiple"),
    (ON_DATA | heads(6, 3) | {"ulysses_axis": "data"},
     "ulysses_axis 'data' has 2 devices, the key 3 heads on each: K must be a multiple or"),
    ({"batch_axis": ("data", "fsdp")}, "batch_axis is 'fsdp': the mesh's axes are 'data', 'seq'"),
    ({"tensor_axis": ["data"]},
     r"tensor_axis is \['data'\]: it must be a mesh axis, a tuple of them, or None"),
    ({"tensor_axis": "seq"}, "tensor_axis is 'seq', and so is seq_axis: use different mesh axes"),
    ({"batch_axis": ("data", "data")}, "batch_axis is 'data', and so is batch_axis"),
    (ON_DATA | {name: zeros(3, *x.shape[1:]) for name, x in heads(N, K).items()}
     | {"batch_axis": "data"},
     r"batch size B is 3: it must be a multiple of 2, the size of mesh axes \('data',\)"),
    (ON_DATA | heads(3, 3) | {"tensor_axis": "data"},
     "number of query heads N is 3: it must be a multiple of 2, the size of mesh axes"),
    (ON_DATA | heads(4, 1) | {"tensor_axis": "data"},
     "number of key/value heads K is 1: it must be a multiple of 2"),
    ({"mesh": None}, r"mesh is None and no mesh is set: pass mesh=, or enter jax.set_mesh\(mesh\)"),
    ({"mesh": jax.devices()}, "mesh is a list: it must be a jax.sharding.Mesh"),
    (dict.fromkeys(("query", "key", "value"), np.zeros(KV, np.float32))
     | {"mesh": make_mesh(seq=4).abstract_mesh},
     "mesh is an AbstractMesh, and neither it nor an array names devices: pass a jax.sharding"),
]

# What the kernels or the platform do not support.
TABLE = {"block_mask": np.ones((4, 4), bool)}
MOVED = "block_mask with query_offset, query_positions or key_value_positions: .*key_starts"
ARRAY_SCALE = r"scale is .*, a JAX array: .*; pass scale=1\.0 and multiply the query by the array"
IMPOSSIBLE: Rows = [
    ({"implementation": "mosaic_sm80"},
     r"'mosaic_sm80' cannot run: it needs compute capability 8.0 \(Ampere\) or newer, the arrays "
     "are on 'cpu'; use None, which takes the fastest that can"),
    ({"implementation": "mosaic_sm90"},
     r"'mosaic_sm90' cannot run: it needs compute capability 9.0 \(Hopper\), the arrays are on "
     "'cpu'; use None, which takes the fastest that can"),
    ({"scale": jnp.float32(0.5)}, ARRAY_SCALE),
    ({"key_value_positions": ids(B, T)},
     r"key_value_positions has shape \(2, 16\): .*; pass \[S\], or .* at a time .*, without bat"),
    ({"query_offset": ids(B), "alibi_slopes": zeros(N)},
     r"query_offset has shape \(2,\), and alibi_slopes reads positions: .*; pass a query_offset"),
    ({"query_positions": ids(B, T), "dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
     r"query_positions has shape \(2, 16\), and dropout_rate reads positions: .* without batch"),
    (TABLE | {"query_offset": 4}, MOVED),
    (TABLE | {"query_positions": ids(T)}, MOVED),
    (TABLE | {"key_value_positions": ids(T)}, MOVED),
]
# fmt: on
# A message that matches anything would let every row pass.
assert not any(re.search(message, "") for _, message in SHARED + GLOBAL + IMPOSSIBLE)
