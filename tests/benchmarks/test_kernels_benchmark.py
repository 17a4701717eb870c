"""``benchmarks kernels``: FLOPs, float64 reference, wrong results, and the saved table."""

from __future__ import annotations

from types import SimpleNamespace

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernels, truth
from benchmarks.__main__ import main
from benchmarks.kernel_cases import CASES, Case
from benchmarks.results import Results, Row
from pallas_kernels import AttentionSpec

SMALL = Case("small", 2, 128, 4, 2, 16, is_causal=True)
FULL = Case("full", 1, 128, 4, 4, 16)
WINDOW = Case("window", 1, 128, 4, 2, 16, is_causal=True, window=20)
PACKED = Case("packed", 1, 128, 4, 2, 16, is_causal=True, documents=3, sinks=True, slopes=True)


def unmasked(case):
    ids = case.segment_ids()
    window = case.options["local_window_size"]
    masks = {"is_causal": case.is_causal, "local_window_size": window}
    masks |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    return dense.kept(case.length, case.length, **masks)[0, 0]


def test_scores_are_the_unmasked_ones():
    """Causal masks count as half, without half of the diagonal, as is usual."""
    for case in (SMALL, PACKED, WINDOW, FULL):
        diagonal = case.length / 2 if case.is_causal and case.window is None else 0
        assert case.scores() == unmasked(case).sum() - diagonal, case.name


def test_per_head_parameters():
    """ALiBi slopes are 2^-8/N, 2^-16/N, ... 2^-8."""
    parameters = PACKED.per_head()
    np.testing.assert_allclose(parameters["alibi_slopes"], [2**-2, 2**-4, 2**-6, 2**-8])
    assert parameters["sink_logits"].shape == (4,)
    assert FULL.per_head() == {}


@pytest.mark.parametrize("case", [FULL, WINDOW, PACKED], ids=lambda case: case.name)
def test_the_reference_is_dense_attention(case, monkeypatch):
    monkeypatch.setattr(truth, "_ROWS", 32)
    rng, groups = np.random.default_rng(0), 2
    q, do = rng.normal(size=(2, case.length, groups, case.head_dim)).astype(np.float32)
    k, v = rng.normal(size=(2, case.length, case.head_dim)).astype(np.float32)
    left, right = case.options["local_window_size"] or (None, None)
    spec = AttentionSpec.of(case.head_dim**-0.5, left, 0 if case.is_causal else right)
    ids = case.segment_ids()
    tokens = jnp.arange(case.length, dtype=jnp.int32), None if ids is None else ids[:1]
    parameters = {name: x[:groups] for name, x in case.per_head().items()}
    got = truth.attention_and_gradients(spec, *tokens, q, k, v, do, parameters)
    dlse = np.zeros((1, case.length, groups), np.float32)
    keep = unmasked(case)[None, None]
    args = q[None], k[None, :, None], v[None, :, None], keep, do[None], dlse, None
    distance = np.abs(np.subtract.outer(np.arange(case.length), np.arange(case.length)))
    numpy_parameters = {name: np.asarray(x) for name, x in parameters.items()}
    out, _, dq, dk, dv, *_ = dense.truth(*args, numpy_parameters, distance)
    for name, want in (("out", out[0]), ("dq", dq[0]), ("dk", dk[0, :, 0]), ("dv", dv[0, :, 0])):
        assert got[name].dtype == np.float64
        np.testing.assert_allclose(got[name], want, rtol=1e-10, atol=1e-12)


def test_the_reference_needs_whole_blocks():
    x = jnp.zeros((1500, 1, 16))
    at = jnp.arange(1500, dtype=jnp.int32)
    with pytest.raises(ValueError, match="the length is 1500: it must be a multiple of 1024"):
        truth.attention_and_gradients(AttentionSpec.of(1.0), at, None, x, x[:, 0], x[:, 0], x)


@pytest.fixture(scope="module")
def inputs():
    return kernels.KernelInputs(SMALL, jnp.dtype("bfloat16"))


def test_correct_results_are_timed(inputs, monkeypatch):
    times, results = iter((0.25, 0.5)), []

    def median_time(call):
        results.append(call())
        return next(times)

    monkeypatch.setattr(kernels, "median_time", median_time)
    row = kernels.measure(inputs, "xla", lambda _: kernels.ours(SMALL, "xla"), 1.2e-2)
    assert not row.note
    assert 0 < row.error < 1e-2
    # Two matmuls forward, five backward, of 2 H FLOPs per score.
    product = 2 * SMALL.batch * SMALL.heads * SMALL.head_dim * SMALL.scores()
    assert row.forward == pytest.approx(2 * product / 0.25 * 1e-12)
    assert row.both == pytest.approx(7 * product / 0.5 * 1e-12)
    # Each result has its own error, over the first and the last key head.
    right = dict(zip(("out", "dq", "dk", "dv"), map(np.array, results[1]), strict=True))
    for name, x in right.items():
        for heads in (slice(1), slice(-1, None)):
            wrong = x.copy()
            wrong[-1 if heads.stop is None else 0, :, heads] *= 1.1
            errors = inputs.errors(**right | {name: wrong})
            assert [key for key, error in errors.items() if error > 1e-2] == [name]


