"""Collapses long signatures, groups attention's arguments, and makes each error row searchable.

Links to source files work in a repository's file view. The built site has no source files, so there
such a link becomes the file's name.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

_SIGNATURE = re.compile(
    r'(<div class="[^"]*doc-signature[^"]*">(?:(?!</div>).)*</div>)'
    r'\s*(<div class="doc doc-contents[^"]*">)(\s*<p>.*?</p>)',
    re.DOTALL,
)
_TAGS = re.compile(r"<[^>]+>")
_LONG = 88  # a signature that fits on one line of this length stays where it is

# The first argument of each group of the functions of _ATTENTION.
GROUPS = {
    "query": "Inputs",
    "mesh": "Mesh and layout",
    "axis_name": "Mesh and layout",
    "query_offset": "Positions",
    "is_causal": "Masks and scores",
    "dropout_rate": "Dropout",
    "implementation": "Implementation and results",
}
_ATTENTION = (
    *("burst_attention", "ring_attention", "local_attention"),
    *("max_logits", "ring_max_logits"),
)


def collapse_signatures(text: str) -> str:
    """Puts the first paragraph before a long signature, which becomes a closed block."""

    def replace(match: re.Match[str]) -> str:
        signature, contents, summary = match.groups()
        plain = _TAGS.sub("", signature).strip()
        if len(plain) <= _LONG and "\n" not in plain:
            return match.group(0)
        closed = f'<details class="signature"><summary>Signature</summary>{signature}</details>'
        return f"{contents}{summary}\n{closed}"

    return _SIGNATURE.sub(replace, text)


def group_arguments(text: str) -> str:
    """Adds a heading before the first argument of each group of the functions of _ATTENTION."""
    for name in _ATTENTION:
        heading = f'id="burst_jax.{name}"'
        start = text.find(heading)
        if start < 0:
            continue
        end = text.find('<div class="doc doc-object', start)
        end = len(text) if end < 0 else end
        part = text[start:end]
        for argument, group in GROUPS.items():
            item = re.compile(
                r'(<li class="doc-section-item field-body">\s*<b>(?:<code>)?' + argument + r"\b)"
            )
            part = item.sub(rf'<li class="group">{group}</li>\1', part, count=1)
        text = text[:start] + part + text[end:]
    return text


_ROW = re.compile(r"<tr>\s*<td><code>(.*?)</code>.*?</td>\s*<td>(.*?)</td>\s*</tr>", re.DOTALL)
_errors: list[tuple[str, str]] = []  # message and remedy


def number_errors(text: str) -> str:
    """Gives each row of an error table an anchor, and keeps its text for the search index."""

    def replace(match: re.Match[str]) -> str:
        message, remedy = (html.unescape(_TAGS.sub("", part)) for part in match.groups())
        _errors.append((message, remedy))
        return match.group(0).replace("<tr>", f'<tr id="error-{len(_errors)}">', 1)

    _errors.clear()
    return _ROW.sub(replace, text)


_SOURCE_LINK = re.compile(r"\[(`[^`\]]+`)\]\(\.\./(?:burst_jax|pallas_kernels|examples)/[^)]+\)")


def on_page_markdown(text: str, **_: Any) -> str:
    """Called by mkdocs with the Markdown of each page."""
    return _SOURCE_LINK.sub(r"\1", text)


def on_page_content(text: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""
    if page.file.src_uri.startswith("api/") or page.file.src_uri == "contributing.md":
        text = group_arguments(collapse_signatures(text))
    if page.file.src_uri == "troubleshooting.md":
        text = number_errors(text)
    return text


def on_post_build(config: Any) -> None:
    """Called by mkdocs at the end: an entry of its own for each error message."""
    path = Path(config["site_dir"]) / "search" / "search_index.json"
    index = json.loads(path.read_text())
    index["docs"] += [
        {
            "location": f"troubleshooting.html#error-{number}",
            "title": message,
            "text": remedy,
            # Below pages whose titles have a term. By length, as a long message has some words of
            # any other one: a pasted message is first with all of its own.
            "boost": min(1.0, 8 / len(message.split())),
        }
        for number, (message, remedy) in enumerate(_errors, start=1)
    ]
    path.write_text(json.dumps(index, separators=(",", ":")))
