"""The choice among implementations, what each supports, and configs that check themselves."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxprs import equations
from meshes import mesh_of

import burst_jax
from burst_jax.parallel.target import Target
from burst_jax.ring import vjp
from pallas_kernels import (
    MOSAIC_SM80,
    MOSAIC_SM90,
    REFERENCE,
    TRITON,
    XLA,
    AttentionInputs,
    AttentionSpec,
    KVSide,
    QuerySide,
    SlowerKernelsWarning,
    Tiles,
    choice,
    resolve,
    triton,
    xla,
)
from pallas_kernels.mosaic.sm90.configs import MosaicConfig
from pallas_kernels.pallas_triton.configs import TritonConfig, triton_configs


def choose(
    implementation, capability: float | None = 8.0, platform="gpu", dim=64, dtype="bfloat16",
    value_dim=None, lengths=(8, 8), **options,
):  # fmt: skip
    q: Any = jax.ShapeDtypeStruct((1, lengths[0], 2, dim), dtype)
    k: Any = jax.ShapeDtypeStruct((1, lengths[1], 2, dim), dtype)
    v: Any = jax.ShapeDtypeStruct((1, lengths[1], 2, value_dim or dim), dtype)
    return resolve(
        implementation, platform=platform, compute_capability=capability,
        inputs=AttentionInputs(QuerySide(q), KVSide(k, v)), **options,
    )  # fmt: skip


INTERPRETED = triton(interpret=True)
# JAX 0.12.0.1 compiles Mosaic kernels without the registers they ask for.
ON_HOPPER = MOSAIC_SM90 if jax.__version_info__ < (0, 12) else TRITON


@pytest.mark.filterwarnings("ignore::pallas_kernels.SlowerKernelsWarning")
def test_resolve():
    for name, capability, options, chosen in (
        (None, None, {"platform": "cpu"}, XLA),
        (None, None, {"platform": "tpu"}, XLA),
        (None, 8.0, {}, TRITON),
        (None, 9.0, {}, ON_HOPPER),
        (None, 9.0, {"dtype": "float16"}, ON_HOPPER),
        (None, 9.0, {"dim": 256}, ON_HOPPER),
        (None, 10.0, {}, TRITON),
        (None, 7.5, {}, XLA),
        (None, None, {}, XLA),
        (None, 8.0, {"dim": 512}, XLA),
        (None, 8.0, {"dtype": "float64"}, XLA),
        (None, 8.0, {"backward": True}, TRITON),
        (None, 8.0, {"backward": True, "dim": 320}, XLA),
        (None, 9.0, {"backward": True, "dim": 128}, ON_HOPPER),
        (None, 9.0, {"backward": True, "dim": 256}, TRITON),
        (None, 9.0, {"deterministic": True}, ON_HOPPER),
        (None, 9.0, {"backward": True, "deterministic": True}, TRITON),
        ("triton", 9.0, {}, TRITON),
        ("mosaic_sm90", 9.0, {"backward": True}, MOSAIC_SM90),
        ("mosaic_sm80", 8.0, {"backward": True}, MOSAIC_SM80),
        ("xla", 8.0, {"backward": True}, XLA),
        ("triton", 8.0, {}, TRITON),
        ("reference", None, {"platform": "cpu"}, REFERENCE),
        (INTERPRETED, None, {"platform": "cpu"}, INTERPRETED),
    ):
        got = choose(name, capability, **options)
        # Triton's configs are the GPU's; everything else is one object.
        assert got.name == chosen.name, (name, capability, options)
        assert got is choose(name, capability, **options)
        assert (got is chosen) == (chosen is not TRITON)


@pytest.fixture(params=[(0, 11, 2), (0, 12, 0, 1)], ids=["jax0.11", "jax0.12"])
def jax_version(request, monkeypatch):
    version = ".".join(map(str, request.param))
    monkeypatch.setattr(choice.jax, "__version_info__", request.param)
    monkeypatch.setattr(choice.jax, "__version__", version)
    return request.param


def test_hopper_kernels_are_passed_over_with_one_warning(jax_version):
    if jax_version < (0, 12):
        with warnings.catch_warnings(action="error"):
            assert choose(None, 9.0) is MOSAIC_SM90
        return
    with pytest.warns(
        SlowerKernelsWarning,
        match=r"'triton' here, .* 'mosaic_sm90': JAX 0.12.0.1 .* spill registers; install "
        r"JAX 0.11.2 \(pip install 'burst-jax\[cuda13\]' does\); implementation='triton' ",
    ) as caught:
        assert choose(None, 9.0).name == "triton"
    assert len(caught) == 1
    # Once for a loop over layers or traces: Python shows an equal warning of one place once.
    with warnings.catch_warnings(record=True, action="default") as shown:
        for backward in (False, True, True):
            choose(None, 9.0, backward=backward)
    assert len(shown) == 1


def test_nothing_else_warns(jax_version):
    """Inputs that Hopper's kernels do not support, a choice by name, and other devices."""
    with warnings.catch_warnings(action="error"):
        assert choose(None, 9.0, dim=256, backward=True).name == "triton"
        assert choose(None, 9.0, dim=192, value_dim=128, backward=True).name == "triton"
        assert choose(None, 9.0, dtype="float32").name == "triton"
        assert choose(None, 9.0, dtype="float64") is XLA
        for name in ("triton", "mosaic_sm90", "xla"):
            assert choose(name, 9.0).name == name
        for platform, capability in (("gpu", 8.0), ("gpu", 10.0), ("gpu", None), ("cpu", None)):
            assert choose(None, capability, platform).name in ("triton", "xla")


