"""The comparisons of ``make gpu``: right answers pass, wrong ones do not."""

from __future__ import annotations

import dataclasses

import chunked_attention
import drawn_rings
import fine_tuning
import generation
import jax
import jax.numpy as jnp
import lowered_programs
import model_folder
import numpy as np
import pytest
import ring_draws
from llama_by_formula import LlamaByFormula

T, S, HEADS, KV_HEADS, DIM, VALUE_DIM = 300, 420, 4, 2, 64, 32
LENGTHS, WINDOW, CAP = (280, 400), (90, 30), 10.0


def given_of(dtype, sharpness=3.0):
    rng = np.random.default_rng(0)
    shapes = {
        "query": (T, HEADS, DIM), "key": (S, KV_HEADS, DIM), "value": (S, KV_HEADS, VALUE_DIM),
        "do": (T, HEADS, VALUE_DIM), "dlse": (T, HEADS), "sink_logits": (),
    }  # fmt: skip
    found = {name: rng.standard_normal((1, *shape)) for name, shape in shapes.items()}
    found["query"] *= sharpness
    found["sink_logits"] = rng.standard_normal(HEADS)
    kept = ("dlse", "sink_logits")
    return {k: x.astype(np.float32 if k in kept else jnp.dtype(dtype)) for k, x in found.items()}


