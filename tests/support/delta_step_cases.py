"""A decoding step of the gated delta rule: drawn arrays, and the step by its formula in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear.sm80 import step

DIM, UNIT_EPSILON, NORM_EPSILON = 128, 1e-2, 3e-2


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_formula(
    projected, weights, before, present, beta_factor,
    unit_epsilon=UNIT_EPSILON, norm_epsilon=NORM_EPSILON,
):  # fmt: skip
    """One token of each sequence."""
    keys, heads = before.query.shape[2], before.value.shape[2]
    sizes = [keys * DIM, keys * DIM, heads * DIM, heads * DIM, heads, heads]
    *inputs, gate, beta, decay, _ = np.split(projected, np.cumsum(sizes), axis=1)
    mixed, tails = [], []
    convolutions = zip(inputs, before[1:], weights[:3], strict=True)
    for token, tail, taps in convolutions:
        window = np.concatenate([tail, token.reshape(len(tail), 1, *tail.shape[2:])], 1)
        total = (window * taps).sum(1)
        mixed.append(total * sigmoid(total))
        tails.append(window[:, 1:])
    query, key = (
        np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + unit_epsilon), heads // keys, 1)
        for x in mixed[:2]
    )
    rate = np.exp(weights.a_log) * np.log1p(np.exp(decay + weights.dt_bias))
    state = np.exp(-rate)[..., None, None] * before.state
    predicted = np.einsum("bnk,bnkv->bnv", key, state)
    update = beta_factor * sigmoid(beta)[..., None] * (mixed[2] - predicted)
    state = state + key[..., None] * update[:, :, None]
    out = np.einsum("bnk,bnkv->bnv", query, state) / np.sqrt(DIM)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + norm_epsilon) * weights.norm
    gate = gate.reshape(out.shape)
    after = step.StepState(state, *tails)
    kept = (present > 0).reshape(-1, 1, 1, 1)
    after = step.StepState(*(np.where(kept, *x) for x in zip(after, before, strict=True)))
    return out * gate * sigmoid(gate), after


def draw(key_heads, heads, present, taps, dtype):
    """``(projected, weights, state, present)``; NaN for sequences that have ended."""
    rng, batch, half = np.random.default_rng(key_heads + heads), len(present), jnp.dtype(dtype)
    of_keys, of_values = (key_heads, DIM), (heads, DIM)

    def normal(*shape, dtype=np.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    inputs = of_keys, of_keys, of_values
    convolutions = [normal(taps, *x, dtype=half) for x in inputs]
    others = [normal(heads), normal(heads), normal(DIM, dtype=half)]
    tails = [normal(batch, taps - 1, *x, dtype=half) for x in inputs]
    before = step.StepState(normal(batch, heads, DIM, DIM), *tails)
    # As in the fused matrix some columns have nothing.
    columns = (2 * key_heads + 2 * heads) * DIM + 2 * heads + 64
    ended = np.asarray(present)[:, None] == 0
    projected = jnp.where(ended, jnp.asarray(jnp.nan, half), normal(batch, columns, dtype=half))
    weights = step.StepWeights(*convolutions, *others)
    return projected, weights, before, jnp.asarray(present, jnp.int32)


def call(beta_factor):
    """The kernel, of what :func:`draw` returns."""

    def run(projected, weights, state, present):
        return step.step(
            projected, weights, state, present, unit_epsilon=UNIT_EPSILON,
            norm_epsilon=NORM_EPSILON, most_beta=beta_factor,
        )  # fmt: skip

    return run


def check(given, results, beta_factor):
    """Fails unless the results of :func:`call` are as exact as their dtypes."""
    projected, weights, before, present = given
    out, after = results
    want, state = by_formula(
        wide(projected), step.StepWeights(*map(wide, weights)), step.StepState(*map(wide, before)),
        np.asarray(present), beta_factor,
    )  # fmt: skip
    for x, y in zip(after, state, strict=True):
        np.testing.assert_allclose(wide(x), y, rtol=1e-4, atol=1e-5)
    running = np.asarray(present) > 0
    np.testing.assert_allclose(wide(out)[running], want[running], rtol=6e-3, atol=1e-5)


def wide(x):
    """In float64."""
    return np.asarray(jnp.asarray(x, jnp.float32), float)