@pytest.mark.filterwarnings("ignore::pallas_kernels.SlowerKernelsWarning")
@pytest.mark.parametrize(
    ("name", "capability", "options", "message"),
    [
        ("triton", None, {"platform": "cpu"}, "an NVIDIA GPU, .* are on 'cpu'; use None or 'xla'"),
        ("triton", 7.5, {}, r"8.0 \(Ampere\) or newer, this GPU has 7.5; use None or 'xla'"),
        (dataclasses.replace(XLA, backward=None), 8.0, {"backward": True},
         "'xla' .* no backward pass; use None or 'xla' where gradients"),
        ("triton", 8.0, {"dim": 320}, "the head dim is 320; it supports 256 at most"),
        ("triton", 8.0, {"dim": 192, "value_dim": 320}, "of values is 320; it supports 256"),
        ("triton", 8.0, {"dtype": "float64"}, "query is float64 .* bfloat16, float16 or float32"),
        ("mosaic_sm90", 9.0, {"dtype": "float32"}, "query is float32 .* bfloat16 or float16"),
        ("mosaic_sm90", 9.0, {"dim": 40}, "head dim is 40; .* multiples of 16 up to 256"),
        ("mosaic_sm90", 9.0, {"dim": 272}, "head dim is 272; .* 16 up to 256"),
        ("mosaic_sm90", 9.0, {"dim": 256, "backward": True}, "is 256; .* of 32 up to 128"),
        ("mosaic_sm90", 9.0, {"dim": 192, "value_dim": 128, "backward": True}, "head dim is 192"),
        ("mosaic_sm90", 9.0, {"dim": 128, "value_dim": 72}, "of values is 72; .* of 16 up to 256"),
        ("mosaic_sm90", 9.0, {"dim": 128, "value_dim": 96, "backward": True},
         "of values is 96, of keys 128; with that the backward supports multiples of 64"),
        ("mosaic_sm90", 9.0, {"lengths": (63, 64)}, "query length per device is 63; .* of 8"),
        ("mosaic_sm90", 9.0, {"lengths": (64, 60), "backward": True}, "key length .* is 60; .* 8"),
        ("mosaic_sm90", 9.0, {"backward": True, "deterministic": True},
         "deterministic is True, .* use None or 'triton', or leave"),
        ("mosaic_sm90", None, {"platform": "cpu"}, r"9.0 \(Hopper\), the arrays are on 'cpu'; use"),
        ("mosaic_sm90", 8.0, {}, "on 'gpu' of compute capability 8.0; use None, 'triton' or"),
        ("mosaic_sm90", 10.0, {}, "on 'gpu' of compute capability 10.0; use None, 'triton' or"),
    ],
)  # fmt: skip
def test_what_an_implementation_does_not_support(name, capability, options, message):
    with pytest.raises(NotImplementedError, match=f"cannot run: .*{message}|{message}"):
        choose(name, capability, **options)
    assert choose(None, capability, **options).name in ("triton", "xla")


