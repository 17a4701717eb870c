"""Stacks of layers of several kinds: segments, what the scans compute, pipeline stages."""

from __future__ import annotations

import dataclasses
from functools import partial

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from implementations import quick_jit
from jax.ad_checkpoint import checkpoint_name
from jaxprs import count, equations
from meshes import assert_close
from split_runs import CONFIG, sized

from burst_jax import ShardingRules
from burst_jax.models.remat import (
    ATTENTION_SUM,
    LAYER_INPUT,
    MLP_PRODUCTS,
    Remat,
    remat_of_layers,
    rematerialized,
)
from burst_jax.models.stack import Block, Stacked, blocks_of, run_ahead, run_layers
from burst_jax.ring.vjp import CHECKPOINT_NAMES

RNG = np.random.default_rng(0)


def normal(*shape):
    """NumPy's: for each shape ``jnp.asarray`` would be a program."""
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("kinds", "blocks"),
    [
        ("LLLL", [(1, "L4")]),
        ("LGLGL", [(2, "L1 G1"), (1, "L1")]),
        ("LLGLLGLL", [(2, "L2 G1"), (1, "L2")]),
        ("FFSSS", [(1, "F2 S3")]),
        ("G", [(1, "G1")]),
        # Layers with another remat are of another kind, here in lower case.
        ("LLLll", [(1, "L3 l2")]),
        ("LGLGlglglg", [(2, "L1 G1"), (3, "l1 g1")]),
        ("LLGLlgllgl", [(1, "L2 G1 L1"), (2, "l1 g1 l1")]),
    ],
)
def test_blocks(kinds, blocks):
    def text(block: Block) -> tuple[int, str]:
        names = (f"{kinds[segment.layer]}{segment.count}" for segment in block.segments)
        return block.repeats, " ".join(names)

    assert [text(block) for block in blocks_of(kinds)] == blocks


def is_matrix(path):
    return path[1].key == "w"


@pytest.mark.parametrize(
    ("run", "kinds", "barriers"),
    [
        # One per segment, between what is gathered ahead and the gradients.
        (run_ahead, "LLGLLGLL", 3),
        (partial(run_ahead, ready_first=is_matrix), "LLG", 2 + 1),
        # XLA unrolls the scans of single layers that no block repeats, so their recomputation needs
        # one more against the forward pass.
        (run_ahead, "FFS", 2 + 1),
        (run_layers, "LGS", 3 + 3),
        (run_layers, "LL", 0),
        # Those of T have another stack, of other shapes.
        (run_layers, "LLTLLTLL", 3),
        (run_ahead, "TLT", 3 + 3),
    ],
)
def test_values_and_gradients_are_those_of_a_loop(monkeypatch, run, kinds, barriers):
    # GPUs' uninitialized memory; XLA's on CPUs is zeros.
    empty = partial(jnp.full, fill_value=np.nan)
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: empty(shape, dtype=dtype))
    x, side = normal(3, 4), normal(3, 4)
    cotangent = normal(3, 4), normal(len(kinds), 4)
    names = ["other" if kind == "T" else "stack" for kind in kinds]
    stacked, constant = {}, {}
    for name in dict.fromkeys(names):
        layers = names.count(name)
        # Larger weights would amplify float32's rounding.
        stacked[name] = {"w": normal(layers, 2, 4) / 4, "b": normal(layers, 2)}
        constant[name] = {"scale": normal(layers, 2)}
    if "other" in stacked:
        stacked["other"]["c"] = normal(names.count("other"), 2)
    functions = {"L": jnp.tanh, "G": jnp.sin, "F": jnp.cos, "S": jax.nn.sigmoid, "T": jnp.arctan}

    def layer_of(kind):
        def layer(x, weights, frozen, side):
            out = functions[kind](x @ weights["w"] + weights["b"] + weights.get("c", 0))
            return x + out * frozen["scale"] * side, (out * out).sum(0)

        return layer

    by_kind = {kind: layer_of(kind) for kind in kinds}
    in_order = [Stacked(name, by_kind[kind]) for name, kind in zip(names, kinds, strict=True)]

    # A gather with a derivative of its own, which each layer's gradient must pass.
    def gather(stack, weights):
        assert weights.keys() in (stacked[stack].keys(), constant[stack].keys())
        return jax.tree.map(lambda w: jnp.concatenate([w, 2 * w]), weights)

    def loop(x, stacked):
        sums = []
        for index, (stack, layer) in enumerate(in_order):
            own = names[:index].count(stack)
            of_layer = jax.tree.map(lambda w, i=own: w[i], (stacked[stack], constant[stack]))
            weights, frozen = (gather(stack, each) for each in of_layer)
            x, each = layer(x, weights, frozen, side)
            sums.append(each)
        return x, jnp.stack(sums)

    def scanned(x, stacked):
        return run(in_order, gather, x, stacked, constant, side)

    def both(f):
        def run(x, stacked, cotangent):
            out, vjp = jax.vjp(f, x, stacked)
            return out, vjp(cotangent)

        return run

    arguments = x, stacked, cotangent
    out, gradients = plain_model.gradients(loop, cotangent, x, stacked)
    assert_close(quick_jit(both(scanned))(*arguments), (out, tuple(gradients)), 1e-5)
    jaxpr = jax.make_jaxpr(both(scanned))(*arguments).jaxpr
    assert count(jaxpr, "optimization_barrier") == barriers
    # The matrix' gradient is scattered before the barrier, or after it.
    ordered = [
        x.aval.shape
        for equation, _ in equations(jaxpr)
        if equation.primitive.name == "optimization_barrier"
        for x in equation.invars
    ]
    assert ((2, 4) in ordered) == isinstance(run, partial)


