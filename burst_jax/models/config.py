"""``DecoderConfig``: sizes, dtypes and variants of a decoder."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from burst_jax.errors import as_number, check_bool, check_integer, check_positive, shown
from burst_jax.layers.lora import Lora
from burst_jax.layers.norm import check_qk_norm
from burst_jax.layers.rope import Rope
from burst_jax.models.delta_net import DeltaNet, check_config
from burst_jax.models.experts import DenseMLP, Experts, MixtureOfExperts
from burst_jax.models.feed_forward import FeedForward, GatedMLP
from burst_jax.models.latent import Latent, check_latent
from burst_jax.models.remat import Remat

# Largest number of layers, each of which is listed on the host, and largest other size, int32.
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
Activation = Literal["silu", "gelu", "gelu_tanh"]
Mixer = Literal["attention", "delta_net"]
Norms = Literal["before", "after", "both"]
_BOOLEANS = (
    *("post_norms", "qkv_bias", "out_bias", "mlp_bias", "tie_embeddings", "scale_embeddings"),
    *("attention_gate", "attention_sinks"),
)


class Stack(NamedTuple):
    """Layers whose weights have the same shapes and are stacked.

    Attributes:
      mixer: of the layers.
      dense: whether their feed-forward is a gated MLP in a decoder with experts.
    """

    mixer: Mixer
    dense: bool = False

    @property
    def name(self) -> str:
        """The attribute of the decoder that has the weights."""
        name = {"attention": "layers", "delta_net": "delta_net_layers"}[self.mixer]
        return f"dense_{name}" if self.dense else name


# All stacks that a decoder may have, by name.
STACKS = {
    stack.name: stack
    for stack in (Stack(mixer, dense) for dense in (False, True) for mixer in get_args(Mixer))
}


def _check_rope(rope: Rope | None) -> None:
    if not (rope is None or isinstance(rope, Rope)):
        raise ValueError(f"rope is {shown(rope)}: use a Rope, or None")


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What may differ between layers; consecutive layers of one kind run in one scan.

    Attributes:
      window: number of tokens that a token attends to, itself and those before it, or None for all.
      rope: the layer's RoPE; None is the decoder's.
      mixer: "attention" (softmax), or "delta_net", linear attention of the kind and sizes of the
        decoder's ``delta_net``, which has neither window nor RoPE.
      norms: which RMS norms attention and feed-forward have: "before" of their inputs, "after" of
        their outputs, which are then added to the residual stream (OLMo 2), or "both". None is
        "both" with the decoder's ``post_norms``, else "before".
      dense: whether the feed-forward is a gated MLP of the decoder's ``dense_dim`` hidden features,
        in a decoder whose other layers have experts.

    Raises:
      ValueError: a window that is not from 1 to 2**31 - 1, a rope that is no Rope, an unknown mixer
        or norms, a window or RoPE of linear attention, or a dense that is no bool.
    """

    window: int | None = None
    rope: Rope | None = None
    mixer: Mixer = "attention"
    norms: Norms | None = None
    dense: bool = False

    def __post_init__(self) -> None:
        check_bool("dense", self.dense)
        if self.window is not None:
            check_integer("window", self.window, 1, MAX_SIZE)
        if self.mixer not in (known := get_args(Mixer)):
            raise ValueError(f"mixer is {shown(self.mixer)}: use one of {str(known)[1:-1]}")
        if self.norms not in (None, *(known := get_args(Norms))):
            raise ValueError(
                f"norms is {shown(self.norms)}: use one of {str(known)[1:-1]}, or None"
            )
        _check_rope(self.rope)
        for name, value in (("window", self.window), ("rope", self.rope)):
            if self.mixer != "attention" and value is not None:
                raise ValueError(
                    f"{name} is {shown(value)}, and mixer {self.mixer!r}: only softmax attention "
                    f"has one; leave it out, or use mixer='attention'"
                )

    @property
    def local_window_size(self) -> tuple[int, int] | None:
        """The attention's argument of this name."""
        return None if self.window is None else (self.window - 1, 0)

    @property
    def stack(self) -> Stack:
        """The layers that its weights are stacked with."""
        return Stack(self.mixer, self.dense)


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
      qk_norm: whether every query and key head is RMS-normalized; "joint" normalizes all heads of
        a token together (:class:`burst_jax.BurstAttention`).
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
        A hybrid has layers of both mixers, like Qwen3-Next
        ``(*[LayerKind(mixer="delta_net")] * 3, LayerKind())``.
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
      attention_gate: whether the output of softmax attention is multiplied by ``sigmoid(x Wg)``
        before its projection (``output_gate`` of :class:`burst_jax.BurstAttention`).
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
      delta_net: sizes of Gated DeltaNet layers (:class:`burst_jax.models.DeltaNet`), or of Kimi
        Delta Attention (:class:`burst_jax.models.KimiDelta`): of those whose kind has this mixer,
        or of all layers if ``layer_pattern`` is left out. A decoder without softmax attention keeps
        the defaults of its fields. None is softmax attention alone.
      dense_dim: number of hidden features of the gated MLP of layers whose kind is ``dense``; None
        without such layers.
      latent: sizes of multi-head latent attention (:class:`burst_jax.models.Latent`), which the
        layers with softmax attention then are, without RoPE; None is ordinary attention.

    Raises:
      ValueError: a size that is not from 1 to 2**31 - 1, or 10,000 for layers; sizes that do not
        fit together; a number that is not positive and finite; a bool's field that is none; an
        unknown remat or activation;
        layers of linear attention without its sizes, or sizes without layers; a field of softmax
        attention without such layers; dense layers without ``dense_dim`` or experts, or
        ``dense_dim`` without such layers; a num_kv_heads other than num_heads with ``latent``.
      NotImplementedError: remat "half" with ``delta_net``; RoPE, ``qk_norm`` or ``qkv_bias`` with
        ``latent``.
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
    qk_norm: bool | Literal["joint"] = True
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
    attention_gate: bool = False
    attention_sinks: bool = False
    hf_config: str | None = None
    lora: Lora | None = None
    feed_forward: type[FeedForward] = GatedMLP
    experts: Experts | None = None
    delta_net: DeltaNet | None = None
    dense_dim: int | None = None
    latent: Latent | None = None

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
        check_qk_norm(self.qk_norm)
        for name in _BOOLEANS:
            check_bool(name, getattr(self, name))
        for name in ("rope_theta", "norm_epsilon"):
            check_positive(name, getattr(self, name))
        offset = as_number("norm_offset", self.norm_offset, "finite")
        check("norm_offset", math.isfinite(offset), "it must be finite")
        _check_rope(self.rope)
        if self.rope is not None and self.rope_theta != DecoderConfig.rope_theta:
            raise ValueError(
                f"rope is {self.rope}, rope_theta {self.rope_theta}: rope has its own theta; leave "
                "rope_theta out"
            )
        for name in ("logits_soft_cap", "final_soft_cap", "attention_scale"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name), also=", or None")
        pattern = self.layer_pattern
        valid = isinstance(pattern, tuple) and all(isinstance(x, LayerKind) for x in pattern)
        check(
            "layer_pattern", valid and bool(pattern), "it must be a tuple of LayerKinds, not empty"
        )
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
        check_latent(self)
        check_config(self)
        self._check_dense()
        for rope in dict.fromkeys(self.layer_ropes):
            rope.rotated(self.head_dim)
        for mixer in self.mixers:
            self.norms_of(mixer)
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

    def _check_dense(self) -> None:
        """Raises ValueError for dense layers that do not fit the other fields."""
        dense = [kind.dense for kind in self.layer_kinds]
        if self.dense_dim is not None:
            check_integer("dense_dim", self.dense_dim, 1, MAX_SIZE)
        if any(dense) != (self.dense_dim is not None):
            raise ValueError(
                f"dense_dim is {self.dense_dim}, and {sum(dense)} of the {self.num_layers} layers "
                "of layer_pattern are dense: pass dense_dim, the hidden features of such layers, "
                "with LayerKind(dense=True), or neither"
            )
        if any(dense) and (self.experts is None or all(dense)):
            raise ValueError(
                f"experts is {self.experts}, and {sum(dense)} of the {self.num_layers} layers of "
                "layer_pattern are dense: layers are dense next to others with experts; pass "
                "experts for those, or leave dense out and pass mlp_dim alone"
            )

    @functools.cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, with its RoPE if it has softmax attention.

        Norms are None if they are those of ``post_norms``.
        """
        default = Rope(self.rope_theta) if self.latent is None else Rope(fraction=0.0)
        default = default if self.rope is None else self.rope
        pattern = self.layer_pattern
        if self.delta_net is not None and pattern == DecoderConfig.layer_pattern:
            pattern = (LayerKind(mixer="delta_net"),)
        kinds = [
            dataclasses.replace(
                kind,
                rope=kind.rope or default if kind.mixer == "attention" else None,
                norms=None if kind.norms == self._norms else kind.norms,
            )
            for kind in pattern
        ]
        return tuple(kinds[layer % len(kinds)] for layer in range(self.num_layers))

    def norms_of(self, mixer: Mixer) -> Norms:
        """The norms of the layers with a mixer.

        Raises:
          ValueError: they differ, or no layer has this mixer.
        """
        kinds = [kind for kind in self.layer_kinds if kind.mixer == mixer]
        if not kinds:
            raise ValueError(
                f"mixer is {shown(mixer)}, and no layer has it: use one of "
                f"{', '.join(map(repr, self.mixers))}"
            )
        found = sorted({kind.norms or self._norms for kind in kinds})
        if len(found) > 1:
            raise ValueError(
                f"layer_pattern has layers with mixer {mixer!r} and norms "
                f"{' and '.join(map(repr, found))}: the weights of these layers are stacked, so "
                "they must have the same norms"
            )
        return found[0]

    @property
    def _norms(self) -> Norms:
        """The norms of layers whose kind has none."""
        return "both" if self.post_norms else "before"

    @functools.cached_property
    def mixers(self) -> dict[Mixer, int]:
        """The mixers of the layers, and the number of layers of each."""
        counts = collections.Counter(kind.mixer for kind in self.layer_kinds)
        return {mixer: counts[mixer] for mixer in get_args(Mixer) if counts[mixer]}

    @functools.cached_property
    def stacks(self) -> dict[Stack, int]:
        """The stacks of the layers, and the number of layers of each; those with experts first."""
        counts = collections.Counter(kind.stack for kind in self.layer_kinds)
        return {stack: counts[stack] for stack in STACKS.values() if counts[stack]}

    def feed_forward_of(self, stack: Stack) -> type[FeedForward]:
        """The class of a stack's feed-forwards."""
        return DenseMLP if stack.dense else self.feed_forward

    @property
    def local_window_sizes(self) -> tuple[tuple[int, int] | None, ...]:
        """The ``local_window_size`` of the layers, each once, for :func:`make_batch`."""
        kinds = [kind for kind in self.layer_kinds if kind.mixer == "attention"]
        return tuple(dict.fromkeys(kind.local_window_size for kind in kinds))

    @property
    def has_linear_attention(self) -> bool:
        """Whether layers have linear attention, for :func:`make_batch`."""
        return "delta_net" in self.mixers

    @property
    def layer_ropes(self) -> tuple[Rope, ...]:
        """The RoPE of each layer with softmax attention."""
        return tuple(kind.rope for kind in self.layer_kinds if kind.rope is not None)

    @property
    def num_matmul_params(self) -> int:
        """Number of weights that multiply each token, including the output projection."""
        total = self.embed_dim * self.vocab_size
        for stack, layers in self.stacks.items():
            sizes = self.mixer_sizes(stack.mixer).values()
            mlp = self.feed_forward_of(stack).num_matmul_params(self)
            total += layers * (mlp + sum(inputs * outputs for inputs, outputs in sizes))
        return total

    @property
    def adapted(self) -> tuple[str, ...]:
        """The names of the projections with low-rank adapters, in layers that have them."""
        if self.lora is None:
            return ()
        names = itertools.chain.from_iterable(map(self.projections, self.stacks))
        return self.lora.among(dict.fromkeys(names))

    @property
    def num_adapter_params(self) -> int:
        """Number of weights of the low-rank adapters; 0 without any."""
        if self.lora is None:
            return 0
        features = 0
        for stack, layers in self.stacks.items():
            sizes = self.projections(stack)
            features += layers * sum(sum(sizes[name]) for name in self.adapted if name in sizes)
        return self.lora.rank * features

    def projections(self, stack: Stack) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of all projections of a stack's layers that may have adapters."""
        return self.mixer_sizes(stack.mixer) | self.feed_forward_of(stack).projections(self)

    def mixer_sizes(self, mixer: Mixer) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of the projections of softmax or linear attention."""
        if mixer == "delta_net":
            assert self.delta_net is not None
            return self.delta_net.projections(self.embed_dim)
        d, heads = self.embed_dim, self.num_heads
        query, kv = heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {"query": (d, query), "key": (d, kv), "value": (d, kv), "out": (query, d)}
        if self.latent is not None:
            sizes = self.latent.projections(d, heads, self.head_dim)
        gate = {"output_gate": (d, heads * self.value_head_dim)}
        return sizes | (gate if self.attention_gate else {})

    @property
    def value_head_dim(self) -> int:
        """Number of features of a value head of softmax attention, Hv."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim

    def train_flops_per_token(self, length: int) -> float:
        """Floating point operations per token of one forward and backward pass.

        Each weight costs 6: a multiplication and an addition forward, twice that backward; frozen
        weights have no gradient and cost 4. Attention costs ``6 N (H + Hv) keys`` per layer:
        products of ``2 N H keys`` and ``2 N Hv keys`` forward, twice that backward. ``keys`` is a
        token's mean number of keys: ``length / 2``, or less with a window. Linear attention costs
        ``18 N H Hv`` per layer (:class:`burst_jax.models.DeltaNet`). Recomputation does not count.

        Args:
          length: number of tokens in a sequence.
        """
        each = 6.0 if self.lora is None else 4.0
        weights = each * self.num_matmul_params + 6.0 * self.num_adapter_params
        if self.delta_net is not None:
            weights += self.mixers["delta_net"] * self.delta_net.train_flops_per_token
        keys = 0.0
        for kind in self.layer_kinds:
            if kind.mixer == "delta_net":
                continue
            seen = length if kind.window is None else min(kind.window, length)
            keys += seen - seen * seen / (2 * length)
        return weights + 6.0 * self.num_heads * (self.head_dim + self.value_head_dim) * keys


def _is_floating(dtype: DTypeLike) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:  # Not a dtype's name.
        return False
