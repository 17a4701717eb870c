"""A transformer as a user would write it, and mistakes that a user could make in it.

Every mistake is a method that replaces one of the model's, by the name in :data:`MISTAKES`. On one
device, in natural order, all of them are right.
"""

from __future__ import annotations

import functools
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import burst_jax
from burst_jax.training import make_batch

VOCABULARY, FEATURES, HEADS, BATCH, LENGTH = 48, 32, 4, 2, 64


def rope(x, positions):
    """RoPE of ``[B, T, N, H]``."""
    half = x.shape[-1] // 2
    angle = positions[..., None] * 100.0 ** -(jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, number, mesh, layout, dtype, rngs):
        linear = functools.partial(nnx.LinearGeneral, dtype=dtype, rngs=rngs)
        heads = (HEADS, FEATURES // HEADS)
        self.query, self.key = linear(FEATURES, heads), linear(FEATURES, heads)
        self.value, self.out = linear(FEATURES, heads), linear(heads, FEATURES, axis=(-2, -1))
        self.number, self.mesh, self.layout = number, mesh, layout

    def positions(self, q, batch):
        return batch["positions"]

    def options(self):
        return {"batch_axis": "data", "layout": self.layout}

    def ids(self, batch):
        return batch["segment_ids"]

    def attend(self, q, k, v, ids):
        return burst_jax.burst_attention(
            q, k, v, mesh=self.mesh, is_causal=True,
            query_segment_ids=ids, key_value_segment_ids=ids, **self.options(),
        )  # fmt: skip

    def __call__(self, x, batch):
        q, k, v = self.query(x), self.key(x), self.value(x)
        q, k = rope(q, self.positions(q, batch)), rope(k, self.positions(k, batch))
        return self.out(self.attend(q, k, v, self.ids(batch)))


class Model(nnx.Module):
    def __init__(self, mesh, layout, dtype, rngs, attention=Attention, layers=2):
        self.embed = nnx.Embed(VOCABULARY, FEATURES, dtype=dtype, rngs=rngs)
        self.position_table = nnx.Param(0.1 * rngs.normal((LENGTH, FEATURES)))
        self.attention = nnx.List([attention(i, mesh, layout, dtype, rngs) for i in range(layers)])
        self.mlp = nnx.List(
            [nnx.Linear(FEATURES, FEATURES, dtype=dtype, rngs=rngs) for _ in range(layers)]
        )
        self.head = nnx.Linear(FEATURES, VOCABULARY, dtype=dtype, rngs=rngs)
        self.mesh, self.layout, self.dtype = mesh, layout, dtype

    def add_positions(self, x, batch):
        return x + self.position_table[...][batch["positions"]].astype(x.dtype)

    def mix(self, x, batch):
        return x

    def hidden(self, batch):
        x = self.add_positions(self.embed(batch["inputs"]), batch)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x, batch)
            x = x + jax.nn.silu(mlp(self.mix(x, batch)))
        return x

    def targets(self, batch):
        return batch["targets"]

    def reduce(self, losses, weights):
        return jnp.sum(losses * weights) / jnp.sum(weights)

    def loss(self, batch):
        logits = self.head(self.hidden(batch)).astype(jnp.float32)
        targets = self.targets(batch)[..., None]
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets, -1)[..., 0]
        return self.reduce(losses, batch["weights"])


class LinenBlock(linen.Module):
    mesh: jax.sharding.Mesh
    layout: str
    dtype: jnp.dtype

    @linen.compact
    def __call__(self, x, batch):
        attention = burst_jax.LinenBurstAttention(
            num_heads=HEADS, dtype=self.dtype, mesh=self.mesh, batch_axis="data",
            layout=self.layout, is_causal=True,
        )  # fmt: skip
        x = x + attention(x, batch["positions"], batch["segment_ids"])
        return x + linen.Dense(FEATURES, dtype=self.dtype)(x)


class LinenModel(linen.Module):
    mesh: jax.sharding.Mesh
    layout: str
    dtype: jnp.dtype

    @linen.compact
    def __call__(self, batch):
        x = linen.Embed(VOCABULARY, FEATURES, dtype=self.dtype)(batch["inputs"])
        x = LinenBlock(self.mesh, self.layout, self.dtype)(x, batch)
        logits = linen.Dense(VOCABULARY)(x).astype(jnp.float32)
        targets = batch["targets"][..., None]
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets, -1)[..., 0]
        return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