@pytest.mark.parametrize("name", ["cuda", xla.forward], ids=["unknown", "function"])
def test_a_name_that_does_not_exist(name):
    with pytest.raises(
        ValueError,
        match=f"implementation is {re.escape(repr(name))}: use None, an Implementation, or one of "
        "'mosaic_sm90', 'triton', 'xla'",
    ):
        choose(name)


SPEC = AttentionSpec.of


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SPEC(float("nan")), "scale is nan: it must be a finite number"),
        (lambda: SPEC(float("inf")), "scale is inf: it must be a finite number"),
        (lambda: SPEC(1.0, left=-1), "window's left is -1: it must be from 0 to"),
        (lambda: SPEC(1.0, left=2**31), "window's left is 2147483648: .* or None"),
        (lambda: SPEC(1.0, right=-7), "window's right is -7: .* or None"),
        (lambda: SPEC(1.0, logits_soft_cap=0.0), "soft_cap is 0.0: .* positive"),
        (lambda: SPEC(1.0, logits_soft_cap=-2.0), "soft_cap is -2.0: .* positive"),
        (lambda: SPEC(1.0, logits_soft_cap=float("inf")), "soft_cap is inf: "),
        (lambda: Tiles(0, 8), "block_q is 0: it must be 1 or more"),
        (lambda: Tiles(8, -1), "block_kv is -1: it must be 1 or more"),
        (lambda: TritonConfig(24, 32, 4, 2), "block_q is 24: .* a power of two"),
        (lambda: TritonConfig(32, 8, 4, 2), "block_kv is 8: .* 16 or more"),
        (lambda: TritonConfig(32, 32, 3, 2), "num_warps is 3: use 1, 2, 4, 8 or 16"),
        (lambda: TritonConfig(32, 32, 4, 0), "num_stages is 0: it must be 1 or"),
        (lambda: MosaicConfig(128, 128, 1), "stages is 1: it must be 2 or more"),
        (lambda: MosaicConfig(32, 128, 2), "block_q is 32: it must be a multiple of 64"),
        (lambda: MosaicConfig(128, 100, 2), "block_kv is 100: it must be a multiple of 64"),
        (lambda: MosaicConfig(128, 128, 2, cluster=0), "cluster is 0: it must be 1 or 2"),
        (lambda: MosaicConfig(128, 128, 2, cluster=3), "cluster is 3: it must be 1 or 2"),
    ],
)
def test_configs_check_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configs_are_hashable_values():
    assert SPEC(1.0, left=3) == SPEC(1.0, left=3)
    assert len({SPEC(1.0), SPEC(1.0, right=0)}) == 2
    assert hash(Tiles(8, 16)) == hash(Tiles(8, 16))
    assert {XLA: 1}[XLA] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        # pyrefly: ignore[read-only]  that it is read-only is what is tested
        Tiles(8, 16).block_q = 4


# --- Triton's configs ----------------------------------------------------------------------------


def configs(capability=9.0, dim=128, dtype="bfloat16", length=4096, packed=False, **options):
    spec = SPEC(1.0, right=0, **options)
    return triton_configs(capability, dim, dtype, length, length, spec, packed)


def test_triton_configs_are_chosen_by_gpu_and_call():
    for capability, dtype in ((8.6, "bfloat16"), (10.0, "float16"), (12.1, "float32")):
        for dim in (32, 96, 256):  # A GPU without a table gets configs that fit all.
            assert configs(capability, dim, dtype) == configs(None, dim, dtype)
    assert len({configs(capability) for capability in (None, 8.0, 9.0)}) == 3
    assert configs() == configs(dtype="float16") != configs(dtype="float32")
    for capability in (8.0, 9.0):
        for takes_registers in ({"length": 4000}, {"packed": True}, {"logits_soft_cap": 30.0}):
            assert configs(capability, **takes_registers) != configs(capability)
        assert configs(capability, left=99) == configs(capability)


