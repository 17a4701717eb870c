"""Names all libraries that a script lacks at once: import it before the libraries.

Each script of this folder needs extras of burst-jax, some for an option only. Importing this module
ends a script that lacks any, its ``--help`` included, with the command that installs all of them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

LIBRARIES = {
    "data": ("grain", "tokenizers"),
    "chat": ("jinja2",),
    "models": ("safetensors",),
    "lora": ("qwix",),
    "tensorboard": ("tensorboardX",),
}
# The extras of each script, and the options that need them; None: always.
NEEDED: dict[str, dict[str, tuple[str, ...] | None]] = {
    "train_lm.py": {
        "data": None,
        "chat": ("--chat",),
        "models": ("--model",),
        "lora": ("--lora-rank",),
        "tensorboard": ("--tensorboard",),
    },
    "generate.py": {
        "data": None,
        "chat": ("--chat",),
        "models": None,
        "lora": ("--adapter",),
    },
    "perplexity.py": {"data": None, "models": None, "lora": ("--adapter",)},
}


def missing(program: str, arguments: Sequence[str]) -> str | None:
    """The message for a command line that lacks extras, or None."""
    given = {argument.partition("=")[0] for argument in arguments}
    lacking = {
        extra: [
            library for library in LIBRARIES[extra] if importlib.util.find_spec(library) is None
        ]
        for extra, options in NEEDED.get(program, {}).items()
        if options is None or given.intersection(options)
    }
    lacking = {extra: libraries for extra, libraries in lacking.items() if libraries}
    if not lacking:
        return None
    names = ", ".join(library for libraries in lacking.values() for library in libraries)
    return (
        f"{program}: error: it needs {names}, not installed here; in the checkout of burst-jax: "
        f"pip install '.[{','.join(lacking)}]'"
    )


if message := missing(Path(sys.argv[0]).name, sys.argv[1:]):
    print(message, file=sys.stderr)
    sys.exit(2)