@pytest.mark.parametrize(
    ("remat", "stored"),
    # The layer's input, out; and with "selective" the sum after attention and the product.
    [("selective", 4), ("attention", 2), ("full", 1), ("offload", 2)],
)
def test_rematerialized_layers_store_few_activations(remat: Remat, stored):
    def layer(x, weights, frozen, shared, attention_fn):
        assert attention_fn is None
        x = checkpoint_name(x, LAYER_INPUT)
        out = checkpoint_name(jnp.sin(x @ weights), CHECKPOINT_NAMES[0])
        x = checkpoint_name(x + out * out * shared, ATTENTION_SUM)
        product = checkpoint_name(x * x @ frozen, MLP_PRODUCTS)
        return (x + jnp.cos(product), None), "unused"

    arguments, frozen, shared = (normal(3, 4), normal(4, 4)), normal(4, 4), normal(4)

    @partial(jax.jit, static_argnums=0)
    def gradient(remat, arguments, cotangent):
        run = rematerialized(layer, remat)
        _, vjp = jax.vjp(lambda x, weights: run(x, weights, frozen, shared)[0], *arguments)
        return vjp, vjp(cotangent)

    cotangent = normal(3, 4)
    vjp, found = gradient(remat, arguments, cotangent)
    assert_close(found, gradient("none", arguments, cotangent)[1])
    kept = [x.sharding.memory_kind for x in jax.tree.leaves(vjp) if x.shape == (3, 4)]
    assert kept == ["pinned_host" if remat == "offload" else "device"] * stored


def selective(layers):
    return dataclasses.replace(CONFIG, remat="selective", remat_layers=layers)


def traced_gradient(config, microbatches=None):
    mesh = sized((1, 1, 2, 2, 1))
    return decoders.traced_gradient(
        config, mesh, 4, 48, rules=ShardingRules.of(mesh), microbatches=microbatches
    )


@pytest.mark.parametrize(
    ("layers", "per_stage", "microbatches"), [(2, 1, None), (4, 2, None), (2, 1, 4)]
)
def test_each_stage_stores_the_products_of_its_selective_layers(layers, per_stage, microbatches):
    """The outputs of gate and up of the feed-forward; a stage has two layers."""
    stored = [
        out.aval.shape
        for equation, around in equations(traced_gradient(selective(layers), microbatches))
        if equation.primitive.name == "scan" and "scan" not in around
        for out in equation.outvars
        if out.aval.ndim == 5 and out.aval.shape[-1] == CONFIG.mlp_dim
    ]
    # In each tick, for one microbatch of the four sequences and half of their tokens.
    count = microbatches or 2
    assert stored == [(count + 1, per_stage, 4 // count, 24, CONFIG.mlp_dim)] * 2


def test_the_last_layers_are_selective_as_many_in_each_stage():
    assert remat_of_layers("selective", 1, 3) == ("attention", "attention", "selective")
    assert remat_of_layers("full", None, 2) == ("full", "full")
    message = r"remat_layers is 3, and each of the 2 stages has .*: use a multiple of 2"
    with pytest.raises(ValueError, match=message):
        traced_gradient(selective(3))
