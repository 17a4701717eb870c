"""The choice among implementations, and what each supports."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import warnings
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from meshes import mesh_of

import burst_jax
from burst_jax.ring import local as ring_local
from burst_jax.ring import vjp
from pallas_kernels import (
    MOSAIC_SM80,
    MOSAIC_SM90,
    REFERENCE,
    XLA,
    AttentionInputs,
    AttentionSpec,
    KVSide,
    Mask,
    QuerySide,
    Score,
    SlowerKernelsWarning,
    resolve,
    xla,
)
from pallas_kernels.device import Target
from pallas_kernels.mosaic.sm80 import implementation as sm80
from pallas_kernels.mosaic.sm90 import configs


def choose(
    implementation, capability: float | None = 8.0, platform="gpu", dim=64, dtype="bfloat16",
    value_dim=None, lengths=(8, 8), **options,
):  # fmt: skip
    q: Any = jax.ShapeDtypeStruct((1, lengths[0], 2, dim), dtype)
    k: Any = jax.ShapeDtypeStruct((1, lengths[1], 2, dim), dtype)
    v: Any = jax.ShapeDtypeStruct((1, lengths[1], 2, value_dim or dim), dtype)
    # As on a machine that has an A100: elsewhere Mosaic GPU compiles for Hopper.
    with mock.patch.object(sm80, "compiles_for", return_value=(8, 0)):
        return resolve(
            implementation, platform=platform, compute_capability=capability,
            inputs=AttentionInputs(QuerySide(q), KVSide(k, v)), **options,
        )  # fmt: skip


# With a score_mod: a derivative that may exceed 1, and one that is 1.
BENT, ADDED = (
    AttentionSpec(Mask(), Score(1.0, score_mod=function))
    for function in (lambda s, b, h, q, k: s * s, lambda s, b, h, q, k: s + 1.0)
)
OWN = dataclasses.replace(XLA, name="own")
SMALL = sm80.fitting_sm80(8.6)  # 99 KiB of shared memory
REPRODUCIBLE = MOSAIC_SM80.deterministic_variant
REPRODUCIBLE_SM90 = MOSAIC_SM90.deterministic_variant
assert REPRODUCIBLE is not None
assert REPRODUCIBLE_SM90 is not None


@pytest.mark.filterwarnings("ignore::pallas_kernels.SlowerKernelsWarning")
def test_resolve():
    for name, capability, options, chosen in (
        (None, None, {"platform": "cpu"}, XLA),
        (None, None, {"platform": "tpu"}, XLA),
        (None, 8.0, {}, MOSAIC_SM80),
        (None, 8.7, {"backward": True}, MOSAIC_SM80),
        (None, 8.6, {}, SMALL),
        (None, 8.9, {"backward": True, "dim": 192, "value_dim": 128}, SMALL),
        (None, 12.0, {"backward": True, "dim": 256}, XLA),
        ("mosaic_sm80", 8.9, {}, SMALL),
        (None, 9.0, {}, MOSAIC_SM90),
        (None, 9.0, {"dtype": "float16"}, MOSAIC_SM90),
        (None, 9.0, {"dim": 256}, MOSAIC_SM90),
        (None, 10.0, {}, MOSAIC_SM80),
        (None, 7.5, {}, XLA),
        (None, None, {}, XLA),
        (None, 8.0, {"dim": 512}, XLA),
        (None, 8.0, {"dtype": "float64"}, XLA),
        (None, 8.0, {"backward": True}, MOSAIC_SM80),
        (None, 8.0, {"backward": True, "dim": 192, "value_dim": 128}, MOSAIC_SM80),
        (None, 8.0, {"backward": True, "deterministic": True}, REPRODUCIBLE),
        ("mosaic_sm80", 8.0, {"backward": True, "deterministic": True}, REPRODUCIBLE),
        (None, 8.0, {"dtype": "float32"}, XLA),
        (None, 8.0, {"dim": 40}, MOSAIC_SM80),
        (None, 8.0, {"backward": True, "dim": 320}, XLA),
        (None, 9.0, {"backward": True, "dim": 128}, MOSAIC_SM90),
        (None, 9.0, {"dim": 40, "backward": True}, MOSAIC_SM90),
        (None, 9.0, {"lengths": (63, 65)}, MOSAIC_SM90),
        (None, 9.0, {"deterministic": True}, REPRODUCIBLE_SM90),
        (None, 9.0, {"backward": True, "deterministic": True}, REPRODUCIBLE_SM90),
        ("mosaic_sm90", 9.0, {"backward": True, "deterministic": True}, REPRODUCIBLE_SM90),
        (None, 9.0, {"backward": True, "deterministic": True, "spec": BENT}, REPRODUCIBLE),
        (None, 9.0, {"backward": True, "deterministic": True, "spec": ADDED}, REPRODUCIBLE_SM90),
        (None, 9.0, {"deterministic": True, "spec": BENT}, REPRODUCIBLE_SM90),
        (None, 9.0, {"backward": True, "spec": BENT}, MOSAIC_SM90),
        ("mosaic_sm90", 9.0, {"backward": True}, MOSAIC_SM90),
        ("mosaic_sm80", 8.0, {"backward": True}, MOSAIC_SM80),
        ("xla", 8.0, {"backward": True}, XLA),
        ("reference", None, {"platform": "cpu"}, REFERENCE),
        (OWN, None, {"platform": "cpu"}, OWN),
    ):
        assert choose(name, capability, **options) is chosen, (name, capability, options)


@pytest.mark.filterwarnings("ignore::pallas_kernels.SlowerKernelsWarning")
@pytest.mark.parametrize(
    ("name", "capability", "options", "message"),
    [
        (dataclasses.replace(XLA, backward=None), 8.0, {"backward": True},
         "'xla' .* no backward pass, and gradients are taken; use None, which"),
        ("mosaic_sm90", 9.0, {"dtype": "float32"}, "query is float32 .* bfloat16 or float16"),
        ("mosaic_sm90", 9.0, {"dim": 272}, "the head dim is 272; it supports 256 at most"),
        ("mosaic_sm90", 9.0, {"backward": True, "deterministic": True, "spec": BENT},
         "deterministic is True, and the derivative .* use None, which takes the fastest"),
        ("mosaic_sm90", None, {"platform": "cpu"}, r"9.0 \(Hopper\), the arrays are on 'cpu'; use"),
        ("mosaic_sm90", 8.0, {}, "on 'gpu' of compute capability 8.0; use None, which"),
        ("mosaic_sm90", 10.0, {}, "on 'gpu' of compute capability 10.0; use None, which"),
        ("mosaic_sm80", 7.5, {}, r"8.0 \(Ampere\) or newer, .* of compute capability 7.5; use"),
        ("mosaic_sm80", 8.6, {"dim": 192, "backward": True},
         r"values are \(192, 192\), for .* needs 115200 bytes .* per CTA; this GPU has 101376"),
        ("mosaic_sm80", 8.0, {"dtype": "float32"}, "query is float32 .* bfloat16 or float16"),
        ("mosaic_sm80", 8.0, {"dim": 272}, "head dim is 272; it supports 256 at most"),
        ("mosaic_sm80", 8.0, {"value_dim": 320}, "dim of values is 320; it supports 256 at most"),
    ],
)  # fmt: skip
def test_what_an_implementation_does_not_support(name, capability, options, message):
    with pytest.raises(NotImplementedError, match=f"cannot run: .*{message}|{message}"):
        choose(name, capability, **options)
    assert choose(None, capability, **options).name != name


@pytest.mark.parametrize("since", [(0,), (99,)], ids=["no-producer", "producer"])
def test_wide_heads_on_hopper(monkeypatch, since):
    """Also where no registers move. Wide values need wide keys, for the backward."""
    monkeypatch.setattr(configs, "EQUAL_REGISTERS_SINCE", since)
    wide: Any = [{"dim": 256}, {"dim": 192, "value_dim": 128}, {"dim": 144}]
    kernels = MOSAIC_SM90, REPRODUCIBLE_SM90
    for dims, deterministic in itertools.product(wide, (False, True)):
        chosen = choose(None, 9.0, backward=True, deterministic=deterministic, **dims)
        assert chosen is kernels[deterministic]
        assert choose(None, 9.0, **dims) is MOSAIC_SM90
    values: Any = {"dim": 64, "value_dim": 256, "backward": True}
    assert choose(None, 9.0, **values) is MOSAIC_SM80
    message = "values is 256 and that of keys 64; .* values above 128 if keys are, too"
    with pytest.raises(NotImplementedError, match=f"cannot run: the head .*{message}"):
        choose("mosaic_sm90", 9.0, **values)


def test_mosaic_kernels_for_an_a100_that_is_not_here_would_be_compiled_for_hopper():
    x: Any = jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16")
    where: Any = {"platform": "gpu", "compute_capability": 8.0}
    where["inputs"] = AttentionInputs(QuerySide(x), KVSide(x, x))
    reason = "the program is compiled for a GPU that this process does not have"
    with pytest.raises(NotImplementedError, match=reason):
        resolve("mosaic_sm80", **where)
    with pytest.warns(SlowerKernelsWarning, match=f"'xla' here, and not 'mosaic_sm80': {reason}"):
        assert resolve(None, **where) is XLA
    with warnings.catch_warnings(action="error"):
        resolve("xla", **where)


TABLE = np.ones((64, 64), np.float32)
CAPTURED = AttentionSpec(
    Mask(), Score(1.0, score_mod=lambda s, b, h, q, k: s + jnp.asarray(TABLE)[q, k])
)


@pytest.mark.parametrize(
    ("capability", "options", "message"),
    [
        (9.0, {"dtype": "float32"}, "'mosaic_sm90': query is float32 .*: cast query, key and val"),
        (
            8.0,
            {"dtype": "float32"},
            "'mosaic_sm80': query is float32 .* .a RoPE may return float32",
        ),
        (10.0, {"dim": 512}, "'mosaic_sm80': the head dim is 512; it supports 256 at most"),
        (9.0, {"dim": 512}, "'mosaic_sm90': the head dim is 512; it supports 256 at most"),
        (
            9.0,
            {"spec": CAPTURED},
            "'mosaic_sm90': score_mod does 'dynamic_slice', .*: write it by elem",
        ),
        (8.9, {"backward": True, "dim": 192}, "'mosaic_sm80': the head dims .* has 101376"),
    ],
    ids=["float32", "ampere", "blackwell", "dim", "captured", "backward"],
)
def test_xla_on_a_gpu_that_has_kernels_is_a_warning(capability, options, message):
    message = rf"^implementation=None takes 'xla' here, and not {message}.*\. XLA is many times"
    with pytest.warns(SlowerKernelsWarning, match=message) as found:
        assert choose(None, capability, **options) is XLA
    assert len(found) == 1
    with warnings.catch_warnings(action="error"):
        choose("xla", capability, **options)
        # No kernels are for these.
        choose(None, 7.5, **options)
        choose(None, None, platform="cpu", **options)
        if "backward" not in options:  # The forward pass has warned.
            choose(None, capability, backward=True, **options)


def test_the_warning_is_shown_once_for_a_line_of_the_caller():
    """Here a RoPE that returns float32, in a model of three layers."""
    device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    mesh = AbstractMesh((1,), ("seq",), abstract_device=device)

    def attention(x):
        rotated = x * jnp.cos(jnp.arange(128, dtype=jnp.float32))[:, None, None]
        return burst_jax.local_attention(rotated, rotated, x.astype(jnp.float32), is_causal=True)

    def loss(x):
        for _ in range(3):
            x = attention(x)
        return x.sum()

    with (
        jax.sharding.use_abstract_mesh(mesh),
        jax.numpy_dtype_promotion("standard"),
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("default")
        jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16))
    (shown,) = [each for each in found if each.category is SlowerKernelsWarning]
    first = attention.__code__.co_firstlineno
    assert (shown.filename, shown.lineno) == (__file__, first + 2)


def test_a_name_that_does_not_exist():
    for name in ("cuda", xla.forward):
        message = (
            f"implementation is {name!r}: use None, an Implementation, or one of 'mosaic_sm90'"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            choose(name)


@pytest.mark.filterwarnings("ignore::pallas_kernels.SlowerKernelsWarning")
def test_a_deterministic_gradient_runs_on_other_kernels(monkeypatch):
    monkeypatch.setattr(vjp, "current_target", lambda: Target("gpu", 9.0))
    chosen = {}

    def recorded(*args, backward, **options):
        chosen[backward] = resolve(*args, backward=backward, **options)
        return chosen[backward]

    monkeypatch.setattr(ring_local, "resolve", recorded)
    x = jnp.zeros((1, 256, 2, 64), jnp.bfloat16)

    def trace(**options):
        attention = functools.partial(burst_jax.burst_attention, mesh=mesh_of(seq=2))
        jax.make_jaxpr(jax.grad(lambda x: attention(x, x, x, **options).astype(float).sum()))(x)
        return chosen.pop(False), chosen.pop(True)

    forward, backward = trace(deterministic=True)
    assert forward is backward is REPRODUCIBLE_SM90
    assert trace(implementation="mosaic_sm90") == (MOSAIC_SM90, MOSAIC_SM90)
    unordered = dataclasses.replace(MOSAIC_SM90, deterministic_variant=None)
    message = (
        "'mosaic_sm90' cannot run: deterministic is True, .*: leave deterministic out; use None"
    )
    with pytest.raises(NotImplementedError, match=message):
        trace(implementation=unordered, deterministic=True)
