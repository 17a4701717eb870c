"""The public functions: ``gated_delta_rule``, its single step, and ``short_convolution``."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from burst_jax.attention.segment_ids import check_ids, check_padding_id
from burst_jax.attention.validation import check_scale
from burst_jax.errors import check_bool
from burst_jax.layouts.parse import LayoutLike
from burst_jax.layouts.tables import DocumentTables
from burst_jax.linear import convolution, delta_rule
from burst_jax.linear.arrays import (
    CONVOLVED,
    DIMENSIONS,
    OUT,
    STATE,
    STEP,
    TAIL,
    check_floats,
    check_rule,
    check_shapes,
    check_tail,
    without_absent,
)
from burst_jax.linear.devices import Devices, Watched
from burst_jax.linear.document_tables import check_no_states, run_arrays
from burst_jax.parallel.mesh import AxisNames
from pallas_kernels.linear.choice import check as check_implementation


class _Shared(TypedDict, total=False):
    """The keyword arguments that the functions of whole sequences share, for their overloads."""

    mesh: Mesh | AbstractMesh | None
    axis_name: AxisNames
    seq_axis: AxisNames
    batch_axis: AxisNames
    tensor_axis: AxisNames
    layout: LayoutLike
    segment_ids: jax.Array | None
    padding_id: int
    document_tables: DocumentTables | None


class _Options(_Shared, total=False):
    """Those of :func:`gated_delta_rule`."""

    scale: float | None
    initial_state: jax.Array | None
    implementation: str | None


# Inconsistent to a type checker, which must assume that a TypedDict may have further keys.
@overload
def gated_delta_rule(  # pyrefly: ignore[inconsistent-overload]
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    return_final_state: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def gated_delta_rule(  # pyrefly: ignore[inconsistent-overload]
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    return_final_state: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def gated_delta_rule(  # pyrefly: ignore[inconsistent-overload]
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    return_final_state: bool,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: AxisNames = None,
    seq_axis: AxisNames = "seq",
    batch_axis: AxisNames = None,
    tensor_axis: AxisNames = None,
    layout: LayoutLike = "contiguous",
    scale: float | None = None,
    segment_ids: jax.Array | None = None,
    padding_id: int = 0,
    document_tables: DocumentTables | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Linear attention with the gated delta rule, over sequences that devices share.

    .. math::
        S_t = (I - b_t k_t k_t^T) a_t S_{t-1} + b_t k_t v_t^T, \qquad o_t = scale \cdot S_t^T q_t

    with :math:`a = \exp(log\_decay)` and :math:`b = beta`. The decay :math:`a_t` is a number per
    head (Gated DeltaNet, arXiv 2412.06464), or a diagonal matrix: a number per key channel (Kimi
    Delta Attention, arXiv 2510.26692). Each device reduces its tokens to an affine map of the
    state, the devices exchange these maps, and then each one scans its tokens: no token is sent,
    and no device waits for another one's scan.

    Letters: B batch, T tokens, K key heads, N value heads, H and Hv head dims of keys and values.
    Arrays with a T dimension are in the order of ``layout``.

    Args:
      query: ``[B, T, K, H]`` bfloat16, float16 or float32.
      key: ``[B, T, K, H]``, same dtype, each of norm 1 (the caller normalizes queries and keys).
        Value head h uses key head ``h // (N // K)``.
      value: ``[B, T, N, Hv]``, same dtype; N a multiple of K.
      log_decay: ``[B, T, N]``, or ``[B, T, N, H]``: a decay per key channel. At most 0; float32.
      beta: ``[B, T, N]``, between 0 and 2.
      mesh: global arrays over this mesh; None is the mesh of ``jax.set_mesh``, and without one the
        arrays are one device's.
      axis_name: inside the caller's ``shard_map`` the mesh axis of the sequence, or a tuple of
        them, outermost first: arrays are this device's. Instead of ``mesh``.
      seq_axis: the mesh axis that shards T, or a tuple of them; None if none does.
      batch_axis: the mesh axes that shard B.
      tensor_axis: the mesh axes that shard the heads, K and N.
      layout: "contiguous" or "zigzag" (:mod:`burst_jax.layouts.fixed`); "balanced:z" of a batch.
      scale: factor on the output, a Python number. None is ``1 / sqrt(H)``.
      segment_ids: integers ``[B, T]``, an id per document; None is one. The state is zero at the
        beginning of each but the first one of a sequence, which continues ``initial_state``.
      padding_id: the id of padding, which may also be inside a document. It leaves the state
        unchanged, its output is 0, and its arrays may hold anything. Default 0.
      document_tables: in a balanced layout over several devices, the tables that
        :func:`burst_jax.training.make_batch` returns in the batch with ``linear_attention=True``,
        or :func:`burst_jax.layouts.document_tables`. A sequence with the tables of other documents
        becomes NaN.
      initial_state: float32 ``[B, N, H, Hv]``, the state before the first token; None is zero.
      return_final_state: whether to return the state after the last token, too. Default False.
      implementation: "mosaic_sm90" (Hopper) and "mosaic_sm80" (A100 and newer, a decay per head),
        for bfloat16 and H up to 128; "xla"; or None for the fastest that supports the call.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype, sharded like the value; with
      ``return_final_state`` ``(out, state)``, state float32 ``[B, N, H, Hv]``, the same on all
      devices of a sequence. Both are differentiable with respect to all arrays of numbers.

    Raises:
      ValueError: an argument is wrong; the message names argument, value and remedy.
      NotImplementedError: a layout without long runs of tokens on a device (striped), an initial or
        a final state in a balanced layout, or what the named implementation does not support.
    """
    Watched(
        mesh, seq_axis, batch_axis, tensor_axis, layout, segment_ids, padding_id, scale,
        implementation,
    ).watch("gated_delta_rule", query, axis_name)  # fmt: skip
    arrays = {
        "query": query, "key": key, "value": value, "log_decay": log_decay, "beta": beta,
        "segment_ids": segment_ids, "initial_state": initial_state,
    }  # fmt: skip
    arrays = without_absent(arrays, "segment_ids", "initial_state")
    sizes = check_rule(DIMENSIONS, arrays, "initial_state")
    padding_id = _check_ids(arrays, padding_id)
    check_bool("return_final_state", return_final_state)
    devices = Devices.of(
        "gated_delta_rule", mesh=mesh, axis_name=axis_name, seq_axis=seq_axis,
        batch_axis=batch_axis, tensor_axis=tensor_axis, layout=layout,
    )  # fmt: skip
    states = {"initial_state": initial_state is not None, "return_final_state": return_final_state}
    check_no_states(devices, **states)
    scale, implementation = check_scale(scale, sizes["H"]), check_implementation(implementation)
    request = delta_rule.Request(devices.runs(), scale, padding_id, implementation)
    devices.check_length(sizes["T"], "value")
    arrays |= run_arrays(devices, document_tables, arrays, sizes["B"])
    results = (OUT, STATE) if return_final_state else (OUT,)
    found = devices.run(delta_rule.in_shard, request, arrays, results)
    return (found[0], found[1]) if return_final_state else found[0]


