"""The public functions' signatures: shown in full, typed precisely, and matched by the options."""

from __future__ import annotations

import functools
import inspect
from typing import Any, assert_type, get_type_hints

import jax
import pytest
from meshes import make_mesh
from mistakes import B, H, K, N, T, zeros

from burst_jax import burst_attention, local_attention, merge, ring_attention
from burst_jax.attention.arguments import AttentionOptions, LocalOptions, RingOptions

OPTIONS = {
    burst_attention: AttentionOptions,
    ring_attention: RingOptions,
    local_attention: LocalOptions,
}


@pytest.mark.parametrize("function", OPTIONS, ids=lambda function: function.__name__)
def test_options_are_the_keywords(function):
    """Same names and types; their defaults are the functions' own, so each may be left out."""
    parameters = inspect.signature(function).parameters.values()
    keywords = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    hints = get_type_hints(function)
    wanted = {each.name: hints[each.name] for each in keywords if each.name != "return_residual"}
    assert len(wanted) >= 10
    assert get_type_hints(OPTIONS[function]) == wanted
    assert not OPTIONS[function].__required_keys__
    assert not any(each.default is inspect.Parameter.empty for each in keywords)


@pytest.mark.parametrize("function", OPTIONS, ids=lambda function: function.__name__)
def test_signatures_show_no_catch_alls(function):
    signature = inspect.signature(function)
    kinds = {each.kind for each in signature.parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert list(signature.parameters)[:3] == ["query", "key", "value"]


def test_burst_attention_returns_what_its_type_says():
    """pyrefly checks the types here; the shapes show that what is returned is what they say."""
    query, key, value = zeros(B, T, N, H), zeros(B, T, K, H), zeros(B, T, K, H)
    mesh = make_mesh(seq=1)

    def calls(query: jax.Array, key: jax.Array, value: jax.Array, either: bool = True) -> Any:
        out = burst_attention(query, key, value, mesh=mesh, is_causal=True)
        assert_type(out, jax.Array)
        assert_type(burst_attention(query, key, value, mesh=mesh, return_residual=False), jax.Array)
        both = burst_attention(query, key, value, mesh=mesh, return_residual=True)
        assert_type(both, tuple[jax.Array, jax.Array])
        some = burst_attention(query, key, value, mesh=mesh, return_residual=either)
        assert_type(some, jax.Array | tuple[jax.Array, jax.Array])
        options: AttentionOptions = {"mesh": mesh, "layout": "zigzag", "scale": 0.5}
        assert_type(burst_attention(query, key, value, **options), jax.Array)
        return out, both, some

    check_shapes(jax.eval_shape(calls, query, key, value))


def test_ring_attention_returns_what_its_type_says():
    query, key, value = zeros(B, T, N, H), zeros(B, T, K, H), zeros(B, T, K, H)

    @functools.partial(
        jax.shard_map,
        mesh=make_mesh(seq=1),
        in_specs=jax.P(None, "seq"),
        out_specs=jax.P(None, "seq"),
    )
    def calls(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        out = ring_attention(query, key, value, "seq", is_causal=True)
        assert_type(out, jax.Array)
        assert_type(ring_attention(query, key, value, "seq", return_residual=False), jax.Array)
        both = ring_attention(query, key, value, "seq", return_residual=True)
        assert_type(both, tuple[jax.Array, jax.Array])
        either: bool = out.ndim == 4
        some = ring_attention(query, key, value, "seq", return_residual=either)
        assert_type(some, jax.Array | tuple[jax.Array, jax.Array])
        options: RingOptions = {"layout": "zigzag", "scale": 0.5}
        assert_type(ring_attention(query, key, value, "seq", **options), jax.Array)
        return out, both, some

    check_shapes(jax.eval_shape(calls, query, key, value))


def test_local_attention_returns_what_its_type_says():
    query, key, value = zeros(B, T, N, H), zeros(B, T, K, H), zeros(B, T, K, H)

    def calls(query: jax.Array, key: jax.Array, value: jax.Array, either: bool = True) -> Any:
        out = local_attention(query, key, value, is_causal=True)
        assert_type(out, jax.Array)
        both = local_attention(query, key, value, return_residual=True)
        assert_type(both, tuple[jax.Array, jax.Array])
        some = local_attention(query, key, value, return_residual=either)
        assert_type(some, jax.Array | tuple[jax.Array, jax.Array])
        options: LocalOptions = {"is_causal": True, "scale": 0.5}
        assert_type(local_attention(query, key, value, **options), jax.Array)
        assert_type(merge(both, both), tuple[jax.Array, jax.Array])
        return out, merge(both, both), some

    check_shapes(jax.eval_shape(calls, query, key, value))


def check_shapes(results: Any) -> None:
    out, both, some = jax.tree.map(
        lambda x: x.shape, results, is_leaf=lambda x: hasattr(x, "shape")
    )
    assert out == (B, T, N, H)
    assert both == some == ((B, T, N, H), (B, T, N))
