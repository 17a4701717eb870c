"""Turns the few reStructuredText marks of the docstrings into the Markdown of the pages."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:func|class|mod|meth|data|attr):`~?([\w.]+)`")
_MATH = re.compile(r"^( *)\.\. math:: (.*)$", re.MULTILINE)
_RULE = re.compile(r"^ *=+( =+)+ *$")
_SYMBOLS = {r"\cdot": "·"}


def to_markdown(text: str) -> str:
    """A docstring's text, its roles, formulas, literal blocks and simple tables as Markdown."""
    text = _ROLE.sub(_reference, text)
    text = _MATH.sub(_formula, text)
    lines, table = [], False
    for line in text.splitlines():
        rule = _RULE.match(line)
        if rule and not table:
            # A simple table is set in columns already: it is shown as it stands.
            table, first, rules = True, _indent(line), 0
            lines.append(f"{first}```text")
        if table:
            rules += bool(rule)
        elif line.strip() == "::":
            continue
        elif line.rstrip().endswith("::") and not line.lstrip().startswith(".."):
            line = line.rstrip()[:-1]
        lines.append(line)
        if table and rules == 2 and rule:
            table = False
            lines.append(f"{first}```")
    return "\n".join(lines)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


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


class MarkdownDocstrings(Extension):
    """Rewrites every docstring once it has been read."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