def gated_delta_rule_step(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of :func:`gated_delta_rule`, for decoding.

    Args:
      query: ``[B, K, H]`` bfloat16, float16 or float32.
      key: ``[B, K, H]``, same dtype, each of norm 1.
      value: ``[B, N, Hv]``, same dtype; N a multiple of K.
      log_decay: ``[B, N]`` or ``[B, N, H]``, at most 0.
      beta: ``[B, N]``, between 0 and 2.
      state: float32 ``[B, N, H, Hv]``, the state before the token.
      scale: factor on the output, a Python number. None is ``1 / sqrt(H)``.

    Returns:
      ``(out, state)``: out ``[B, N, Hv]`` in the query's dtype, and the state after the token.

    Raises:
      ValueError: an argument is wrong; the message names argument, value and remedy.
    """
    arrays = {
        "query": query, "key": key, "value": value, "log_decay": log_decay, "beta": beta,
        "state": state,
    }  # fmt: skip
    sizes = check_rule(STEP, arrays, "state")
    scale = check_scale(scale, sizes["H"])
    groups = sizes["N"] // sizes["K"]
    q, k, v, decay, b = (x.astype(jnp.float32) for x in list(arrays.values())[:5])
    q, k = (jnp.repeat(x, groups, axis=1) for x in (q, k))

    # The state after the token is read through the one before it, so that the kernel that changes
    # the state in place is the last one that reads it. XLA would copy the state otherwise.
    state = jnp.exp(decay).reshape(*b.shape, -1, 1) * state
    products = (jnp.sum(x[..., None] * state, axis=2) for x in (q, k))
    of_q, of_k = lax.optimization_barrier(tuple(products))
    u = b[..., None] * (v - of_k)
    out = of_q + jnp.sum(q * k, axis=-1, keepdims=True) * u
    return (scale * out).astype(query.dtype), state + k[..., None] * u[..., None, :]


class _ConvolutionOptions(_Shared, total=False):
    """Those of :func:`short_convolution`."""

    initial_tail: jax.Array | None


@overload
def short_convolution(  # pyrefly: ignore[inconsistent-overload]
    x: jax.Array,
    weight: jax.Array,
    *,
    return_final_tail: Literal[False] = False,
    **options: Unpack[_ConvolutionOptions],
) -> jax.Array: ...


@overload
def short_convolution(  # pyrefly: ignore[inconsistent-overload]
    x: jax.Array,
    weight: jax.Array,
    *,
    return_final_tail: bool,
    **options: Unpack[_ConvolutionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def short_convolution(
    x: jax.Array,
    weight: jax.Array,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: AxisNames = None,
    seq_axis: AxisNames = "seq",
    batch_axis: AxisNames = None,
    tensor_axis: AxisNames = None,
    layout: LayoutLike = "contiguous",
    segment_ids: jax.Array | None = None,
    padding_id: int = 0,
    document_tables: DocumentTables | None = None,
    initial_tail: jax.Array | None = None,
    return_final_tail: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Causal depthwise convolution over the tokens of sequences that devices share.

    .. math::
        y_t = \sum_j weight_j \cdot x_{t - (W - 1) + j}

    Linear attention layers have one of few taps before queries, keys and values. A device receives
    the W - 1 tokens before each of its runs.

    Letters: B batch, T tokens, F features, W taps.

    Args:
      x: ``[B, T, F]`` bfloat16, float16 or float32.
      weight: ``[W, F]``, the last tap is that of the token itself.
      mesh: as in :func:`gated_delta_rule`, like the next five.
      axis_name: the mesh axis of the sequence inside the caller's ``shard_map``.
      seq_axis: the mesh axes that shard T.
      batch_axis: the mesh axes that shard B.
      tensor_axis: the mesh axes that shard F.
      layout: "contiguous" or "zigzag", or "balanced:z", of a batch.
      segment_ids: integers ``[B, T]``, an id per document. A tap on another document, or on
        padding, reads zero. None is one document.
      padding_id: the id of padding. Its output is 0, and it may hold anything. Default 0.
      document_tables: as in :func:`gated_delta_rule`. A balanced batch has no padding in documents:
        a tap reads the token that is so many places before in the document.
      initial_tail: ``[B, W - 1, F]``, ``x`` of the tokens before each sequence's first one that is
        no padding, which the first document continues; None is zeros.
      return_final_tail: whether to return ``x`` of the last W - 1 tokens, too: the
        ``initial_tail`` of the next ones. Default False.

    Returns:
      ``[B, T, F]`` in the dtype of ``x``, accumulated in float32, and sharded like it; with
      ``return_final_tail`` ``(y, tail)``, tail ``[B, W - 1, F]``, the same on all devices of a
      sequence, and zero where a tap of the last document's next token reads zero.

    Raises:
      ValueError: an argument is wrong; the message names argument, value and remedy.
      NotImplementedError: a layout without long runs of tokens on a device (striped); an initial or
        a final tail in a balanced layout.
    """
    Watched(mesh, seq_axis, batch_axis, tensor_axis, layout, segment_ids, padding_id).watch(
        "short_convolution", x, axis_name
    )
    arrays = {
        "x": x, "weight": weight, "segment_ids": segment_ids, "initial_tail": initial_tail,
    }  # fmt: skip
    arrays = without_absent(arrays, "segment_ids", "initial_tail")
    sizes = check_shapes(DIMENSIONS, arrays)
    check_tail(sizes)
    check_floats(arrays, [name for name in arrays if name != "segment_ids"])
    check_bool("return_final_tail", return_final_tail)
    padding_id = _check_ids(arrays, padding_id)
    devices = Devices.of(
        "short_convolution", mesh=mesh, axis_name=axis_name, seq_axis=seq_axis,
        batch_axis=batch_axis, tensor_axis=tensor_axis, layout=layout,
    )  # fmt: skip
    tails = {"initial_tail": initial_tail is not None, "return_final_tail": return_final_tail}
    check_no_states(devices, **tails)
    if sizes["W"] == 1:
        # Tails have no elements then, which crash JAX 0.11.2 inside of programs.
        arrays.pop("initial_tail", None)
    reads_tail = sizes["W"] > 1 and return_final_tail
    request = convolution.Request(devices.runs(), padding_id, reads_tail)
    devices.check_length(sizes["T"], "x")
    arrays |= run_arrays(devices, document_tables, arrays, sizes["B"])
    results = (CONVOLVED, TAIL) if reads_tail else (CONVOLVED,)
    y, *tail = devices.run(convolution.in_shard, request, arrays, results)
    if not return_final_tail:
        return y
    return y, tail[0] if tail else jnp.zeros((sizes["B"], 0, sizes["F"]), y.dtype)


def _check_ids(arrays: dict[str, Any], padding_id: Any) -> int:
    """``padding_id`` as an int; checks it and the segment ids among the arrays of a call."""
    padding_id = check_padding_id(padding_id)
    if "segment_ids" in arrays:
        arrays["segment_ids"] = check_ids("segment_ids", arrays["segment_ids"], padding_id)
    return padding_id