def packed_rows(first=1):
    """Two documents and padding in each sequence; ``first`` is the number of the first one."""
    rows = np.random.default_rng(0).integers(1, VOCABULARY, (BATCH, LENGTH + 1))
    ids = np.full_like(rows, first)
    ids[0, 23:], ids[1, 41:] = first + 1, first + 1
    if first:
        rows[:, 60:], ids[:, 60:] = 0, 0
    return rows, ids


def packed(first=1):
    """A batch of :func:`packed_rows`."""
    rows, ids = packed_rows(first)
    return make_batch(rows, segment_ids=ids)


@functools.cache
def parameters(kind, layers=2):
    """Weights of the nnx or linen model, on one device; the linen model has one layer."""
    mesh = jax.make_mesh(
        (1, 1), ("data", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:1],
    )  # fmt: skip
    if kind == "nnx":
        make = functools.partial(Model, mesh, "contiguous", jnp.float32, layers=layers)
        shapes = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))[1]
    else:
        model = LinenModel(mesh, "contiguous", jnp.dtype("float32"))
        shapes = jax.eval_shape(model.init, jax.random.key(0), packed())
    return decoders.drawn(shapes)


def by_layer(functions):
    return lambda self, *inputs: functions[self.number % len(functions)](self, *inputs)


def in_turn(functions):
    def replaced(self, x, *others):
        for function in functions:
            x = function(self, x, *others)
        return x

    return replaced


def make_loss_of(kind, dtype=jnp.float32, mistakes=(), layers=2) -> Any:
    """``make_loss`` of a model with mistakes, names in :data:`MISTAKES`.

    Of two that replace one method of ``Attention`` each layer gets one; others follow each other.
    """
    methods = {"Model": {}, "Attention": {}}
    for mistake in mistakes:
        owner, method, function = MISTAKES[mistake]
        methods[owner].setdefault(method, []).append(function)
    model_class = type(
        "Model", (Model,), {name: in_turn(each) for name, each in methods["Model"].items()}
    )
    attention_class = type(
        "Attention",
        (Attention,),
        {name: by_layer(each) for name, each in methods["Attention"].items()},
    )

    def make_loss(mesh, layout):
        if kind == "linen":
            return LinenModel(mesh, layout, jnp.dtype(dtype)).apply
        model = nnx.eval_shape(
            lambda: model_class(mesh, layout, dtype, nnx.Rngs(0), attention_class, layers)
        )
        graphdef, _ = nnx.split(model)
        return lambda params, batch: nnx.merge(graphdef, params).loss(batch)

    return make_loss


# --- mistakes ------------------------------------------------------------------------------------


def layout_forgotten(self):
    return {"batch_axis": "data"} | ({"layout": self.layout} if self.number == 0 else {})


def arange_positions(self, q, batch):
    return jnp.arange(q.shape[1])[None]


def batch_axis_forgotten(self):
    return {"layout": self.layout} | ({"batch_axis": "data"} if self.number == 1 else {})


def no_segments_in_one(self, batch):
    return batch["segment_ids"] if self.number == 0 else None


def targets_shifted_late(self, batch):
    return jnp.roll(batch["inputs"], -1, 1)


def shifted_tokens(self, x, batch):
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return (x + before) / 2


def convolution(self, x, batch):
    kernel = jnp.full((3, 1, x.shape[-1]), 1 / 3, x.dtype)
    return lax.conv_general_dilated(
        x, kernel, (1,), [(2, 0)], dimension_numbers=("NTC", "TIO", "NTC"),
        feature_group_count=x.shape[-1],
    )  # fmt: skip


def last_token(self, x, batch):
    return x + x[:, -1:]


def table_by_index(self, x, batch):
    return x + self.position_table[...][None].astype(x.dtype)


def running_mean(self, x, batch):
    return jnp.cumsum(x, 1) / x.shape[1]


def causal_on_one_device(self, q, k, v, ids):
    return burst_jax.burst_attention(
        q, k, v, mesh=self.mesh, is_causal=self.mesh.size == 1,
        query_segment_ids=ids, key_value_segment_ids=ids, **self.options(),
    )  # fmt: skip


def scale_by_devices(self, q, k, v, ids):
    return burst_jax.burst_attention(
        q, k, v, mesh=self.mesh, is_causal=True, scale=self.mesh.size**-0.5,
        query_segment_ids=ids, key_value_segment_ids=ids, **self.options(),
    )  # fmt: skip


def sequence_axis_forgotten(self, q, k, v, ids):
    return burst_jax.burst_attention(
        q, k, v, mesh=self.mesh, is_causal=True, seq_axis=None, batch_axis="data",
        query_segment_ids=ids, key_value_segment_ids=ids,
    )  # fmt: skip


