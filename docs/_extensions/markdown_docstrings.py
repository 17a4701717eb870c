"""Turns the few reStructuredText marks of the docstrings into the Markdown of the pages.

Signature and "Args" of the attention functions are derived when they are imported
(``burst_jax/attention/arguments.py``), so these are taken from the imported functions.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from griffe import Extension, Function, Object, Parameter, ParameterKind, Parameters

import burst_jax

_DERIVED = {
    f"{function.__module__}.{function.__name__}": function
    for function in (
        *(burst_jax.burst_attention, burst_jax.ring_attention, burst_jax.local_attention),
        *(burst_jax.max_logits, burst_jax.ring_max_logits),
    )
}
_KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: ParameterKind.keyword_only,
}

_ROLE = re.compile(r":(?:func|class|mod|meth|data|attr):`~?([\w.]+)`")
_MATH = re.compile(r"^( *)\.\. math::\s+(.*)$", re.MULTILINE)
_RETURNS = re.compile(r"^( *Returns:\n[^\n:]*):(?= |$)", re.MULTILINE)
_RULE = re.compile(r" *=+( +=+)+ *")
_SYMBOLS = {r"\cdot": "·"}


def to_markdown(text: str) -> str:
    """A docstring's text, its roles, formulas, literal blocks and simple tables as Markdown."""
    text = _ROLE.sub(_reference, text)
    text = _MATH.sub(_formula, text)
    # Griffe would take what comes before a colon for the type of what is returned.
    text = _RETURNS.sub(r"\1 -", text)
    lines: list[str] = []
    rule, rows = "", None
    for line in text.splitlines():
        if _RULE.fullmatch(line):
            if rows is None:
                rule, rows = line, []
            else:
                lines += _table(rule, rows)
                rows = None
        elif rows is not None:
            rows.append(line)
        elif line.strip() != "::":
            # A literal block is indented already, which is all that Markdown asks for.
            lines.append(re.sub(r"::\s*$", ":", line))
    if rows is not None:
        raise ValueError(f"a table has no end, or a header, which is not handled here: {rows}")
    return "\n".join(lines)


def _table(rule: str, rows: list[str]) -> list[str]:
    """A simple table without a header; a line whose first cell is empty continues a row."""
    starts = [match.start() for match in re.finditer("=+", rule)]
    ends = [*starts[1:], None]
    cells: list[list[str]] = []
    for row in rows:
        parts = [row[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        if parts[0] or not cells:
            cells.append(parts)
        else:
            cells[-1] = [" ".join(pair).strip() for pair in zip(cells[-1], parts, strict=True)]
    indent = " " * starts[0]
    table = [[""] * len(starts), ["---"] * len(starts), *cells]
    return [f"{indent}| {' | '.join(row)} |" for row in table]


def _reference(match: re.Match[str]) -> str:
    """A link where the name has a place in these pages, plain code where it has none."""
    name = match.group(1)
    full = name if name.startswith(("burst_jax", "pallas_kernels")) else f"burst_jax.{name}"
    short = name.removeprefix("burst_jax.")
    return f'<autoref optional identifier="{full}"><code>{short}</code></autoref>'


def _formula(match: re.Match[str]) -> str:
    indent, formula = match.groups()
    for mark, symbol in _SYMBOLS.items():
        formula = formula.replace(mark, symbol)
    return f"{indent}```text\n{indent}{formula}\n{indent}```"


def _parameters(function: Any) -> Parameters:
    """The parameters of an imported function, as griffe represents those that it reads."""
    return Parameters(
        *(
            Parameter(
                name,
                annotation=inspect.formatannotation(given.annotation).replace("jax._src.mesh.", ""),
                kind=_KINDS[given.kind],
                default=None if given.default is given.empty else repr(given.default),
            )
            for name, given in inspect.signature(function).parameters.items()
        )
    )


class MarkdownDocstrings(Extension):
    """Rewrites every docstring once it has been read."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.path in _DERIVED and isinstance(obj, Function) and obj.docstring is not None:
            obj.parameters = _parameters(_DERIVED[obj.path])
            obj.docstring.value = inspect.getdoc(_DERIVED[obj.path]) or ""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
