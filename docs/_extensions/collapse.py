"""Shortens the API pages: collapses long signatures and groups the arguments of attention."""

from __future__ import annotations

import re
from typing import Any

_SIGNATURE = re.compile(
    r'(<div class="[^"]*doc-signature[^"]*">(?:(?!</div>).)*</div>)'
    r'\s*(<div class="doc doc-contents[^"]*">)(\s*<p>.*?</p>)',
    re.DOTALL,
)
_TAGS = re.compile(r"<[^>]+>")
_LONG = 88  # a signature that fits on one line of this length stays where it is

# The first argument of each group of burst_attention's, ring_attention's and local_attention's.
GROUPS = {
    "query": "Inputs",
    "mesh": "Mesh and layout",
    "axis_name": "Mesh and layout",
    "query_offset": "Positions",
    "is_causal": "Masks and scores",
    "dropout_rate": "Dropout",
    "implementation": "Implementation and results",
}
_ATTENTION = ("burst_attention", "ring_attention", "local_attention")


def collapse_signatures(html: str) -> str:
    """Puts the first paragraph before a long signature, which becomes a closed block."""

    def replace(match: re.Match[str]) -> str:
        signature, contents, summary = match.groups()
        text = _TAGS.sub("", signature).strip()
        if len(text) <= _LONG and "\n" not in text:
            return match.group(0)
        closed = f'<details class="signature"><summary>Signature</summary>{signature}</details>'
        return f"{contents}{summary}\n{closed}"

    return _SIGNATURE.sub(replace, html)


def group_arguments(html: str) -> str:
    """Adds a heading before the first argument of each group of the attention functions."""
    for name in _ATTENTION:
        heading = f'id="burst_jax.{name}"'
        start = html.find(heading)
        if start < 0:
            continue
        end = html.find('<div class="doc doc-object', start)
        end = len(html) if end < 0 else end
        part = html[start:end]
        for argument, group in GROUPS.items():
            item = re.compile(
                r'(<li class="doc-section-item field-body">\s*<b>(?:<code>)?' + argument + r"\b)"
            )
            part = item.sub(rf'<li class="group">{group}</li>\1', part, count=1)
        html = html[:start] + part + html[end:]
    return html


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""
    if page.file.src_uri.startswith("api/") or page.file.src_uri == "contributing.md":
        html = group_arguments(collapse_signatures(html))
    return html