def mean_of_means(self, losses, weights):
    def mean(losses, weights):
        mine = jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1)
        return lax.pmean(mine, ("data", "seq"))

    both = P("data", "seq")
    return jax.shard_map(mean, mesh=self.mesh, in_specs=(both, both), out_specs=P())(
        losses, weights
    )


def pmean_for_psum(self, losses, weights):
    def total(losses, weights):
        losses = lax.pmean(jnp.sum(losses * weights), ("data", "seq"))
        return losses / lax.psum(jnp.sum(weights), ("data", "seq"))

    both = P("data", "seq")
    return jax.shard_map(total, mesh=self.mesh, in_specs=(both, both), out_specs=P())(
        losses, weights
    )


def own_shard_map(body):
    """Attention in a ``shard_map`` of the user's."""

    def attend(self, q, k, v, ids):
        tokens = P("data", "seq")
        return jax.shard_map(
            functools.partial(body, layout=self.layout), mesh=self.mesh,
            in_specs=(tokens,) * 4, out_specs=tokens,
        )(q, k, v, ids)  # fmt: skip

    return attend


def ring(q, k, v, ids, layout):
    return burst_jax.ring_attention(
        q, k, v, "seq", layout=layout, is_causal=True,
        query_segment_ids=ids, key_value_segment_ids=ids,
    )  # fmt: skip


def local(q, k, v, ids, layout):
    return burst_jax.local_attention(
        q, k, v, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids
    )


def positions_per_shard(self, q, batch):
    def count(x):
        return jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])

    split = P("data", "seq")
    return jax.shard_map(
        lambda x: lax.pcast(count(x), ("data", "seq"), to="varying"),
        mesh=self.mesh, in_specs=split, out_specs=split,
    )(q)  # fmt: skip


def dropout(self, x, batch):
    keep = jax.random.bernoulli(jax.random.key(1), 0.9, x.shape)
    return jnp.where(keep, x / jnp.asarray(0.9, x.dtype), 0)


def noise_per_device(self, x, batch):
    def drop(x):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("seq"))
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    split = P("data", "seq")
    return jax.shard_map(drop, mesh=self.mesh, in_specs=split, out_specs=split)(x)


def norm_over_tokens(self, x, batch):
    def norm(x):
        return x / jnp.sqrt(jnp.mean(x**2, 1, keepdims=True) + 1e-6)

    split = P("data", "seq")
    return jax.shard_map(norm, mesh=self.mesh, in_specs=split, out_specs=split)(x)


def documents_by_index(self, batch):
    return 1 + jnp.cumsum(batch["inputs"] % 9 == 0, 1)


def gradient_of_one_device(self, x, batch):
    scale = 1.0 / self.mesh.shape["seq"]

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (g * scale,))
    return identity(x)


# By name: the class, the method that is replaced, and what replaces it.
MISTAKES = {
    "layout forgotten": ("Attention", "options", layout_forgotten),
    "batch axis forgotten": ("Attention", "options", batch_axis_forgotten),
    "arange positions": ("Attention", "positions", arange_positions),
    "positions per shard": ("Attention", "positions", positions_per_shard),
    "segments forgotten": ("Attention", "ids", no_segments_in_one),
    "documents by index": ("Attention", "ids", documents_by_index),
    "other mask": ("Attention", "attend", causal_on_one_device),
    "other scale": ("Attention", "attend", scale_by_devices),
    "sequence axis forgotten": ("Attention", "attend", sequence_axis_forgotten),
    "local attention": ("Attention", "attend", own_shard_map(local)),
    "shift": ("Model", "mix", shifted_tokens),
    "convolution": ("Model", "mix", convolution),
    "last token": ("Model", "mix", last_token),
    "running mean": ("Model", "mix", running_mean),
    "dropout": ("Model", "mix", dropout),
    "noise per device": ("Model", "mix", noise_per_device),
    "norm over tokens": ("Model", "mix", norm_over_tokens),
    "wrong gradient": ("Model", "mix", gradient_of_one_device),
    "table by index": ("Model", "add_positions", table_by_index),
    "late shift of targets": ("Model", "targets", targets_shifted_late),
    "mean of means": ("Model", "reduce", mean_of_means),
    "mean for sum": ("Model", "reduce", pmean_for_psum),
    # Not a mistake.
    "own shard_map": ("Attention", "attend", own_shard_map(ring)),
}