def attention(given, dtype, low=True):
    """Float64 attention; ``low``: P, dS and the results are rounded, as fused attention does."""
    q, k, v, do = (given[n][0].astype(np.float64) for n in ("query", "key", "value", "do"))
    dlse, sinks = given["dlse"][0], given["sink_logits"].astype(np.float64)

    def rounded(x):
        return x.astype(jnp.dtype(dtype)).astype(np.float64) if low else x

    k, v = (np.repeat(x, HEADS // KV_HEADS, 1) for x in (k, v))
    logits = np.einsum("tnh,snh->nts", q, k) / np.sqrt(DIM)
    tanh = np.tanh(logits / CAP)
    at_q, at_k = np.arange(T)[:, None], np.arange(S)[None]
    keep = (at_q < LENGTHS[0]) & (at_k < LENGTHS[1])
    keep &= (at_k >= at_q - WINDOW[0]) & (at_k <= at_q + WINDOW[1])
    p = np.where(keep, np.exp(CAP * tanh), 0)
    lse = np.log(p.sum(-1) + np.exp(sinks)[:, None])
    p /= np.exp(lse)[..., None]
    out = rounded(np.einsum("nts,snh->tnh", rounded(p), v))
    delta = (do * out).sum(-1) - dlse
    ds = p * (np.einsum("tnh,snh->nts", do, v) - delta.T[..., None]) * (1 - tanh**2)
    ds = rounded(ds) / np.sqrt(DIM)

    def of_keys(x):
        return rounded(x.reshape(S, KV_HEADS, -1, x.shape[-1]).sum(2))

    found = {
        "out": out, "lse": lse.T, "dq": rounded(np.einsum("nts,snh->tnh", ds, k)),
        "dk": of_keys(np.einsum("nts,tnh->snh", ds, q)),
        "dv": of_keys(np.einsum("nts,tnh->snh", rounded(p), do)),
    }  # fmt: skip
    of_sinks = -(np.exp(sinks[:, None] - lse) * delta.T).sum(1)
    found = {name: x[None].astype(np.float32) for name, x in found.items()}
    return found | {"dsinks": of_sinks.astype(np.float32)}


def compared(given, got, dtype):
    masks = chunked_attention.Masks.of(T, S, lengths=LENGTHS, local_window_size=WINDOW)
    return chunked_attention.compare(given, got, [masks], dtype=dtype, cap=CAP)


def test_what_rounding_makes_of_exact_attention_is_what_is_allowed():
    """In both dtypes: neither more than one such error, nor so much that faults hide in it."""
    for dtype in ("bfloat16", "float16"):
        given = given_of(dtype)
        found = compared(given, attention(given, dtype), dtype)
        assert found.nonzero == 0
        # The standard deviation is 1 / RMS_FACTOR.
        assert (found.rms > 0.4).all(), found
        assert found.largest() < 0.9, found
        exact = compared(given, attention(given, dtype, low=False), dtype)
        assert exact.largest() < 0.1, exact


def test_wrong_answers_are_noticed():
    """A dropped tile, a wrong sum, one wrong token, and zeros."""
    given = given_of("bfloat16")
    right = attention(given, "bfloat16")
    assert compared(given, right, "bfloat16").largest() < 1

    def changed(name, change):
        x = right[name].copy()
        change(x)
        return right | {name: x}

    def from_other(**arrays):
        return attention(given | arrays, "bfloat16")

    def without(x, *at):
        x = x.copy()
        x[at] = 0
        return x

    wrong = {
        "lse to base 2": changed("lse", lambda x: x.__imul__(np.log2(np.e))),
        "query tile of 64": changed("dq", lambda x: x[:, 64:128].fill(0)),
        "one token of dk": changed("dk", lambda x: x[0, 77, 1].__imul__(1.2)),
        "one token of out": changed("out", lambda x: x[0, 100, 3].__imul__(0.95)),
        "two tokens exchanged": changed("dv", lambda x: x.__setitem__(
            (slice(None), [5, 6]), x[:, [6, 5]])),
        "padding is not zero": changed("out", lambda x: x[0, LENGTHS[0]].fill(1e-6)),
        "NaN": changed("dq", lambda x: x[0, 0, 0, :1].fill(np.nan)),
        "a sink": changed("dsinks", lambda x: x[:1].__imul__(1.1)),
        "16 keys' values": from_other(value=without(given["value"], 0, slice(160, 176))),
        "no dlse": from_other(dlse=without(given["dlse"], slice(None))),
        "other sinks": from_other(sink_logits=given["sink_logits"] + np.float32(0.1)),
        "2 % of the scale": from_other(
            query=(given["query"].astype(np.float32) * 1.02).astype(given["query"].dtype)
        ),
    }  # fmt: skip
    wrong |= {f"{name} is zero": changed(name, lambda x: x.fill(0)) for name in right}
    missed = [name for name, got in wrong.items() if compared(given, got, "bfloat16").largest() < 1]
    assert not missed


@pytest.mark.slow
def test_drawn_rings_on_two_devices():
    """Right, with sinks and padding, and the ring that ``--only`` repeats is the same one."""
    found = [ring_draws.draw_ring("xla", i, 2, (96, 160)) for i in range(4, 7)]
    assert found[0].layout == "balanced"
    found[0] = dataclasses.replace(found[0], sinks=True, mask="padded_documents")
    for ring in found:
        assert drawn_rings.check(ring) <= 1, ring
    assert ring_draws.draw_ring("xla", 6, 2, (96, 160)) == found[2]


@pytest.mark.slow
def test_drawn_rings_in_stripes_on_two_devices():
    found = [ring_draws.draw_ring("xla", i, 2, (128, 256)) for i in (7, 8)]
    assert [ring.layout for ring in found] == ["striped", "striped:128"]
    for ring in found:
        assert drawn_rings.check(ring) <= 1, ring


@pytest.mark.parametrize(
    ("gpu", "family", "index"), [("h100", "mosaic_sm90", 4), ("a100", "mosaic_sm80", 7)]
)
def test_drawn_rings_lower_for_a_gpu(gpu, family, index):
    """Documents in the balanced layout, and stripes with attention in chunks."""
    ring = ring_draws.draw_ring(family, index, 2)
    mesh = lowered_programs.abstract_mesh(gpu, ring.axes)
    with lowered_programs.compiling_for(gpu), jax.sharding.use_abstract_mesh(mesh):
        assert "mosaic_gpu" in drawn_rings.lower(ring, mesh).as_text(), ring


# --- models --------------------------------------------------------------------------------------


@pytest.fixture
def formulas(monkeypatch):
    """NumPy's Llama takes the place of transformers."""
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(generation, "Peer", LlamaByFormula)
    monkeypatch.setattr(fine_tuning, "Peer", LlamaByFormula)


@pytest.mark.slow
def test_generation(formulas, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)  # A ring of so many steps to compile.
    assert generation.main(["--small", "--out", str(tmp_path)]) == 0
    assert '"equal tokens": 16' in capsys.readouterr().out
    # Against a peer whose third token is another one; nothing is generated again.
    greedy, found = LlamaByFormula.greedy, []

    def other(self, ids, count):
        tokens, lead = greedy(self, ids, count)
        found.append(tokens)
        return tokens + (np.arange(count) == 2), lead

    monkeypatch.setattr(LlamaByFormula, "greedy", other)
    monkeypatch.setattr(generation, "generated", lambda *_: np.stack(found[-2:]))
    with pytest.raises(AssertionError, match="sequence 0: float32 token 2 is"):
        generation.main(["--small", "--out", str(tmp_path / "again")])


@pytest.mark.slow
def test_logits_of_an_export(formulas, tmp_path, monkeypatch):
    folder = model_folder.write_model(tmp_path / "model", model_folder.SMALL)
    ids = np.random.default_rng(0).integers(3, model_folder.VOCABULARY, 128)
    found = fine_tuning.check_logits(folder, ids)
    assert 0 < found["float32 logits"] < 1e-5
    # A peer whose last layer has another norm.
    truth = LlamaByFormula.logits
    monkeypatch.setattr(LlamaByFormula, "logits", lambda self, ids: truth(self, ids) * 1.001)
    with pytest.raises(AssertionError, match=r"float32 logits differ by 1\.0e-03"):
        fine_tuning.check_logits(folder, ids)
