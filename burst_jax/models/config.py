"""``DecoderConfig``: sizes, dtypes and variants of a decoder."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from burst_jax.errors import check_integer, check_positive, shown
from burst_jax.layers.lora import Lora
from burst_jax.layers.rope import Rope
from burst_jax.models.delta_net import DeltaNet, check_config
from burst_jax.models.experts import Experts, MixtureOfExperts
from burst_jax.models.feed_forward import FeedForward, GatedMLP
from burst_jax.models.remat import Remat

# Largest number of layers, each of which is listed on the host, and largest other size, int32.
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What may differ between layers; consecutive layers of one kind run in one scan.

    Attributes:
      window: number of tokens that a token attends to, itself and those before it, or None for all.
        (``local_window_size`` is ``(window - 1, 0)``.)
      rope: the layer's RoPE; None is the decoder's.

    Raises:
      ValueError: a window that is not from 1 to 2**31 - 1.
    """

    window: int | None = None
    rope: Rope | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            check_integer("window", self.window, 1, MAX_SIZE)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and dtypes of a :class:`Decoder`.

    The defaults are Qwen 3's architecture. The fields from ``rope`` on are the differences of other
    model families.

    Attributes:
      vocab_size: number of token ids, V.
      num_layers: number of layers, L.
      embed_dim: number of features of the residual stream, D.
      num_heads: number of query heads, N.
      num_kv_heads: number of key/value heads, K, a divisor of N.
      head_dim: number of features of a head, H, even; N H need not equal D.
      mlp_dim: number of hidden features of the feed-forward, M.
      rope_theta: RoPE's base.
      logits_soft_cap: soft cap of the attention logits, or None.
      qk_norm: whether every query and key head is RMS-normalized.
      dtype: floating dtype of the computation and of the residual stream.
      param_dtype: floating dtype of the weights.
      remat: what a layer stores for its backward pass: "none", "selective", "attention", "half",
        "full" or "offload" (:mod:`burst_jax.models.remat`).
      remat_layers: number of "selective" layers, the last ones; the others are "attention". None is
        all of them. Only with remat="selective".
      mlp_chunks: number of chunks of tokens in which the feed-forward runs, to hold one chunk's
        hidden features at a time. It must divide a device's tokens per sequence.
      rope: RoPE of the layers whose kind has none; None is ``Rope(rope_theta)``.
      layer_pattern: the kinds of the layers, repeated: layer i has kind ``i % len(layer_pattern)``.
      norm_epsilon: epsilon of all norms.
      norm_offset: added to the norms' scales, which are initialized to ``1 - norm_offset``.
      post_norms: whether the outputs of attention and feed-forward are normalized, too.
      qkv_bias: whether the query, key and value projections have biases.
      out_bias: whether the attention's output projection has one.
      mlp_bias: whether the projections of the feed-forward have biases.
      activation: of the feed-forward's gate: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU, exact
        or with the tanh approximation).
      attention_scale: factor on the attention logits; None is ``1 / sqrt(head_dim)``.
      final_soft_cap: soft cap c of the output logits, ``c * tanh(logits / c)``, or None.
      tie_embeddings: whether the output projection is the embedding's transpose.
      scale_embeddings: whether embeddings are multiplied by ``sqrt(embed_dim)``, rounded to
        ``dtype``.
      attention_sinks: whether each query head's softmax has one more logit, a float32 weight
        (``sinks`` of :class:`burst_jax.BurstAttention`).
      hf_config: text of the ``config.json`` that :func:`burst_jax.models.load` read, from which
        :func:`burst_jax.models.save` restores what has no field here, like token ids.
      lora: the low-rank adapters of the layers' projections, or None. All other weights are then
        frozen: no gradients, no optimizer state (:func:`burst_jax.models.add_lora`).
      feed_forward: the class of the layers' feed-forwards, a
        :class:`burst_jax.models.FeedForward`. Default: the gated MLP.
      experts: the experts of :class:`burst_jax.models.MixtureOfExperts`, or None for other
        feed-forwards.
      delta_net: sizes of Gated DeltaNet layers (:class:`burst_jax.models.DeltaNet`), which all
        layers then have in place of softmax attention, whose fields keep their defaults. None is
        softmax attention.

    Raises:
      ValueError: a size that is not from 1 to 2**31 - 1, or 10,000 for layers; sizes that do not
        fit together; a number that is not positive and finite; an unknown remat or activation; a
        field that ``delta_net`` layers would ignore.
      NotImplementedError: remat "half" with ``delta_net``.
    """

    vocab_size: int = 256
    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    mlp_dim: int = 768
    rope_theta: float = 10000.0
    logits_soft_cap: float | None = None
    qk_norm: bool = True
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: Remat = "attention"
    remat_layers: int | None = None
    mlp_chunks: int = 1
    rope: Rope | None = None
    layer_pattern: tuple[LayerKind, ...] = (LayerKind(),)
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    post_norms: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    attention_scale: float | None = None
    final_soft_cap: float | None = None
    tie_embeddings: bool = False
    scale_embeddings: bool = False
    attention_sinks: bool = False
    hf_config: str | None = None
    lora: Lora | None = None
    feed_forward: type[FeedForward] = GatedMLP
    experts: Experts | None = None
    delta_net: DeltaNet | None = None

    def __post_init__(self) -> None:
        def check(name: str, valid: bool, remedy: str) -> None:
            if not valid:
                raise ValueError(f"{name} is {shown(getattr(self, name))}: {remedy}")

        check_integer("num_layers", self.num_layers, 1, MAX_LAYERS)
        sizes = ("vocab_size", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
        for name in (*sizes, "mlp_chunks"):
            check_integer(name, getattr(self, name), 1, MAX_SIZE)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, num_kv_heads {self.num_kv_heads}: num_heads must "
                "be a multiple of num_kv_heads"
            )
        check("head_dim", self.head_dim % 2 == 0, "RoPE rotates pairs, so it must be even")
        for name in ("rope_theta", "norm_epsilon"):
            check_positive(name, getattr(self, name))
        if self.rope is not None and self.rope_theta != DecoderConfig.rope_theta:
            raise ValueError(
                f"rope is {self.rope}, rope_theta {self.rope_theta}: rope has its own theta; leave "
                "rope_theta out"
            )
        for name in ("logits_soft_cap", "final_soft_cap", "attention_scale"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name), also=", or None")
        check("layer_pattern", bool(self.layer_pattern), "it must have at least one LayerKind")
        check("lora", self.lora is None or isinstance(self.lora, Lora), "use a Lora, or None")
        feed_forward = self.feed_forward
        valid = isinstance(feed_forward, type) and issubclass(feed_forward, FeedForward)
        check("feed_forward", valid, "use a subclass of burst_jax.models.FeedForward")
        if issubclass(feed_forward, MixtureOfExperts) != isinstance(self.experts, Experts):
            raise ValueError(
                f"feed_forward is {feed_forward.__name__}, experts {shown(self.experts)}: use "
                "feed_forward=MixtureOfExperts with experts=Experts(...), or neither"
            )
        if self.mlp_chunks != 1 and not feed_forward.chunks_tokens:
            raise ValueError(
                f"mlp_chunks is {self.mlp_chunks!r}, and feed_forward {feed_forward.__name__} does "
                "not run in chunks: implement it and set its chunks_tokens, or leave mlp_chunks out"
            )
        for name in ("dtype", "param_dtype"):
            check(name, _is_floating(getattr(self, name)), "use a floating point dtype")
        for name, known in (("remat", get_args(Remat)), ("activation", get_args(Activation))):
            check(name, getattr(self, name) in known, f"use one of {str(known)[1:-1]}")
        if self.delta_net is not None:
            check_config(self)
        if self.remat_layers is None:
            return
        if self.remat != "selective":
            raise ValueError(
                f"remat_layers is {self.remat_layers!r}, remat {self.remat!r}: it is the number of "
                "'selective' layers; use that remat, or leave remat_layers out"
            )
        count = isinstance(self.remat_layers, int) and not isinstance(self.remat_layers, bool)
        if not count or not 1 <= self.remat_layers <= self.num_layers:
            raise ValueError(
                f"remat_layers is {self.remat_layers!r}, num_layers {self.num_layers}: it must be "
                "an integer from 1 to num_layers, or None for all; for none use remat='attention'"
            )

    @functools.cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, with its RoPE."""
        default = Rope(self.rope_theta) if self.rope is None else self.rope
        kinds = [LayerKind(kind.window, kind.rope or default) for kind in self.layer_pattern]
        return tuple(kinds[layer % len(kinds)] for layer in range(self.num_layers))

    @property
    def local_window_sizes(self) -> tuple[tuple[int, int] | None, ...]:
        """The ``local_window_size`` of the layers, each once, for :func:`make_batch`."""
        windows = dict.fromkeys(kind.window for kind in self.layer_kinds)
        return tuple(None if window is None else (window - 1, 0) for window in windows)

    @property
    def layer_ropes(self) -> tuple[Rope, ...]:
        """The RoPE of each layer."""
        return tuple(kind.rope for kind in self.layer_kinds if kind.rope is not None)

    @property
    def num_matmul_params(self) -> int:
        """Number of weights that multiply each token, including the output projection."""
        attention = sum(inputs * outputs for inputs, outputs in self.mixer_sizes.values())
        mlp = self.feed_forward.num_matmul_params(self)
        return self.num_layers * (attention + mlp) + self.embed_dim * self.vocab_size

    @property
    def adapted(self) -> tuple[str, ...]:
        """The names of the projections with low-rank adapters."""
        if self.lora is None:
            return ()
        return self.lora.among([*self.mixer_sizes, *self.feed_forward.projections(self)])

    @property
    def num_adapter_params(self) -> int:
        """Number of weights of the low-rank adapters; 0 without any."""
        if self.lora is None:
            return 0
        sizes = self.mixer_sizes | self.feed_forward.projections(self)
        features = sum(sum(sizes[name]) for name in self.adapted)
        return self.num_layers * self.lora.rank * features

    @property
    def mixer_sizes(self) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of the projections of attention, or of Gated DeltaNet."""
        if self.delta_net is not None:
            return self.delta_net.projections(self.embed_dim)
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        d = self.embed_dim
        return {"query": (d, query), "key": (d, kv), "value": (d, kv), "out": (query, d)}

    def train_flops_per_token(self, length: int) -> float:
        """Floating point operations per token of one forward and backward pass.

        Each weight costs 6: a multiplication and an addition forward, twice that backward; frozen
        weights have no gradient and cost 4. Attention costs ``12 N H keys`` per layer: two products
        of ``2 N H keys`` forward, twice that backward. ``keys`` is a token's mean number of keys:
        ``length / 2``, or less with a window. Gated DeltaNet costs ``18 N H Hv`` per layer
        (:class:`burst_jax.models.DeltaNet`). Recomputation does not count.

        Args:
          length: number of tokens in a sequence.
        """
        each = 6.0 if self.lora is None else 4.0
        weights = each * self.num_matmul_params + 6.0 * self.num_adapter_params
        if self.delta_net is not None:
            return weights + self.num_layers * self.delta_net.train_flops_per_token
        keys = 0.0
        for kind in self.layer_kinds:
            seen = length if kind.window is None else min(kind.window, length)
            keys += seen - seen * seen / (2 * length)
        return weights + 12.0 * self.num_heads * self.head_dim * keys


def _is_floating(dtype: DTypeLike) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:  # Not a dtype's name.
        return False
