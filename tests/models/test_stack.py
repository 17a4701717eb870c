"""Stacks of layers of several kinds: how they are cut into scans, and what the scans compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import quick_jit
from meshes import assert_close

from burst_jax.models.stack import Block, Run, blocks_of, run_ahead, run_layers


@pytest.mark.parametrize(
    ("kinds", "blocks"),
    [
        ("LLLL", [(1, "L4")]),
        ("LGLG", [(2, "L1 G1")]),
        ("LGLGL", [(2, "L1 G1"), (1, "L1")]),
        ("LLGLLGLL", [(2, "L2 G1"), (1, "L2")]),
        ("FFSSS", [(1, "F2 S3")]),
        ("LLG", [(1, "L2 G1")]),
        ("G", [(1, "G1")]),
        # Layers that keep something else are of another kind, written small here.
        ("LLLll", [(1, "L3 l2")]),
        ("LGLGlglglg", [(2, "L1 G1"), (3, "l1 g1")]),
        ("LLGLlgllgl", [(1, "L2 G1 L1"), (2, "l1 g1 l1")]),
    ],
)
def test_blocks(kinds, blocks):
    found = blocks_of(kinds)

    def text(block: Block) -> tuple[int, str]:
        return block.repeats, " ".join(f"{kinds[run.layer]}{run.count}" for run in block.runs)

    assert [text(block) for block in found] == blocks
    assert sum(block.repeats * block.period for block in found) == len(kinds)
    assert found[0].runs[0] == Run(0, int(blocks[0][1][1]))


@pytest.mark.parametrize(
    ("run", "kinds"),
    [(run_ahead, "LLGLLGLL"), (run_ahead, "FFS"), (run_layers, "LGL"), (run_layers, "LL")],
)
def test_values_and_gradients_are_those_of_a_loop(run, kinds):
    count, width = len(kinds), 4
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    x, side = normal(3, width), normal(3, width)
    stacked = {"w": normal(count, width, width), "b": normal(count, width)}
    constant = {"scale": normal(count, width)}
    functions = {"L": jnp.tanh, "G": jnp.sin, "F": jnp.cos, "S": jax.nn.sigmoid}

    def layer_of(kind):
        def layer(x, weights, frozen, side):
            return x + functions[kind](x @ weights["w"] + weights["b"]) * frozen["scale"] * side

        return layer

    layers = {kind: layer_of(kind) for kind in kinds}
    in_order = [layers[kind] for kind in kinds]

    # A gather with a derivative of its own, which each layer's gradient must pass.
    def gather(weights):
        return jax.tree.map(lambda w: 2 * w, weights)

    def loop(x, stacked):
        for index, layer in enumerate(in_order):
            weights, frozen = jax.tree.map(lambda w, i=index: w[i], (stacked, constant))
            x = layer(x, gather(weights), gather(frozen), side)
        return x

    def scanned(x, stacked):
        return run(in_order, gather, x, stacked, constant, side)

    cotangent = normal(3, width)

    def both(f):
        @quick_jit
        def run(x, stacked, cotangent):
            out, vjp = jax.vjp(f, x, stacked)
            return out, vjp(cotangent)

        return run(x, stacked, cotangent)

    got, want = both(scanned), both(loop)
    assert_close(got, want, 1e-5)
