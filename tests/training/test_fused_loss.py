"""The loss's gradients, which its forward pass makes: right, in float32, and nothing for nobody."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from implementations import quick_jit
from jaxprs import count
from meshes import assert_close, make_mesh, relative_rms

from burst_jax.training import chunked_cross_entropy, fused_loss

D = 8


def arrays(rows, tokens, vocab, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng(rows * tokens + vocab)
    hidden = jnp.asarray(scale * rng.standard_normal((rows, tokens, D)), dtype)
    kernel = jnp.asarray(rng.standard_normal((D, vocab)), jnp.float32)
    targets = rng.integers(0, vocab, (rows, tokens)).astype(np.int32)
    weights = rng.uniform(0.25, 2.0, (rows, tokens)).astype(np.float32)
    weights[:, ::4] = 0
    targets[weights == 0] = 10**9  # Never read.
    return hidden, kernel, jnp.asarray(targets), jnp.asarray(weights)


def dense(inputs, cotangent, z_loss=0.0, logits_soft_cap=None):
    """The value and the gradients in float64, with all logits at once."""
    hidden, kernel, targets, weights = (np.asarray(x) for x in inputs)
    targets, weights = np.where(weights == 0, 0, targets), weights.astype(np.float64)

    def loss(hidden, kernel):
        logits = hidden @ kernel
        if logits_soft_cap is not None:
            logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
        square = jax.nn.logsumexp(logits, axis=-1) ** 2
        return plain_model.cross_entropy(logits, targets, weights) + z_loss * jnp.sum(
            weights * square
        )

    with jax.enable_x64(True):
        exact = (jnp.asarray(x, jnp.float64) for x in (hidden, kernel))
        total, grads = quick_jit(jax.value_and_grad(loss, (0, 1)))(*exact)
        return jax.device_get((total, jax.tree.map(lambda g: cotangent * g, grads)))


def run(inputs, cotangent, mesh, **options):
    hidden, kernel, targets, weights = inputs

    def both(hidden, kernel):
        def loss(hidden, kernel):
            return chunked_cross_entropy(
                hidden, kernel, targets, weights, mesh=mesh, batch_axis="data", **options
            )[0]

        value = loss(hidden, kernel)
        total, vjp = jax.vjp(loss, hidden, kernel)
        return value, total, vjp(jnp.float32(cotangent))

    return quick_jit(both)(hidden, kernel)


CASES = {
    # data, seq, model; rows, tokens, vocabulary; chunk; z-loss, soft cap; cotangent
    "one-device-cap-z": ((1, 1, 1), (1, 27, 31), 8, 0.03, 2.5, -1.75),
    "tensor3-cap-z": ((1, 1, 3), (2, 11, 33), 5, 0.03, 2.5, 0.37),
    "seq3-tensor2-z": ((1, 3, 2), (1, 63, 30), 16, 0.2, None, 0.37),
    "data2-seq2-tensor2-cap": ((2, 2, 2), (2, 26, 30), 100, 0.0, 1.0, 3.0),
    "tensor8": ((1, 1, 8), (1, 7, 40), 3, 0.0, None, 1e3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_value_and_gradients_are_those_of_all_logits(case):
    sizes, shape, chunk_size, z_loss, cap, cotangent = case
    inputs, loss = arrays(*shape), {"z_loss": z_loss, "logits_soft_cap": cap}
    want, want_grads = dense(inputs, cotangent, **loss)
    vocab_axis = "model" if sizes[2] > 1 else None
    value, total, grads = run(
        inputs, cotangent, make_mesh(*sizes), chunk_size=chunk_size, vocab_axis=vocab_axis, **loss
    )
    np.testing.assert_allclose([value, total], [want, want], rtol=2e-6)
    assert_close(grads, want_grads, 2e-6)
    assert not np.asarray(grads[0])[np.asarray(inputs[3]) == 0].any()


@pytest.mark.parametrize("tensor", [1, 2])
def test_large_logits_stay_finite(tensor):
    inputs = arrays(1, 16, 30, scale=1e4)
    want, want_grads = dense(inputs, 1.0)
    _, total, grads = run(inputs, 1.0, make_mesh(model=tensor), vocab_axis="model", chunk_size=8)
    np.testing.assert_allclose(total, want, rtol=1e-5)
    assert_close(grads, want_grads, 1e-5)


@pytest.mark.parametrize("tensor", [1, 3])
def test_bfloat16_errors_are_those_of_rounding(tensor):
    """Beside the same products of all logits at once, rounded once each."""
    hidden, kernel, targets, weights = arrays(2, 48, 60, jnp.bfloat16)
    rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
    want, want_grads = dense((hidden, rounded, targets, weights), 1.0)
    mesh = make_mesh(model=tensor)
    _, total, grads = run(
        (hidden, kernel, targets, weights), 1.0, mesh, vocab_axis="model", chunk_size=16
    )
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32]
    # Logits, log-sum-exp and the sum are float32.
    np.testing.assert_allclose(total, want, rtol=1e-6)
    # One bfloat16 rounding, of the slopes; of the hidden states' gradient one more, and with a
    # split vocabulary one for each part.
    one = relative_rms(np.asarray(want_grads[1]).astype(jnp.bfloat16), want_grads[1])
    assert relative_rms(grads[1], want_grads[1]) < 1.5 * one
    assert relative_rms(grads[0], want_grads[0]) < 3 * one


def test_the_kernels_gradient_is_summed_in_float32():
    """A sum of 256 chunks in bfloat16 would stop growing."""
    hidden, kernel, targets, weights = arrays(1, 1024, 30, jnp.bfloat16)
    inputs = jnp.abs(hidden), kernel.astype(jnp.bfloat16), jnp.zeros_like(targets), weights
    _, want_grads = dense(inputs, 1.0)
    _, _, grads = run(inputs, 1.0, make_mesh(), chunk_size=4)
    assert grads[1].dtype == jnp.bfloat16
    assert relative_rms(grads[1], want_grads[1]) < 4e-3


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("wrong", [-1, 30, 31])
def test_a_target_that_the_vocabulary_lacks_is_nan(wrong, tensor):
    hidden, kernel, targets, weights = arrays(1, 16, 30)
    _, total, _ = run(
        (hidden, kernel, targets.at[0, 5].set(wrong), weights), 1.0, make_mesh(model=tensor),
        vocab_axis="model",
    )  # fmt: skip
    assert np.isnan(total)


def test_weights_get_no_gradient():
    hidden, kernel, targets, weights = arrays(1, 16, 30)

    def loss(weights):
        return chunked_cross_entropy(hidden, kernel, targets, weights, mesh=make_mesh())[0]

    value, gradient = jax.value_and_grad(loss)(weights)
    assert value > 0
    assert not gradient.any()


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_second_derivatives(tensor):
    """Of the gradients, which the forward pass makes with a reduction that JAX cannot derive."""
    hidden, kernel, targets, weights = arrays(1, 12, 30)
    options = {"z_loss": 0.1, "logits_soft_cap": 3.0}
    mesh = make_mesh(model=tensor)
    step = jnp.cos(jnp.arange(hidden.size, dtype=jnp.float32)).reshape(hidden.shape)

    def loss(hidden):
        return chunked_cross_entropy(
            hidden, kernel, targets, weights, mesh=mesh, vocab_axis="model", chunk_size=8, **options
        )[0]

    @quick_jit
    def products(hidden):
        forward = jax.jvp(jax.grad(loss), (hidden,), (step,))[1]
        return forward, jax.grad(lambda h: jnp.sum(step * jax.grad(loss)(h)))(hidden)

    ahead, behind = (
        dense((np.float64(hidden) + sign * 1e-5 * np.float64(step), kernel, targets, weights), 1.0,
              **options)[1][0]
        for sign in (1, -1)
    )  # fmt: skip
    for product in products(hidden):
        assert_close(product, (ahead - behind) / 2e-5, 1e-5)


def test_a_frozen_kernel_has_no_gradient_and_the_others_stay():
    inputs = arrays(2, 16, 30)
    free, frozen = (
        run(inputs, 1.5, make_mesh(), chunk_size=8, frozen_kernel=each) for each in (False, True)
    )
    np.testing.assert_array_equal(free[1], frozen[1])
    np.testing.assert_array_equal(free[2][0], frozen[2][0])
    assert np.any(free[2][1])
    assert not np.any(frozen[2][1])


def products_of(wants):
    inputs = arrays(1, 16, 30)

    def loss(hidden, kernel):
        return chunked_cross_entropy(
            hidden, kernel, *inputs[2:], mesh=make_mesh(), chunk_size=8, z_loss=0.1
        )[0]

    function = loss if wants is None else jax.grad(loss, wants)
    return jax.jit(function).trace(*inputs[:2])


@pytest.mark.parametrize(
    ("wants", "products"),
    [(None, 1), ((0, 1), 3), (0, 2), (1, 2)],
    ids=["value", "both", "hidden", "kernel"],
)
def test_no_product_is_made_for_nothing(wants, products):
    traced = products_of(wants)
    if wants in (None, (0, 1)):
        assert count(traced.jaxpr.jaxpr, "dot_general") == products
    # What is not used the compiler leaves out, of a loop's body too.
    text = traced.lower().compile().as_text()
    assert text is not None
    assert text.count(" dot(") == products


@pytest.mark.parametrize(
    ("tokens", "chunk_size"), [(1, 1), (1, 4096), (63, 11), (100, 7), (4096, 4096), (4097, 4096)]
)
def test_parts_hold_all_tokens_and_little_else(tokens, chunk_size):
    chunks, parts, size = fused_loss._sizes(tokens, chunk_size)
    assert parts * size <= chunk_size
    assert size <= max(1, chunk_size // 4)
    assert 0 <= chunks * parts * size - tokens < chunks * (parts + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z_loss": -0.1}, "z_loss is -0.1: it must be 0, which is none, or positive and finite"),
        ({"z_loss": float("nan")}, "z_loss is nan: it must be 0"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0: it must be positive and finite"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap is inf: it must be positive"),
    ],
)
def test_wrong_options_raise(change, message):
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(*arrays(1, 8, 30), mesh=make_mesh(), **change)
