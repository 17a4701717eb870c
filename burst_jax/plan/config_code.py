"""Python code for a decoder's config."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import jax.numpy as jnp

import burst_jax.models
from burst_jax.models import DecoderConfig

_WIDTH = 96


def config_code(config: DecoderConfig) -> list[str]:
    """Lines that import what is needed and define ``config``, without its ``hf_config``."""
    types, arguments = {DecoderConfig}, []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "hf_config" or (value == field.default and field.name != "mlp_dim"):
            continue  # mlp_dim, of each expert, is printed in any case.
        if field.name in ("dtype", "param_dtype"):
            code = f"jnp.{jnp.dtype(value).name}"
        elif isinstance(value, type):
            types.add(value)
            code = value.__name__
        else:
            types |= _types(value)
            code = _code(value)
        arguments.append(f"{field.name}={code},")
    modules: dict[str, list[str]] = {}
    for each in sorted(types, key=lambda each: each.__name__):
        public = getattr(burst_jax.models, each.__name__, None) is each
        module = "burst_jax.models" if public else each.__module__
        modules.setdefault(module, []).append(each.__name__)
    imports = [f"from {module} import {', '.join(names)}" for module, names in modules.items()]
    body = textwrap.wrap(" ".join(arguments), _WIDTH, break_long_words=False)
    return [*imports, "config = DecoderConfig(", *(f"    {line}" for line in body), ")"]


def _code(value: Any) -> str:
    """A value as code; of a dataclass only the fields that differ from their defaults."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_code, value))}{',' * (len(value) == 1)})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    code = (f"{field.name}={_code(x)}" for field, x in given if x != field.default)
    return f"{type(value).__name__}({', '.join(code)})"


def _types(value: Any) -> set[type]:
    """The dataclasses of a value, and of what it holds."""
    if isinstance(value, tuple):
        return set().union(*map(_types, value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return set()
    held = (_types(getattr(value, field.name)) for field in dataclasses.fields(value))
    return {type(value)}.union(*held)
