"""The linen version of :class:`burst_jax.BurstAttention`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import meta

from burst_jax.attention.arguments import AttentionArguments, MaskArrays
from burst_jax.layers.attention_fn import check_options
from burst_jax.layers.nnx_layer import REJECTED, BurstAttention
from burst_jax.layouts.tables import DocumentTables

# Fields that linen adds to every module.
LINEN_FIELDS = ("parent", "name")
# (annotation, default) of each argument of the nnx layer and of the options that it passes on.
_FIELDS: dict[str, tuple[Any, Any]] = {
    name: (parameter.annotation, parameter.default)
    for name, parameter in inspect.signature(BurstAttention.__init__).parameters.items()
    if name not in ("self", "in_features", "rngs", "options")
} | {
    field.name: (field.type, field.default)
    for field in dataclasses.fields(AttentionArguments)
    if field.name not in REJECTED
}


class LinenBurstAttention(linen.Module):
    """Self-attention over a mesh: projections, RoPE from positions, grouped heads, q/k norm.

    ::

        q, k, v = x Wq, x Wk, x Wv                 # [B,T,N,H] [B,T,K,H] [B,T,K,Hv]
        q, k = rope(norm(q)), rope(norm(k))        # by the positions of the call
        out = burst_attention(q, k, v, sink_logits=sinks, **options) Wo

    :class:`burst_jax.BurstAttention` for linen models: it runs that layer with parameters of linen.
    As in linen's own layers, the number of features is that of the input, and initializers use the
    stream "params". Parameters have the same names and shapes as in the nnx layer, so weights can
    be exchanged::

        params = nnx.to_pure_dict(nnx.state(nnx_layer, nnx.Param))
        out = LinenBurstAttention(num_heads=8, mesh=mesh).apply({"params": params}, x, positions)

    The attributes are the arguments of :class:`burst_jax.BurstAttention` and the options of
    :func:`burst_attention` that it accepts, with the same defaults. The initializers may be
    wrapped by ``linen.with_partitioning``, with names for the three axes of a kernel: ``[D, N,
    H]``, ``[D, K, H]`` and ``[D, K, Hv]``, or ``[N, Hv, out_features]`` for the output kernel. As
    in linen's ``DenseGeneral`` they are called with the shape of a matrix.

    Raises:
      TypeError: immediately, for an unknown argument.
      ValueError: immediately, for an argument of :func:`burst_attention` that the layer does not
        accept; when initialized or applied, for sizes that do not fit together.
    """

    # The fields of linen's dataclass.
    __annotations__ = {name: annotation for name, (annotation, _) in _FIELDS.items()}
    locals().update(
        {name: default for name, (_, default) in _FIELDS.items() if name != "num_heads"}
    )

    if TYPE_CHECKING:

        def __init__(self, num_heads: int, **arguments: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Rejects unknown arguments with a suggestion, before linen's own constructor does."""
        others = {k: v for k, v in kwargs.items() if k not in _FIELDS and k not in LINEN_FIELDS}
        check_options("LinenBurstAttention", others, REJECTED, _FIELDS)
        return super().__new__(cls)

    @linen.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | np.ndarray | None = None,
        segment_ids: jax.Array | None = None,
        *,
        document_tables: DocumentTables | None = None,
        deterministic: bool = False,
        **masks: Unpack[MaskArrays],
    ) -> jax.Array:
        """Attends over the whole sequence.

        Args:
          x: ``[B, T, D]``, tokens in the order of ``layout``.
          positions: as in the call of :class:`burst_jax.BurstAttention`, like all that follow.
          segment_ids: integers ``[B, T]``.
          document_tables: those of :func:`burst_attention`, in a balanced layout.
          deterministic: whether dropout is disabled; enabled, it uses the stream "dropout".
          **masks: masks given as arrays.

        Returns:
          ``[B, T, out_features]`` in the dtype of the computation.

        Raises:
          ValueError: as :class:`burst_jax.BurstAttention`.
        """
        features, weights = x.shape[-1], None
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self._layer(features, nnx.Rngs(0))))
        shapes = nnx.to_pure_dict(state)
        if self.is_initializing():
            # The nnx layer initializes all weights from one key; linen then gets them by name.
            rngs = nnx.Rngs(params=self.make_rng("params"))
            weights = nnx.to_pure_dict(nnx.state(self._layer(features, rngs), nnx.Param))

        def initial(_key: jax.Array, name: str) -> Any:
            """A submodule's weights; when applied, zeros of their shapes, which linen compares."""
            if weights is None:
                return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[name])
            return self._with_metadata(name, weights[name])

        nnx.replace_by_pure_dict(state, {name: self.param(name, initial, name) for name in shapes})
        rngs = None
        if self.dropout_rate and not deterministic:
            rngs = nnx.Rngs(dropout=self.make_rng("dropout"))
        layer = nnx.merge(graphdef, state)
        given: Any = {"document_tables": document_tables, "deterministic": deterministic, **masks}
        return layer(x, positions, segment_ids, rngs=rngs, **given)

    def _layer(self, in_features: int, rngs: nnx.Rngs) -> BurstAttention:
        """The nnx layer with this module's arguments."""
        arguments = {name: getattr(self, name) for name in _FIELDS}
        arguments["kernel_init"] = _unboxed(self.kernel_init)
        if self.out_kernel_init is not None:
            arguments["out_kernel_init"] = _unboxed(self.out_kernel_init)
        return BurstAttention(in_features, **arguments, rngs=rngs)

    def _with_metadata(self, name: str, weights: Any) -> Any:
        """A submodule's weights, with its kernel boxed as its initializer boxes it."""
        if not isinstance(weights, dict) or "kernel" not in weights:
            return weights
        own = self.out_kernel_init if name == "out" else None
        init, kernel = own or self.kernel_init, weights["kernel"]
        matrix = (kernel.size // kernel.shape[-1], kernel.shape[-1])
        box = jax.eval_shape(lambda: init(jax.random.key(0), matrix, kernel.dtype))
        if not isinstance(box, meta.AxisMetadata):
            return weights
        return weights | {"kernel": box.replace_boxed(kernel)}


# Instead of __new__'s.
setattr(  # noqa: B010
    LinenBurstAttention,
    "__signature__",
    inspect.Signature(
        list(inspect.signature(LinenBurstAttention.__init__).parameters.values())[1:]
    ),
)


def _unboxed(init: nnx.Initializer) -> nnx.Initializer:
    """``init`` without the box of ``linen.with_partitioning``."""

    def array(*args: Any, **kwargs: Any) -> jax.Array:
        made = init(*args, **kwargs)
        # Not linen's unbox, which would constrain the matrix to the kernel's three axis names.
        return made.value if isinstance(made, linen.Partitioned) else meta.unbox(made)

    return array
