"""The chunked cross entropy and its gradients, against all logits in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from implementations import quick_jit
from jax.sharding import AxisType
from jaxprs import count, equations
from meshes import assert_close, make_mesh, relative_rms

from burst_jax.training import chunked_cross_entropy, fused_loss

D = 8


def arrays(batch, tokens, vocab, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng(batch * tokens + vocab)
    hidden = jnp.asarray(scale * rng.standard_normal((batch, tokens, D)), dtype)
    kernel = jnp.asarray(rng.standard_normal((D, vocab)), jnp.float32)
    targets = rng.integers(0, vocab, (batch, tokens)).astype(np.int32)
    weights = rng.uniform(0.25, 2.0, (batch, tokens)).astype(np.float32)
    weights[:, ::4] = 0
    targets[weights == 0] = 10**9  # Never read.
    return hidden, kernel, jnp.asarray(targets), jnp.asarray(weights)


def dense(inputs, cotangent=1.0, z_loss=0.0, logits_soft_cap=None):
    """Value and gradients in float64, with all logits at once."""
    hidden, kernel, targets, weights = (np.asarray(x) for x in inputs)
    targets, weights = np.where(weights == 0, 0, targets), weights.astype(np.float64)

    def loss(hidden, kernel):
        logits = hidden @ kernel
        if logits_soft_cap is not None:
            logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
        square = jax.nn.logsumexp(logits, axis=-1) ** 2
        total = plain_model.cross_entropy(logits, targets, weights)
        return total + z_loss * jnp.sum(weights * square)

    total, gradients = plain_model.gradients(loss, 1.0, hidden, kernel)
    return total, tuple(cotangent * x for x in gradients)


@functools.cache
def program(sizes, **options):
    """Value alone, value under differentiation, number of targets, gradients."""
    mesh = make_mesh(*sizes)
    vocab_axis = "model" if sizes[2] > 1 else None

    @quick_jit
    def run(hidden, kernel, targets, weights, cotangent):
        def loss(hidden, kernel, weights):
            return chunked_cross_entropy(
                hidden, kernel, targets, weights,
                mesh=mesh, batch_axis="data", vocab_axis=vocab_axis, **options,
            )  # fmt: skip

        value, _ = loss(hidden, kernel, weights)
        total, vjp, counted = jax.vjp(loss, hidden, kernel, weights, has_aux=True)
        return value, total, counted, vjp(jnp.float32(cotangent))

    return run


CASES: dict[str, Any] = {
    # data, seq, model; batch, tokens, vocabulary; cotangent; chunk_size; options of the loss
    "one-device-cap-z": ((1, 1, 1), (1, 27, 31), -1.75, 8, {"z_loss": 0.1, "logits_soft_cap": 2.5}),
    "seq3-tensor2-z": ((1, 3, 2), (1, 63, 30), 0.37, 16, {"z_loss": 0.2}),
    "data2-seq2-tensor2-cap": ((2, 2, 2), (2, 26, 30), 3.0, 100, {"logits_soft_cap": 1.0}),
    "tensor8": ((1, 1, 8), (1, 7, 40), 1e3, 3, {}),
}
ONE, RING, *_ = CASES.values()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_value_and_gradients_are_those_of_all_logits(case):
    """Large logits, too, without a cap that makes them small."""
    sizes, shape, cotangent, chunk_size, options = case
    run, inputs = program(sizes, chunk_size=chunk_size, **options), arrays(*shape)
    for scale, rtol in ((1.0, 2e-6), (1e4, 1e-5))[: 1 if "logits_soft_cap" in options else 2]:
        inputs = arrays(*shape, scale=scale)
        want, want_grads = dense(inputs, cotangent, **options)
        value, total, counted, grads = run(*inputs, cotangent)
        np.testing.assert_allclose([value, total], [want, want], rtol=rtol)
        np.testing.assert_allclose(counted, np.sum(inputs[3]), rtol=1e-6)
        assert_close(grads[:2], want_grads, rtol)
        assert not np.asarray(grads[0])[np.asarray(inputs[3]) == 0].any()
        assert not grads[2].any()  # Weights are constants.
    hidden, kernel, targets, weights = inputs
    for wrong in (-1, shape[2], shape[2] + 1):  # Outside the vocabulary.
        value, total, *_ = run(hidden, kernel, targets.at[0, 5].set(wrong), weights, 1.0)
        assert np.isnan([value, total]).all()


@pytest.mark.parametrize("case", [ONE, RING], ids=["one-device", "tensor2"])
def test_bfloat16_errors_are_those_of_one_rounding(case):
    """Relative to the same products of all logits at once, each rounded once."""
    sizes, shape, _, chunk_size, options = case
    hidden, kernel, targets, weights = arrays(*shape, dtype=jnp.bfloat16)
    rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
    want, want_grads = dense((hidden, rounded, targets, weights), **options)
    run = program(sizes, chunk_size=chunk_size, **options)
    _, total, _, grads = run(hidden, kernel, targets, weights, 1.0)
    assert [g.dtype for g in grads[:2]] == [jnp.bfloat16, jnp.float32]
    # Logits, log-sum-exp and the sum are float32.
    np.testing.assert_allclose(total, want, rtol=1e-6)
    # The logits' gradient is rounded once; the hidden states' gradient once more, and once per
    # shard of the vocabulary.
    one = relative_rms(np.asarray(want_grads[1]).astype(jnp.bfloat16), want_grads[1])
    assert relative_rms(grads[1], want_grads[1]) < 1.5 * one
    assert relative_rms(grads[0], want_grads[0]) < 3 * one


def test_the_kernels_gradient_accumulates_in_float32():
    """A bfloat16 sum of 256 chunks would stop growing."""
    hidden, kernel, targets, weights = arrays(1, 1024, 30, jnp.bfloat16)
    inputs = jnp.abs(hidden), kernel.astype(jnp.bfloat16), jnp.zeros_like(targets), weights
    _, want_grads = dense(inputs)
    _, _, _, grads = program((1, 1, 1), chunk_size=4)(*inputs, 1.0)
    assert grads[1].dtype == jnp.bfloat16
    assert relative_rms(grads[1], want_grads[1]) < 4e-3


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_arrays_of_any_sharding(kind):
    """Also kernels that are sharded over an axis of neither tokens nor the vocabulary."""
    hidden, kernel, targets, weights = arrays(2, 24, 30)
    targets = jnp.where(weights == 0, 3, targets)
    mesh = make_mesh(2, 2, 2, kind=kind)
    explicit = kind == AxisType.Explicit
    want, (_, d_kernel) = dense((hidden, kernel, targets, jnp.ones_like(weights)))
    for spec in (jax.P(("model", "data")), jax.P(None, "model")):
        split = jax.device_put(kernel, jax.NamedSharding(mesh, spec))

        def loss(kernel, hidden=hidden, given=None if explicit else spec):
            return chunked_cross_entropy(
                hidden, kernel, targets, batch_axis="data", mesh=mesh, kernel_spec=given
            )

        with jax.set_mesh(mesh):
            (total, counted), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(split)
        assert counted == 48  # Without weights every token counts.
        np.testing.assert_allclose(total, want, rtol=1e-6)
        assert_close(gradient, d_kernel)
        if explicit:
            assert gradient.sharding.is_equivalent_to(split.sharding, 2)
    if explicit:
        elsewhere = jax.device_put(hidden, jax.NamedSharding(mesh, jax.P(None, "model")))
        with pytest.raises(ValueError, match=r"hidden is sharded .*: pass seq_axis='model' \(lay"):
            loss(kernel, elsewhere)


@pytest.mark.slow
def test_second_derivatives():
    """Of the gradients, which the forward pass computes with a reduction JAX cannot derive."""
    hidden, kernel, targets, weights = arrays(1, 12, 30)
    options = {"z_loss": 0.1, "logits_soft_cap": 3.0}
    mesh = make_mesh(model=2)
    step = jnp.cos(jnp.arange(hidden.size, dtype=jnp.float32)).reshape(hidden.shape)

    def loss(hidden):
        return chunked_cross_entropy(
            hidden, kernel, targets, weights, mesh=mesh, vocab_axis="model", chunk_size=8, **options
        )[0]

    @quick_jit
    def products(hidden):
        forward = jax.jvp(jax.grad(loss), (hidden,), (step,))[1]
        return forward, jax.grad(lambda h: jnp.sum(step * jax.grad(loss)(h)))(hidden)

    above, below = (
        dense((np.float64(hidden) + sign * 1e-5 * np.float64(step), kernel, targets, weights),
              **options)[1][0]
        for sign in (1, -1)
    )  # fmt: skip
    for product in products(hidden):
        assert_close(product, (above - below) / 2e-5, 1e-5)


def test_a_frozen_kernel_has_no_gradient_and_the_others_are_unchanged():
    sizes, shape, cotangent, chunk_size, options = ONE
    free, frozen = (
        program(sizes, chunk_size=chunk_size, **options, **more)(*arrays(*shape), cotangent)
        for more in ({}, {"frozen_kernel": True})
    )
    np.testing.assert_array_equal(free[1], frozen[1])
    np.testing.assert_array_equal(free[3][0], frozen[3][0])
    assert np.any(free[3][1])
    assert not np.any(frozen[3][1])


def test_only_the_products_and_logits_that_are_needed():
    """At most a chunk of logits, and no reduction per chunk."""
    chunk, vocab = 3, 30
    inputs = arrays(2, 24, vocab, jnp.bfloat16)

    def loss(hidden, kernel):
        return chunked_cross_entropy(
            hidden, kernel, *inputs[2:], mesh=make_mesh(seq=4), chunk_size=chunk, z_loss=0.1
        )[0]

    for function, products in ((loss, 1), (jax.grad(loss, (0, 1)), 3)):
        jaxpr = jax.make_jaxpr(function)(*inputs[:2]).jaxpr
        assert count(jaxpr, "dot_general") == products
        logits, sums = 0, []
        for equation, around in equations(jaxpr):
            if equation.primitive.name == "dot_general":
                # Factors in the activations' dtype, sums in float32.
                assert {x.aval.dtype for x in equation.invars} == {jnp.dtype(jnp.bfloat16)}
                assert equation.outvars[0].aval.dtype == jnp.float32
            if equation.primitive.name.startswith("psum"):
                sums.append("scan" in around)
            for var in equation.outvars:
                shape = getattr(var.aval, "shape", ())
                # Shapes of one device; (D, V) is the kernel or its gradient.
                if "shard_map" in around and shape[-1:] == (vocab,) and shape != (D, vocab):
                    logits = max(logits, int(np.prod(shape[:-1])))
        assert 0 < logits <= chunk
        assert sums
        assert not any(sums)
    # XLA eliminates unused products, also inside a loop's body.
    for wants in (0, 1):
        text = jax.jit(jax.grad(loss, wants)).lower(*inputs[:2]).compile().as_text()
        assert text is not None
        assert text.count(" dot(") == 2


def test_subchunks_hold_all_tokens_and_little_else():
    for tokens, chunk_size in ((1, 1), (7, 1), (1, 4096), (63, 11), (100, 7), (4097, 4096)):
        chunks, subchunks, size = fused_loss.chunk_sizes(tokens, chunk_size)
        assert subchunks * size <= chunk_size
        assert size <= max(1, chunk_size // 4)
        assert 0 <= chunks * subchunks * size - tokens < chunks * (subchunks + 1)


MISTAKES = {
    "chunk": ({"chunk_size": 0}, "chunk_size is 0: it must be an integer, at least 1"),
    "hidden": ({"hidden": jnp.zeros((8, D))}, r"hidden has shape \(8, 8\): it needs \[B, T, D\]"),
    "kernel": ({"kernel": jnp.zeros((30, D))}, r"kernel has shape \(30, 8\): .*needs \[8, V\]"),
    "targets": ({"targets": jnp.zeros((1, 5), int)}, r"targets has shape \(1, 5\): hidden's"),
    "targets-dtype": ({"targets": jnp.zeros((1, 8))}, "dtype float32: convert it to int32"),
    "weights-dtype": ({"weights": jnp.zeros((1, 8), jnp.int32)}, "int32: convert it to float"),
    "mesh": ({"mesh": None}, "mesh is None and no mesh is set: pass mesh=, or enter"),
    "z-loss": ({"z_loss": -0.1}, "z_loss is -0.1: it must be 0, which is none, or positive and"),
    "z-loss-nan": ({"z_loss": float("nan")}, "z_loss is nan: it must be 0"),
    "z-loss-bool": ({"z_loss": True}, "z_loss is True: it must be 0, which is none, or positive"),
    "cap": ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0: it must be positive and finite"),
    "cap-inf": ({"logits_soft_cap": float("inf")}, "logits_soft_cap is inf: it must be positive"),
}


def test_wrong_arguments_raise():
    names = "hidden", "kernel", "targets", "weights"
    given: Any = {**dict(zip(names, arrays(1, 8, 30), strict=True)), "mesh": make_mesh()}
    for change, message in MISTAKES.values():
        with pytest.raises(ValueError, match=message):
            chunked_cross_entropy(**given | change)