@pytest.mark.parametrize("capability", [None, 8.0, 9.0])
def test_narrower_values_leave_room_for_larger_tiles(capability):
    def of(dim, value_dim):
        size = 4096, 4096, SPEC(1.0, right=0), False
        return triton_configs(capability, dim, "bfloat16", *size, value_dim=value_dim)

    assert (of(192, 128) == of(192, 192)) == (capability is None)
    assert of(64, 256) == of(256, 256)  # Values that are wider than keys decide alone.
    assert of(64, 64) == configs(capability, 64)


def test_shared_memory_counts_the_looped_side_in_every_stage():
    config = TritonConfig(64, 128, num_warps=8, num_stages=3)
    kib = 1024
    assert config.shared_memory("forward", 128, 2) == (2 * 3 * 32 + 16) * kib
    assert config.shared_memory("dq", 128, 2) == (2 * 3 * 32 + 2 * 16) * kib
    assert config.shared_memory("dkv", 128, 2) == (2 * 3 * 16 + 2 * 32) * kib
    # A head dim of 96 is padded to 128 lanes; rows in registers take no shared memory.
    assert config.shared_memory("dq", 96, 2) == config.shared_memory("dq", 128, 2)
    assert config.shared_memory("forward", 192, 2, 128) == (3 * (64 + 32) + 32) * kib
    assert config.shared_memory("dq", 192, 2, 128) == (3 * (64 + 32) + 32 + 16) * kib
    assert config.shared_memory("dkv", 192, 2, 128) == (3 * (32 + 16) + 64 + 32) * kib
    kept = dataclasses.replace(config, rows_in_registers=True)
    assert kept.shared_memory("dq", 128, 2) == 2 * 3 * 32 * kib


# --- deterministic gradients ---------------------------------------------------------------------


def kernels_of_a_gradient(monkeypatch, **options):
    """Names of the backward kernels in a ring's program for H100s."""
    monkeypatch.setattr(vjp, "current_target", lambda: Target("gpu", 9.0))
    x = jnp.zeros((1, 256, 2, 64), jnp.bfloat16)

    def total(x):
        attention = functools.partial(burst_jax.burst_attention, mesh=mesh_of(seq=2))
        return attention(x, x, x, is_causal=True, **options).astype(jnp.float32).sum()

    found = equations(jax.make_jaxpr(jax.grad(total))(x).jaxpr)
    names = {str(equation.params.get("name")) for equation, _ in found}
    return names & {"burst_backward", "burst_dq", "burst_dkv"}


@pytest.mark.filterwarnings("ignore::pallas_kernels.SlowerKernelsWarning")
def test_a_deterministic_gradient_runs_on_other_kernels(monkeypatch):
    found = kernels_of_a_gradient(monkeypatch, implementation="mosaic_sm90")
    assert found == {"burst_backward"}
    found = kernels_of_a_gradient(monkeypatch, deterministic=True)
    assert found == {"burst_dq", "burst_dkv"}
    with pytest.raises(
        NotImplementedError, match="'mosaic_sm90' cannot run: deterministic is True"
    ):
        kernels_of_a_gradient(monkeypatch, implementation="mosaic_sm90", deterministic=True)


def test_the_deterministic_variant_of_a_named_implementation():
    for name, options in (("mosaic_sm80", {}), ("mosaic_sm80", {"backward": True})):
        assert not choose(name, 8.0, **options).deterministic
        assert choose(name, 8.0, deterministic=True, **options).deterministic


def test_the_option_of_layers_is_not_the_argument_of_their_calls():
    options: Any = {"deterministic": True, "dropout_rate": 0.1}
    for make in (
        lambda: burst_jax.BurstAttention(8, 2, rngs=nnx.Rngs(0), **options),
        lambda: burst_jax.LinenBurstAttention(2, **options).init(
            jax.random.key(0), jnp.zeros((1, 8, 8)), jnp.arange(8)
        ),
    ):
        with pytest.raises(
            ValueError, match=r"deterministic is True and dropout_rate 0.1: the opt"
        ):
            make()
