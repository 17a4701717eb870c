"""The single definition of the keyword arguments of the public attention functions.

``local_attention`` has the fields of :class:`LocalArguments`, ``ring_attention`` those of
:class:`RingArguments`, ``burst_attention`` those of :class:`AttentionArguments`. Signatures, the
"Args" sections of their docstrings, and the options of layers, ``attention_fn`` and the Generator
are derived from these classes. The TypedDicts at the end mirror them for static type checkers,
which cannot derive one from a dataclass; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Self, TypedDict, get_type_hints, override

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from burst_jax.attention.score_mod import MaskMod, ScoreMod
from burst_jax.errors import did_you_mean
from burst_jax.layouts.fixed import Contiguous
from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.layouts.tables import DocumentTables
from burst_jax.parallel.mesh import AxisNames
from burst_jax.ring.rotation import RotationChoice
from pallas_kernels import Implementation

# One side of a window: tokens, None for no limit, or a traced integer.
Side = int | jax.Array | None
WindowSize = int | jax.Array | tuple[Side, Side] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalArguments:
    """What one device computes: positions, masks, scores, dropout, implementation.

    Attributes:
      query_offset: global position of the first query; keys start at 0. A Python integer of either
        sign (static, so a ring can skip hops), a scalar integer array, or an array ``[B]``.
        ``S - T`` aligns causal queries to the last key. Default 0.
      query_positions: integers ``[T]`` or ``[B, T]``: the global position of each query, in any
        order; replaces the layout's positions and ``query_offset``.
      key_value_positions: integers ``[S]``, in a balanced layout ``[B, S]``, the same for keys.
        Positions are between -2^30 and 2^30; traced ones are not checked, and int64 ones wrap.
        ``alibi_slopes``, ``score_mod``, ``mask_mod`` and dropout need positions that are equal in
        all sequences.
      is_causal: a query attends to keys at its own and earlier positions only. Default False.
      scale: factor on the logits, a Python number. None is ``1 / sqrt(H)``. To apply a traced
        factor, multiply the query by it and pass ``scale=1.0``.
      local_window_size: ``(left, right)``: the query at position p attends to keys at positions
        ``p - left .. p + right``. One number sets both sides; a side of None is unlimited. Under
        ``is_causal`` the right side is 0. A side may be a JAX integer scalar, so that one
        ``lax.scan`` runs layers with different windows. Its value is not checked, and a ring skips
        no steps because of it.
      attention_chunk_size: C of chunked attention (Llama 4): the query at position p attends to
        keys at positions with ``p_k // C == p // C``, combined with all other masks. A Python
        integer, static, so a ring skips hops between chunks. None is no chunks.
      logits_soft_cap: c of ``c * tanh(logits / c)``, applied after the scale. None is no cap.
      segment_ids: integers ``[B, T]``, from 0 to 2^31 - 1, of self-attention, whose queries and
        keys are the same tokens; traced ones are not checked, and int64 ones wrap. A query attends
        to keys of its own segment only. Segment 0 is padding: it attends to nothing and nothing
        attends to it.
      query_segment_ids: those of the queries, if keys are other tokens. Pass the ids of both sides
        or of neither.
      key_value_segment_ids: ``[B, S]``, the same for keys and values.
      padding_id: the id that means padding in place of 0, a Python integer of int32. Other ids are
        not negative, and below 2^31 - 1 unless it is 0. Default 0.
      query_seq_lengths: integers ``[B]``: query positions >= ``query_seq_lengths[b]`` are padding.
      key_value_seq_lengths: integers ``[B]``: key positions >= ``key_value_seq_lengths[b]`` are
        padding. Lengths, prefixes and bounds are global positions in natural order, in any layout.
      prefix_lengths: integers ``[B]``: keys at positions below it are visible to every query of the
        sequence (prefix LM). Needs ``is_causal``. All other masks still apply to the prefix.
      key_starts: integers ``[T]`` or ``[B, T]``: per-query KV bounds. A query attends only to keys
        at positions >= its start.
      key_ends: the same: a query attends only to keys at positions < its end.
      block_mask: bool ``[T / bq, S / bk]`` or ``[N, T / bq, S / bk]``, over whole sequences in
        natural order: a block-sparse mask, combined with all other masks. bq and bk are any sizes
        that divide T and S. Tiles without an allowed score are skipped. A NumPy array is static,
        so a ring can skip hops. Each device holds the whole table of its heads.
      sink_logits: float32 ``[N]``: one more logit per query head in the denominator of the softmax,
        with value 0. It is part of lse and differentiable.
      alibi_slopes: float32 ``[N]``: adds ``-slope * |p_q - p_k|`` to the logits of a query head
        after the scale and the soft cap (ALiBi, arXiv 2108.12409). Differentiable. Distances are
        exact for positions below 2^24.
      score_mod: ``f(score, batch, head, q_position, kv_position) -> score``, applied to each logit
        after the scale and the soft cap, before ALiBi. Written with jax.numpy for one float32
        scalar; the other arguments are int32 scalars, with global positions in natural order. It is
        differentiated with respect to the score. Captured arrays get no gradient and need "xla". It
        is static and compared by identity: define it once, not at each call.
      mask_mod: ``f(batch, head, q_position, kv_position) -> bool``, True where a query attends to a
        key, combined with all other masks. Tiles that it masks entirely are skipped where integer
        arithmetic on their positions shows that; a ring skips no steps by it. The matching
        ``block_mask`` skips both (:func:`burst_jax.block_mask_of`).
      dropout_rate: probability, below 1, of dropping a softmax weight. The other weights are
        divided by ``1 - dropout_rate``; lse is not affected. Default 0.0.
      dropout_key: a new ``jax.random.key`` for each call; required for a nonzero rate. The result
        depends on key, batch index, head and positions, not on mesh, layout or implementation. In
        ``ring_attention``, devices with different sequences or heads must pass different keys
        (``jax.random.fold_in`` of the axis index), and devices along the ring the same key.
      implementation: "mosaic_sm90", "mosaic_sm80", "xla", a
        :class:`pallas_kernels.Implementation`, or None for the fastest one that supports the call.
      deterministic: whether gradients must be bitwise reproducible. The kernels accumulate dQ in
        varying order; with True in fixed point, where the order does not matter, which is slower.
        out and lse are always bitwise reproducible. Default False.
    """

    query_offset: int | jax.Array = 0
    query_positions: jax.Array | None = None
    key_value_positions: jax.Array | None = None
    is_causal: bool = False
    scale: float | None = None
    local_window_size: WindowSize = None
    attention_chunk_size: int | None = None
    logits_soft_cap: float | None = None
    segment_ids: jax.Array | None = None
    query_segment_ids: jax.Array | None = None
    key_value_segment_ids: jax.Array | None = None
    padding_id: int = 0
    query_seq_lengths: jax.Array | None = None
    key_value_seq_lengths: jax.Array | None = None
    prefix_lengths: jax.Array | None = None
    key_starts: jax.Array | None = None
    key_ends: jax.Array | None = None
    block_mask: jax.Array | np.ndarray | None = None
    sink_logits: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    dropout_rate: float = 0.0
    dropout_key: jax.Array | None = None
    implementation: str | Implementation | None = None
    deterministic: bool = False

    @property
    def parsed_layout(self) -> Layout:
        """The order of the tokens."""
        return Contiguous()

    @classmethod
    def of(cls, function: Callable[..., object], options: Mapping[str, Any]) -> Self:
        """The arguments of a call of ``function``.

        Raises:
          TypeError: a keyword that is not one of the fields; the message names what to use instead.
        """
        names = cls.names()
        for name in options:
            if name in names:
                continue
            if name in _REMEDIES:
                raise TypeError(f"{function.__name__} has no argument {name!r}: {_REMEDIES[name]}")
            hint = did_you_mean(name, [*inspect.signature(function).parameters])
            raise TypeError(
                f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}"
            )
        return cls(**options)

    @classmethod
    @functools.cache
    def names(cls) -> tuple[str, ...]:
        """The arguments' names in the order of signatures: those of the widest class first."""
        ordered: dict[str, None] = {}
        for each in cls.__mro__:
            ordered |= dict.fromkeys(
                name for name in vars(each).get("__annotations__", {}) if not name.startswith("_")
            )
        fields = {field.name for field in dataclasses.fields(cls)}
        return tuple(name for name in ordered if name in fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingArguments(LocalArguments):
    """How a ring runs, besides its axes.

    Attributes:
      ulysses_axis: a further mesh axis that the sequence is sharded over. Its devices exchange
        tokens for heads by all-to-all before the ring, and back after it
        (:mod:`burst_jax.ring.ulysses`): the GPUs of one node, with a ring between nodes. N on a
        device must be a multiple of the axis size, K a multiple or a divisor (then key heads are
        copied). The layout's number of shards does not include it.
      layout: the order of the tokens in the arrays: "contiguous" (default), "zigzag", "striped",
        "striped:k" with stripes of k tokens, see :func:`burst_jax.to_layout`, or "balanced:z", the
        layout of a batch of :func:`burst_jax.layouts.balance`, with its positions and segment ids.
        zigzag and striped balance the work of a causal mask, balanced that of packed documents.
      document_tables: of a balanced layout, the tables that :func:`burst_jax.training.make_batch`
        returns with the batch, or :func:`burst_jax.layouts.document_tables`. None searches on the
        devices, in every call, for what they hold. A sequence with tables of other documents
        becomes NaN.
      backward: what rotates in the backward pass: "rotate_kv" (K, V, dK, dV), "rotate_query" (Q,
        dO, lse, delta, dQ), or "auto" for fewer bytes. Default "auto".
    """

    ulysses_axis: str | None = None
    layout: LayoutLike = "contiguous"
    document_tables: DocumentTables | None = None
    backward: RotationChoice = "auto"

    @property
    @override
    def parsed_layout(self) -> Layout:
        return parse_layout(self.layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionArguments(RingArguments):
    """How global arrays are sharded over a mesh.

    Attributes:
      mesh: the device mesh. None is the mesh of ``jax.set_mesh``.
      seq_axis: the mesh axis of the ring, over which T and S are sharded. ``(outer, inner)`` is a
        two-level ring, which sends one block over the outer axis per inner-ring pass
        (:mod:`burst_jax.ring.route`). None is no ring: then ``ulysses_axis`` alone shards the
        sequence, or nothing does. Default "seq".
      batch_axis: the mesh axis or axes that B is sharded over. None: not sharded.
      tensor_axis: the mesh axis or axes that N and K are sharded over. None: not sharded.
      pad: whether to pad T and S with zeros to lengths that the mesh divides. The padding is masked
        as segment 0, and out and lse are cut to T. Contiguous layout only. It moves tokens between
        devices at each call: where the model allows, pad batches once with
        :func:`burst_jax.pad_to_layout`. Default False.
    """

    mesh: Mesh | AbstractMesh | None = None
    seq_axis: AxisNames = "seq"
    batch_axis: AxisNames = None
    tensor_axis: AxisNames = None
    pad: bool = False


# Arguments of jax.nn.dot_product_attention that these functions do not have.
_NO_DENSE_MASK = (
    "dense bias and mask, the fourth and fifth argument of jax.nn.dot_product_attention, are not "
    "supported; specify a mask by is_causal, local_window_size, segment_ids, "
    "key_starts and key_ends, block_mask or mask_mod, a bias by "
    "alibi_slopes or score_mod, and leave them out if they are None"
)
_REMEDIES = {"bias": _NO_DENSE_MASK, "mask": _NO_DENSE_MASK}


def takes[F: Callable[..., Any]](arguments: type[LocalArguments]) -> Callable[[F], F]:
    """Gives a public function the signature and the "Args" section of its arguments' class.

    The function is written as ``f(query, key, value, *positional, own=default, **options)``, with
    keywords of its own like ``return_residual``; ``{arguments}`` in its docstring is where the
    descriptions go.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function, eval_str=True)
        hints = get_type_hints(arguments)
        fields = {field.name: field for field in dataclasses.fields(arguments)}
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        shown = [each for each in own.parameters.values() if each.kind is positional]
        extra = [each for each in own.parameters.values() if each.kind is each.KEYWORD_ONLY]
        keywords = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=fields[name].default,
                annotation=hints[name],
            )
            for name in arguments.names()
        ]  # fmt: skip
        parameters = [*shown, *keywords, *extra]
        signature = own.replace(parameters=parameters)
        annotations = {each.name: each.annotation for each in parameters}
        function.__annotations__ = annotations | {"return": own.return_annotation}
        setattr(function, "__signature__", signature)  # noqa: B010
        if function.__doc__ is not None:  # python -OO
            entries = descriptions(arguments)
            text = "\n".join(f"{name}: {entries[name]}" for name in arguments.names())
            function.__doc__ = re.sub(
                r"^( *)\{arguments\}$", lambda found: textwrap.indent(text, found[1]),
                function.__doc__, flags=re.MULTILINE,
            )  # fmt: skip
        return function

    return decorate


def descriptions(arguments: type[LocalArguments]) -> dict[str, str]:
    """The description of each argument, from the docstrings of the class and its bases."""
    entries: dict[str, str] = {}
    for each in arguments.__mro__:
        section = (inspect.cleandoc(each.__doc__ or "")).partition("Attributes:\n")[2]
        for name, text in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE):
            entries.setdefault(name, text.replace("\n    ", "\n  "))
    return entries


def no_more_positional(function: Callable[..., object], positional: tuple[object, ...]) -> None:
    """Raises TypeError if a call has positional arguments beyond query, key and value."""
    if positional:
        raise TypeError(
            f"{function.__name__} takes query, key and value by position, and {len(positional)} "
            f"more came: {_NO_DENSE_MASK}"
        )


class MaskArrays(TypedDict, total=False):
    """The arguments that specify masks by arrays, besides the segment ids."""

    query_seq_lengths: jax.Array | None
    key_value_seq_lengths: jax.Array | None
    prefix_lengths: jax.Array | None
    key_starts: jax.Array | None
    key_ends: jax.Array | None
    block_mask: jax.Array | np.ndarray | None


MASK_ARRAYS: tuple[str, ...] = tuple(MaskArrays.__annotations__)
# Where one of these is given, the order of the tokens changes the result.
POSITION_READERS = (
    "is_causal", "local_window_size", "attention_chunk_size", *MASK_ARRAYS, "alibi_slopes",
    "score_mod", "mask_mod",
)  # fmt: skip
# Those of them for which the order of the keys alone does: masks by a key's position, or by a
# query's place in the array.
KEY_POSITION_READERS = ("key_value_seq_lengths", "key_starts", "key_ends")


class StaticMasks(TypedDict, total=False):
    """The arguments that specify masks by Python numbers."""

    is_causal: bool
    local_window_size: WindowSize
    attention_chunk_size: int | None


class LocalOptions(MaskArrays, StaticMasks, total=False):
    """Keyword arguments of ``local_attention``, all but ``return_residual``."""

    query_offset: int | jax.Array
    query_positions: jax.Array | None
    key_value_positions: jax.Array | None
    scale: float | None
    logits_soft_cap: float | None
    segment_ids: jax.Array | None
    query_segment_ids: jax.Array | None
    key_value_segment_ids: jax.Array | None
    padding_id: int
    sink_logits: jax.Array | None
    alibi_slopes: jax.Array | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    dropout_rate: float
    dropout_key: jax.Array | None
    implementation: str | Implementation | None
    deterministic: bool


class RingOptions(LocalOptions, total=False):
    """Keyword arguments of ``ring_attention``, all but ``return_residual``."""

    ulysses_axis: str | None
    layout: LayoutLike
    document_tables: DocumentTables | None
    backward: RotationChoice


class AttentionOptions(RingOptions, total=False):
    """Keyword arguments of ``burst_attention``, all but ``return_residual``."""

    mesh: Mesh | AbstractMesh | None
    seq_axis: AxisNames
    batch_axis: AxisNames
    tensor_axis: AxisNames
    pad: bool
