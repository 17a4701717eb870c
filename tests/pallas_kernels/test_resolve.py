"""The choice among implementations, and configs that check themselves."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxprs import equations
from meshes import mesh_of

import burst_jax
from burst_jax.parallel.platform import Target
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
    resolve,
    triton,
    xla,
)
from pallas_kernels import choice as local_attention_module
from pallas_kernels.pallas_triton.configs import TritonConfig

SPEC = AttentionSpec.of


def choose(
    implementation, platform="gpu", capability=8.0, dim=64, dtype="bfloat16", value_dim=None,
    **options,
):  # fmt: skip
    q: Any = jax.ShapeDtypeStruct((1, 8, 2, dim), dtype)
    v: Any = jax.ShapeDtypeStruct((1, 8, 2, dim if value_dim is None else value_dim), dtype)
    return resolve(
        implementation,
        platform=platform,
        compute_capability=capability,
        inputs=AttentionInputs(QuerySide(q), KVSide(q, v)),
        **options,
    )


MOSAIC = {"implementation": "mosaic_sm90", "capability": 9.0}
INTERPRETED = triton(interpret=True)
# JAX 0.12.0.1 compiles Mosaic kernels without the registers they ask for.
ON_HOPPER = MOSAIC_SM90 if jax.__version_info__ < (0, 12) else TRITON


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ({"implementation": None, "platform": "cpu", "capability": None}, XLA),
        ({"implementation": None, "platform": "tpu", "capability": None}, XLA),
        ({"implementation": None, "capability": 8.0}, MOSAIC_SM80),
        ({"implementation": None, "capability": 8.7, "dtype": "float16"}, MOSAIC_SM80),
        ({"implementation": None, "capability": 8.0, "dtype": "float32"}, TRITON),
        ({"implementation": None, "capability": 8.0, "dim": 40}, TRITON),
        # Their shared memory is smaller.
        ({"implementation": None, "capability": 8.6}, TRITON),
        ({"implementation": None, "capability": 8.9}, TRITON),
        ({"implementation": "mosaic_sm80", "capability": 8.0, "backward": True}, MOSAIC_SM80),
        ({"implementation": None, "capability": 9.0}, ON_HOPPER),
        ({"implementation": None, "capability": 9.0, "dtype": "float16"}, ON_HOPPER),
        ({"implementation": None, "capability": 9.0, "dim": 256}, ON_HOPPER),
        ({"implementation": None, "capability": 10.0}, TRITON),
        ({"implementation": None, "capability": 7.5}, XLA),
        ({"implementation": None, "capability": None}, XLA),
        ({"implementation": None, "dim": 512}, XLA),
        ({"implementation": None, "dtype": "float64"}, XLA),
        ({"implementation": None, "backward": True}, MOSAIC_SM80),
        ({"implementation": None, "backward": True, "deterministic": True}, TRITON),
        ({"implementation": None, "backward": True, "dim": 320}, XLA),
        ({"implementation": None, "capability": 9.0, "backward": True, "dim": 128}, ON_HOPPER),
        ({"implementation": None, "capability": 9.0, "backward": True, "dim": 256}, TRITON),
        ({"implementation": None, "capability": 9.0, "deterministic": True}, ON_HOPPER),
        (
            {"implementation": None, "capability": 9.0, "backward": True, "deterministic": True},
            TRITON,
        ),
        ({"implementation": "triton", "capability": 9.0}, TRITON),
        ({"implementation": "mosaic_sm90", "capability": 9.0, "backward": True}, MOSAIC_SM90),
        ({"implementation": "xla"}, XLA),
        ({"implementation": "xla", "backward": True}, XLA),
        ({"implementation": "triton"}, TRITON),
        ({"implementation": "reference", "platform": "cpu", "capability": None}, REFERENCE),
        ({"implementation": INTERPRETED, "platform": "cpu", "capability": None}, INTERPRETED),
    ],
    ids=lambda value: (
        "-".join(f"{k}_{getattr(v, 'name', v)}" for k, v in value.items())
        if isinstance(value, dict)
        else value.name
    ),
)
def test_resolve(arguments, chosen):
    got = choose(**arguments)
    # Triton's tiles are the GPU's; everything else is one object.
    assert got.name == chosen.name
    assert got is choose(**arguments)
    assert (got is chosen) == (chosen is not TRITON)


@pytest.fixture(params=[(0, 11, 2), (0, 12, 0, 1)], ids=["jax0.11", "jax0.12"])
def jax_version(request, monkeypatch):
    version = ".".join(map(str, request.param))
    monkeypatch.setattr(local_attention_module.jax, "__version_info__", request.param)
    monkeypatch.setattr(local_attention_module.jax, "__version__", version)
    return request.param


def test_hopper_kernels_are_passed_over_with_one_warning(jax_version):
    if jax_version < (0, 12):
        with warnings.catch_warnings(action="error"):
            assert choose(None, capability=9.0) is MOSAIC_SM90
        return
    with pytest.warns(
        SlowerKernelsWarning,
        match=r"takes 'triton' here, .* 'mosaic_sm90': JAX 0.12.0.1 .* spill registers; install "
        r"JAX 0.11.2 \(pip install 'burst-jax\[cuda13\]' does\); implementation='triton' takes",
    ) as caught:
        assert choose(None, capability=9.0).name == "triton"
    assert len(caught) == 1
    # A user's loop over layers or traces is told once: Python shows an equal warning of one place
    # once.
    with warnings.catch_warnings(record=True, action="default") as shown:
        for backward in (False, True, True):
            choose(None, capability=9.0, backward=backward)
    assert len(shown) == 1


def test_arrays_that_hopper_kernels_do_not_take_are_no_reason_to_warn(jax_version):
    """Float32, or the gradient of wide heads: no other choice would be faster."""
    with warnings.catch_warnings(action="error"):
        assert choose(None, capability=9.0, dim=256, backward=True).name == "triton"
        assert choose(None, capability=9.0, dim=192, value_dim=128, backward=True).name == "triton"
        assert choose(None, capability=9.0, dtype="float32").name == "triton"
        assert choose(None, capability=9.0, dtype="float64") is XLA


@pytest.mark.parametrize("implementation", ["triton", "mosaic_sm90", "xla"])
def test_a_choice_by_name_is_not_commented_on(jax_version, implementation):
    with warnings.catch_warnings(action="error"):
        assert choose(implementation, capability=9.0).name == implementation


@pytest.mark.parametrize(
    ("platform", "capability"), [("gpu", 8.0), ("gpu", 10.0), ("gpu", None), ("cpu", None)]
)
def test_other_devices_are_not_warned(jax_version, platform, capability):
    with warnings.catch_warnings(action="error"):
        assert choose(None, platform, capability).name in ("mosaic_sm80", "triton", "xla")


def test_triton_takes_the_tiles_of_the_gpu():
    q: Any = jax.ShapeDtypeStruct((1, 4096, 2, 128), "bfloat16")
    positions = jnp.arange(4096, dtype=jnp.int32)
    spec = AttentionSpec.of(1.0)

    def tables_of(capability):
        local = choose("triton", capability=capability)
        inputs = AttentionInputs(QuerySide(q, positions), KVSide(q, q, positions))
        return jax.eval_shape(lambda: local.backward_bounds(inputs, spec=spec))

    tables = {capability: tables_of(capability) for capability in (8.0, 9.0, 12.0)}
    shapes = {tuple(table.shape for table in pair) for pair in tables.values()}
    assert len(shapes) > 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"implementation": "triton", "platform": "cpu", "capability": None},
            NotImplementedError,
            "'triton' cannot run: it needs an NVIDIA GPU, .* are on 'cpu'; use None or 'xla'",
        ),
        (
            {"implementation": "triton", "capability": 7.5},
            NotImplementedError,
            r"'triton' .* capability 8.0 \(Ampere\) or newer, this GPU has 7.5; use None or 'xla'",
        ),
        (
            {"implementation": dataclasses.replace(XLA, backward=None), "backward": True},
            NotImplementedError,
            "'xla' .* no backward pass; use None or 'xla' where gradients are taken",
        ),
        (
            {"implementation": "triton", "dim": 192, "value_dim": 320},
            NotImplementedError,
            "'triton' .* the head dim of values is 320; it takes 256 at most",
        ),
        (
            MOSAIC | {"dim": 192, "value_dim": 128, "backward": True},
            NotImplementedError,
            "'mosaic_sm90' .* the head dim is 192; it takes multiples of 32 up to 128",
        ),
        (
            MOSAIC | {"dim": 128, "value_dim": 72},
            NotImplementedError,
            "'mosaic_sm90' .* head dim of values is 72; it takes multiples of 16 up to 256",
        ),
        (
            MOSAIC | {"dim": 128, "value_dim": 96, "backward": True},
            NotImplementedError,
            "head dim of values is 96, of keys 128; the backward takes multiples of 64 beside it",
        ),
        (
            {"implementation": "triton", "dim": 320},
            NotImplementedError,
            "'triton' .* the head dim is 320; it takes 256 at most",
        ),
        (
            {"implementation": "triton", "dtype": "float64"},
            NotImplementedError,
            "'triton' .* query is float64 .* takes bfloat16, float16 or float32",
        ),
        (
            MOSAIC | {"backward": True, "deterministic": True},
            NotImplementedError,
            "'mosaic_sm90' cannot run: deterministic is True, .* use None or 'triton', or leave",
        ),
        (
            {"implementation": "mosaic_sm90", "platform": "cpu", "capability": None},
            NotImplementedError,
            r"'mosaic_sm90' cannot run: it needs compute capability 9.0 \(Hopper\), the arrays are "
            "on 'cpu'; use None, 'triton' or 'xla'",
        ),
        (
            {"implementation": "mosaic_sm90", "capability": 8.0},
            NotImplementedError,
            r"'mosaic_sm90' .* on 'gpu' of compute capability 8.0; use None, 'triton' or 'xla'",
        ),
        (
            {"implementation": "mosaic_sm90", "capability": 10.0},
            NotImplementedError,
            r"'mosaic_sm90' .* on 'gpu' of compute capability 10.0; use None, 'triton' or 'xla'",
        ),
        (
            {"implementation": "mosaic_sm80", "capability": 8.6},
            NotImplementedError,
            r"'mosaic_sm80' .*8.0 or 8.7 \(A100, Orin\), .* of compute capability 8.6; use",
        ),
        (
            {"implementation": "mosaic_sm80", "dim": 72},
            NotImplementedError,
            "'mosaic_sm80' .* the head dim is 72; it supports multiples of 16 up to 256",
        ),
        (
            {"implementation": "mosaic_sm80", "dtype": "float32"},
            NotImplementedError,
            "'mosaic_sm80' .* query is float32 .* supports bfloat16 or float16",
        ),
        (
            {"implementation": "cuda"},
            ValueError,
            "implementation is 'cuda': use None, an Implementation, or one of 'mosaic_sm90', "
            "'mosaic_sm80', 'triton', 'xla'",
        ),
        (
            {"implementation": xla.forward},
            ValueError,
            "implementation is <function .*: use None, an Implementation, or one of 'mosaic_sm90'",
        ),
    ],
    ids=[
        "triton_cpu",
        "triton_turing",
        "no_backward",
        "triton_value_dim",
        "mosaic_sm90_backward_of_latent_attention",
        "mosaic_sm90_value_dim",
        "mosaic_sm90_backward_value_dim",
        "triton_head_dim",
        "triton_float64",
        "mosaic_sm90_deterministic",
        "mosaic_sm90_cpu",
        "mosaic_sm90_ampere",
        "mosaic_sm90_blackwell",
        "mosaic_sm80_ada",
        "mosaic_sm80_head_dim",
        "mosaic_sm80_float32",
        "unknown",
        "function",
    ],
)
def test_resolve_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        choose(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SPEC(scale=float("nan")), "scale is nan: it must be a finite number"),
        (lambda: SPEC(scale=float("inf")), "scale is inf: it must be a finite number"),
        (lambda: SPEC(scale=1.0, left=-1), "window's left is -1: it must be from 0 to"),
        (
            lambda: SPEC(scale=1.0, left=2**31),
            "window's left is 2147483648: .* or None",
        ),
        (lambda: SPEC(scale=1.0, right=-7), "window's right is -7: .* or None"),
        (lambda: SPEC(scale=1.0, logits_soft_cap=0.0), "soft_cap is 0.0: .* positive"),
        (
            lambda: SPEC(scale=1.0, logits_soft_cap=-2.0),
            "soft_cap is -2.0: .* positive",
        ),
        (lambda: SPEC(scale=1.0, logits_soft_cap=float("inf")), "soft_cap is inf: "),
        (lambda: Tiles(0, 8), "block_q is 0: it must be 1 or more"),
        (lambda: Tiles(8, -1), "block_kv is -1: it must be 1 or more"),
        (lambda: TritonConfig(24, 32, 4, 2), "block_q is 24: .* a power of two"),
        (lambda: TritonConfig(32, 8, 4, 2), "block_kv is 8: .* 16 or more"),
        (lambda: TritonConfig(32, 32, 3, 2), "num_warps is 3: use 1, 2, 4, 8 or 16"),
        (lambda: TritonConfig(32, 32, 4, 0), "num_stages is 0: it must be 1 or"),
    ],
    ids=[
        "scale_nan",
        "scale_inf",
        "left",
        "left_huge",
        "right",
        "cap_zero",
        "cap_negative",
        "cap_inf",
        "block_q",
        "block_kv",
        "triton_block_q",
        "triton_block_kv",
        "warps",
        "stages",
    ],
)
def test_configs_check_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configs_are_hashable_values():
    assert AttentionSpec.of(scale=1.0, left=3) == AttentionSpec.of(scale=1.0, left=3)
    assert len({AttentionSpec.of(scale=1.0), AttentionSpec.of(scale=1.0, right=0)}) == 2
    assert hash(Tiles(8, 16)) == hash(Tiles(8, 16))
    assert {XLA: 1}[XLA] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        # pyrefly: ignore[read-only]  that it is read-only is what is tested
        Tiles(8, 16).block_q = 4


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


def test_the_option_of_layers_is_not_the_argument_of_their_calls():
    options: Any = {"deterministic": True, "dropout_rate": 0.1}
    for make in (
        lambda: burst_jax.BurstAttention(8, 2, rngs=nnx.Rngs(0), **options),
        lambda: burst_jax.LinenBurstAttention(2, **options).init(
            jax.random.key(0), jnp.zeros((1, 8, 8)), jnp.arange(8)
        ),
    ):
        with pytest.raises(ValueError, match=r"deterministic is True and dropout_rate 0.1: as an"):
            make()