def test_wrong_results_are_not_timed(inputs, monkeypatch):
    """The program of the forward pass alone differs from that with the gradients."""
    monkeypatch.setattr(kernels, "median_time", pytest.fail)
    right = kernels.ours(SMALL, "xla")

    def wrong(q, k, v):
        return right(q, k, 1.1 * v - 0.1 * jax.lax.stop_gradient(v))

    def wrong_alone(differentiated):
        return right if differentiated else lambda *x: 1.1 * right(*x)

    for make, name in ((lambda _: wrong, "dv"), (wrong_alone, "out")):
        row = kernels.measure(inputs, "off", make, 1.2e-2)
        assert row.note == f"wrong: {name}; not timed"
        assert np.isnan(row.forward)


def test_unsupported_cases_are_notes(inputs):
    row = kernels.measure(inputs, "cuDNN", lambda _: kernels.cudnn(PACKED), 1.2e-2)
    assert row.note == "NotImplementedError: no segment ids"
    assert "NotImplementedError" in kernels._line(row, 1.0)
    with pytest.raises(NotImplementedError, match="no windows, no grouped heads"):
        kernels.pallas_example(WINDOW, False)


def test_unmasked_bounds_have_the_same_tiles():
    table = jnp.asarray([[[0, 2, 5, 6], [3, 3, 3, 9], [0, 0, 0, 0]]], jnp.int32)
    np.testing.assert_array_equal(
        kernels._unmasked(table), [[[0, 0, 6, 6], [3, 3, 9, 9], [0, 0, 0, 0]]]
    )


# --- the command, with faked measurements --------------------------------------------------------


@pytest.fixture
def on_hopper(monkeypatch):
    """All implementations have 400 TFLOP/s; mosaic_sm90 does not support the third case."""
    timed = []

    def measure(inputs, peer, make, limit):
        if inputs.case is CASES[2] and peer == "mosaic_sm90":
            return Row(inputs.case.name, peer, note="NotImplementedError: no")
        return Row(inputs.case.name, peer, 400.0, 300.0, 1e-3)

    def local_times(inputs, name):
        timed.append((inputs.case.name, name))
        times = {"forward": 1.0, "carried": 1.1, "backward": 3.0}
        return times | {"forward, unmasked": 0.8, "backward, unmasked": 2.0}

    fakes = {
        "measure": measure, "local_times": local_times,
        "KernelInputs": lambda case, dtype: SimpleNamespace(case=case),
        "matmul_ceiling": lambda dtype: 685.0, "compute_capability": lambda: 9.0,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(kernels, name, fake)
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: "gpu")
    return timed


def test_results_are_saved_and_drawn(on_hopper, tmp_path, capsys):
    files = ["--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")]
    main(["kernels", "--cases", "0", "2", "6", *files])
    rows = Results.load(tmp_path / "a.json").rows
    names = ["cuDNN", "Pallas example", "mosaic_sm90", "mosaic_sm80"]
    full, causal, window = "full", "causal, 32/8 heads", "window 4096 of 64K, 32/8 heads"
    measured = [(row.case, row.peer) for row in rows]
    assert measured == [(case, name) for case in (full, causal, window) for name in names]
    # The kernels alone are not timed for an unsupported case.
    timed = [(case, name) for case in (full, causal, window) for name in names[2:]]
    assert on_hopper == [each for each in timed if each != (causal, "mosaic_sm90")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]
    printed = capsys.readouterr().out
    assert "a large matmul: 685 TFLOP/s" in printed
    assert "400 ( 58 %)" in printed
    assert "mosaic_sm80: with the carry 1.100 times as long" in printed
    assert "mosaic_sm80: forward 1.250 times the same tiles unmasked" in printed
    assert "mosaic_sm80: backward 1.500 times the same tiles unmasked" in printed


def test_finished_cases_survive_an_interrupt(on_hopper, tmp_path, monkeypatch):
    measure = kernels.measure

    def interrupted(inputs, *rest):
        if inputs.case is CASES[2]:
            raise KeyboardInterrupt
        return measure(inputs, *rest)

    monkeypatch.setattr(kernels, "measure", interrupted)
    options = ["--cases", "0", "2", "--implementations", "mosaic_sm80"]
    with pytest.raises(KeyboardInterrupt):
        main(["kernels", *options, "--json", str(tmp_path / "a.json")])
    rows = Results.load(tmp_path / "a.json").rows
    assert [(row.case, row.peer) for row in rows] == [
        ("full", peer) for peer in ("cuDNN", "Pallas example", "mosaic_sm80")
    ]
