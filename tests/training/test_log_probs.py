"""Log-probabilities of targets, entropies, and their gradients, against all logits in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import quick_jit
from jaxprs import equations
from meshes import assert_close, make_mesh

from burst_jax.training import token_log_probs

D = 8


def arrays(batch, tokens, vocab):
    rng = np.random.default_rng(tokens + vocab)
    hidden = rng.standard_normal((batch, tokens, D)).astype(np.float32)
    kernel = rng.standard_normal((D, vocab)).astype(np.float32)
    targets = rng.integers(0, vocab, (batch, tokens)).astype(np.int32)
    # Weights of reinforcement learning may be negative; only 0 means something.
    weights = rng.choice([0, -1.5, 1, 0.25], (batch, tokens)).astype(np.float32)
    targets[weights == 0] = 10**9  # Never read.
    return hidden, kernel, targets, weights


def dense(inputs, cotangents, cap):
    """Both results, and the gradients of hidden and kernel, in float64, by the definition."""
    hidden, kernel, targets, weights = (
        x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs
    )
    counts = weights != 0
    one_hot = np.eye(kernel.shape[1])[np.where(counts, targets, 0)]
    logits = hidden @ kernel
    slope = np.ones_like(logits)
    if cap is not None:
        logits, slope = cap * np.tanh(logits / cap), 1 - np.tanh(logits / cap) ** 2
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(-1)
    found = (one_hot * log_p).sum(-1)
    of_token, of_entropy = (np.where(counts, x, 0)[..., None] for x in cotangents)
    d_logits = of_token * (one_hot - p) - of_entropy * p * (log_p + entropy[..., None])
    d_products = d_logits * slope
    results = (np.where(counts, x, 0) for x in (found, entropy))
    return *results, d_products @ kernel.T, np.einsum("btd,btv->dv", hidden, d_products)


# data, seq, model; batch, tokens, vocabulary; chunk_size; soft cap.
CASES: dict[str, Any] = {
    "one-device-cap": ((1, 1, 1), (1, 27, 31), 8, 2.5),
    "data2-seq2-tensor2": ((2, 2, 2), (2, 26, 30), 100, None),
    "seq3-tensor2-cap": ((1, 3, 2), (1, 63, 30), 16, 1.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_are_those_of_all_logits(case):
    sizes, shape, chunk_size, cap = case
    inputs = arrays(*shape)
    cotangents = np.random.default_rng(1).standard_normal((2, *shape[:2])).astype(np.float32)
    mesh = make_mesh(*sizes)

    @quick_jit
    def run(hidden, kernel, targets, weights, cotangents):
        def both(hidden, kernel):
            return token_log_probs(
                hidden, kernel, targets, weights, mesh=mesh, batch_axis="data",
                vocab_axis="model" if sizes[2] > 1 else None, chunk_size=chunk_size,
                logits_soft_cap=cap, entropy=True,
            )  # fmt: skip

        results, vjp = jax.vjp(both, hidden, kernel)
        return *results, *vjp(tuple(cotangents))

    assert_close(run(*inputs, cotangents), dense(inputs, cotangents, cap), 3e-6)
    hidden, kernel, targets, weights = inputs
    assert (weights < 0).any()
    counted = weights != 0
    for wrong in (-1, shape[2]):  # Outside the vocabulary.
        targets = np.where(counted, wrong, targets)
        log_probs = run(hidden, kernel, targets, weights, cotangents)[0]
        np.testing.assert_array_equal(np.isnan(log_probs), counted)


def test_only_the_products_and_logits_that_are_needed():
    """A chunk of logits, and no entropy that nobody asked for."""
    hidden, kernel, targets, _ = arrays(1, 96, 40)

    def total(hidden, kernel):
        found, entropy = token_log_probs(
            hidden, kernel, jnp.asarray(targets), mesh=make_mesh(1, 2, 1), chunk_size=16
        )
        assert entropy is None
        return jnp.sum(found)

    for function, products, exponentials in ((total, 1, 0), (jax.grad(total, (0, 1)), 4, 1)):
        jaxpr = jax.make_jaxpr(function)(hidden, kernel).jaxpr
        found = list(equations(jaxpr))
        names = [each.primitive.name for each, _ in found]
        assert names.count("dot_general") == products
        shapes = [
            (each.primitive.name, x.aval.shape)
            for each, around in found
            if "shard_map" in around
            for x in each.outvars
            if getattr(x.aval, "shape", ())[-1:] == (40,) and x.aval.shape[0] != D
        ]
        assert max(shape[0] for _, shape in shapes) <= 16
        assert [name for name, _ in shapes].count("exp") == exponentials
