"""The public functions' signatures: shown in full, typed precisely, and matched by the options."""

from __future__ import annotations

import inspect
from typing import Any, assert_type, get_type_hints

import jax
import pytest
from meshes import make_mesh
from mistakes import B, H, K, N, T, zeros

from burst_jax import (
    burst_attention,
    local_attention,
    max_logits,
    merge,
    ring_attention,
    ring_max_logits,
)
from burst_jax.attention.arguments import AttentionOptions, LocalOptions, RingOptions

OPTIONS = {
    burst_attention: AttentionOptions,
    ring_attention: RingOptions,
    local_attention: LocalOptions,
    max_logits: AttentionOptions,
    ring_max_logits: RingOptions,
}


@pytest.mark.parametrize("function", OPTIONS, ids=lambda function: function.__name__)
def test_options_are_the_keywords(function):
    """Same names and types; their defaults are the functions' own, so each may be left out."""
    parameters = inspect.signature(function).parameters
    kinds = {each.kind for each in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    third, own = ("lse", "rows") if "lse" in parameters else ("value", "return_residual")
    assert list(parameters)[:3] == ["query", "key", third]
    keywords = [each for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
    hints = get_type_hints(function)
    wanted = {each.name: hints[each.name] for each in keywords if each.name != own}
    assert len(wanted) >= 10
    assert get_type_hints(OPTIONS[function]) == wanted
    assert not OPTIONS[function].__required_keys__
    assert not any(each.default is inspect.Parameter.empty for each in keywords)
    # What the docstrings' "Args" sections have.
    assert all(f"\n      {name}: " in (function.__doc__ or "") for name in parameters)


Both = tuple[jax.Array, jax.Array]


def of_burst(query: jax.Array, key: jax.Array, value: jax.Array, either: bool = True) -> Any:
    mesh = make_mesh(seq=1)
    out = burst_attention(query, key, value, mesh=mesh, is_causal=True)
    assert_type(out, jax.Array)
    assert_type(burst_attention(query, key, value, mesh=mesh, return_residual=False), jax.Array)
    both = burst_attention(query, key, value, mesh=mesh, return_residual=True)
    assert_type(both, Both)
    some = burst_attention(query, key, value, mesh=mesh, return_residual=either)
    assert_type(some, jax.Array | Both)
    options: AttentionOptions = {"mesh": mesh, "layout": "zigzag", "scale": 0.5}
    assert_type(burst_attention(query, key, value, **options), jax.Array)
    return out, both, some


def of_ring(query: jax.Array, key: jax.Array, value: jax.Array, either: bool = True) -> Any:
    out = ring_attention(query, key, value, "seq", is_causal=True)
    assert_type(out, jax.Array)
    assert_type(ring_attention(query, key, value, "seq", return_residual=False), jax.Array)
    both = ring_attention(query, key, value, "seq", return_residual=True)
    assert_type(both, Both)
    some = ring_attention(query, key, value, "seq", return_residual=either)
    assert_type(some, jax.Array | Both)
    options: RingOptions = {"layout": "zigzag", "scale": 0.5}
    assert_type(ring_attention(query, key, value, "seq", **options), jax.Array)
    return out, both, some


def of_local(query: jax.Array, key: jax.Array, value: jax.Array, either: bool = True) -> Any:
    out = local_attention(query, key, value, is_causal=True)
    assert_type(out, jax.Array)
    both = local_attention(query, key, value, return_residual=True)
    assert_type(both, Both)
    some = local_attention(query, key, value, return_residual=either)
    assert_type(some, jax.Array | Both)
    options: LocalOptions = {"is_causal": True, "scale": 0.5}
    assert_type(local_attention(query, key, value, **options), jax.Array)
    assert_type(merge(both, both), Both)
    return out, merge(both, both), some


@pytest.mark.parametrize("calls", [of_burst, of_ring, of_local])
def test_functions_return_what_their_types_say(calls):
    """pyrefly checks the types; the shapes show that what is returned is what they say."""
    arrays = zeros(B, T, N, H), zeros(B, T, K, H), zeros(B, T, K, H)
    if calls is of_ring:
        spec = jax.P(None, "seq")
        calls = jax.shard_map(calls, mesh=make_mesh(seq=1), in_specs=spec, out_specs=spec)
    out, both, some = jax.tree.map(lambda x: x.shape, jax.eval_shape(calls, *arrays))
    assert out == (B, T, N, H)
    assert both == some == ((B, T, N, H), (B, T, N))
