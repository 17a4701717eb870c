"""The sandbox in which chat templates run: jinja2's, with what transformers gives to templates.

Importing this module needs jinja2.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Noncharacters of Unicode, which no text has: they mark where {% generation %} blocks start and end
# in what a template writes, also if a macro or a variable holds the block.
START, END = "\ufdd0", "\ufdd1"
MARKS = re.compile(f"[{START}{END}]")


class _Generation(jinja2.ext.Extension):
    """The blocks ``{% generation %}...{% endgeneration %}`` around what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{START}{caller()}{END}"


class _Namespace(jinja2.utils.Namespace):
    """Without attributes of Python's internals: the sandbox does not check their names here."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace may not have {name!r}, which starts with _")


class _Dict:
    """``dict`` without the attributes of Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def make_environment(now: datetime.datetime) -> jinja2.Environment:
    """A sandbox in which ``strftime_now`` formats ``now``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    given: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": now.strftime,
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    environment.globals.update(given)
    return environment
