"""``benchmarks loss``: float64 reference, and wrong results that are not timed."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest

from benchmarks import loss
from benchmarks.__main__ import main

SHAPE = loss.LossShape(48, 32, 96, kernel_dtype="float32")


def test_the_reference_is_the_formula(monkeypatch):
    monkeypatch.setattr(loss, "_ROWS", 20)  # The last block is smaller.
    rng = np.random.default_rng(0)
    hidden, kernel = rng.standard_normal((48, 8)), rng.standard_normal((8, 30))
    targets = rng.integers(0, 30, 48).astype(np.int32)
    hidden, kernel = (jnp.asarray(x, jnp.float32) for x in (hidden, kernel))
    got = loss.truth(hidden, kernel, jnp.asarray(targets))
    with jax.enable_x64(True):
        want, grads = jax.value_and_grad(
            lambda h, k: plain_model.cross_entropy(h @ k, targets, np.ones(48)), (0, 1)
        )(*(jnp.asarray(x, jnp.float64) for x in (hidden, kernel)))
    assert {x.dtype for x in got.values()} == {jnp.dtype("float64")}
    np.testing.assert_allclose(got["loss"], want, rtol=1e-13)
    for name, gradient in zip(("d_hidden", "d_kernel"), grads, strict=True):
        np.testing.assert_allclose(got[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_correct_losses_are_timed_and_saved(monkeypatch, tmp_path, capsys):
    def median_time(call):
        jax.block_until_ready(call())
        return 0.5

    monkeypatch.setattr(loss, "require_gpus", lambda *_: None)
    # One matmul per second.
    monkeypatch.setattr(loss, "matmul_ceiling", lambda _: 1e-12 * SHAPE.flops)
    monkeypatch.setattr(loss, "median_time", median_time)
    sizes = "--tokens 48 --features 32 --vocab 96 --kernel-dtype float32 --chunk-sizes 16 48"
    main(["loss", *sizes.split(), "--json", str(tmp_path / "a.json")])
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["tokens"], record["kernel_dtype"]) == (48, "float32")
    names = ["fused, chunks of 16", "fused, chunks of 48", "materialized logits"]
    assert [row["name"] for row in record["rows"]][:3] == names
    for row in record["rows"][:3]:
        assert not row["note"]
        assert row["value"] == row["both"] == 0.5
        assert 0 <= row["loss_error"] < 1e-3
        assert 0 < row["gradient_error"] < 1e-2
        assert row["gib"] > 0
    printed = capsys.readouterr().out
    assert "500.0 (200%)" in printed
    assert "500.0 (600%)" in printed


def unsupported(*_):
    raise NotImplementedError("no such GPU")


# The program of the value alone differs from that with the gradients.
value_alone = jax.custom_vjp(lambda *x: 1.1 * loss.materialized(*x))
value_alone.defvjp(lambda *x: jax.vjp(loss.materialized, *x), lambda vjp, d_loss: vjp(d_loss))
WRONG = {
    "wrong: loss error 1.0e-01, gradient error 1.": lambda *x: 1.1 * loss.materialized(*x),
    "wrong: loss error 1.0e-01; not timed": value_alone,
    "wrong: gradient error 1.0e+00": lambda h, *x: loss.materialized(jax.lax.stop_gradient(h), *x),
    "wrong: loss error inf, gradient error inf": lambda *x: loss.materialized(*x) * jnp.nan,
    "NotImplementedError: no such GPU": unsupported,
}


def test_wrong_losses_are_not_timed(monkeypatch):
    monkeypatch.setattr(loss, "median_time", pytest.fail)
    inputs = loss.LossInputs(SHAPE)
    for note, wrong in WRONG.items():
        row = loss.measure(inputs, "off", wrong)
        assert row["note"].startswith(note)
        assert row["both"] is row["value"] is None
        assert note in loss._line(row, 1.0)
        json.dumps(row, allow_nan=False)
