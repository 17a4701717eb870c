"""``bench loss``: what it calls right is right, and what is wrong is not timed."""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest

from benchmarks import loss

SIZES = loss.Sizes(48, 32, 96)


@pytest.fixture(scope="module")
def problem():
    return loss.Problem(SIZES)


def test_truth_is_the_plain_formula(monkeypatch):
    monkeypatch.setattr(loss, "_ROWS", 20)  # The last rows are fewer.
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


def arguments(**change):
    given = {
        "tokens": SIZES.tokens, "features": SIZES.features, "vocab": SIZES.vocab,
        "dtype": "bfloat16", "kernel_dtype": "float32", "chunk_sizes": [16, 48], "json": None,
    }  # fmt: skip
    return argparse.Namespace(**given | change)


def test_what_is_right_is_timed_and_kept(monkeypatch, tmp_path, capsys):
    def median_time(call):
        jax.block_until_ready(call())
        return 0.5

    monkeypatch.setattr(loss, "need_gpus", lambda *_: None)
    monkeypatch.setattr(loss, "matmul_ceiling", lambda _: 1e-12 * SIZES.flops)  # One a second.
    monkeypatch.setattr(loss, "median_time", median_time)
    loss.run(arguments(json=tmp_path / "a.json"))
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["tokens"], record["kernel_dtype"]) == (48, "float32")
    names = ["fused, chunks of 16", "fused, chunks of 48", "materialised logits"]
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


@pytest.mark.parametrize(
    ("wrong", "note"),
    [
        (lambda h, k, t: 1.1 * loss.materialised(h, k, t), "loss error 1.0e-01, gradient error 1."),
        (
            lambda h, k, t: loss.materialised(jax.lax.stop_gradient(h), k, t),
            "gradient error 1.0e+00",
        ),
        (
            lambda h, k, t: loss.materialised(h, k, t) * jnp.nan,
            "loss error inf, gradient error inf",
        ),
    ],
    ids=["all", "hidden", "nan"],
)
def test_what_is_wrong_is_not_timed(wrong, note, problem, monkeypatch):
    monkeypatch.setattr(loss, "median_time", pytest.fail)
    row = loss.measure(problem, "off", wrong)
    assert row["note"].startswith(f"wrong: {note}")
    assert row["both"] is row["value"] is None
    assert "wrong" in loss._line(row, 1.0)
    json.dumps(row, allow_nan=False)


def test_what_a_peer_cannot_do_is_a_line_of_the_table(problem):
    def refuse(hidden, kernel, targets):
        raise NotImplementedError("no such GPU")

    row = loss.measure(problem, "off", refuse)
    assert row["note"] == "NotImplementedError: no such GPU"


def test_it_needs_a_gpu():
    with pytest.raises(SystemExit, match="bench loss needs an NVIDIA GPU; JAX runs on 'cpu' here"):
        loss.run(arguments())
