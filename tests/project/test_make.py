"""``make`` finds a Python."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIND = ROOT / ".ci" / "find-python"
BASH = shutil.which("bash")
PYTHON = shlex.quote(sys.executable)
# What a Python runs in front of the command that it is given.
GOOD = f'exec {PYTHON} "$@"'
OLD = f'exec {PYTHON} -c "import sys; sys.version_info = (3, 11, 9); exec(sys.argv[1])" "$2"'
NO_PIP = f'exec {PYTHON} -c "import sys; sys.modules[\'ensurepip\'] = None; exec(sys.argv[1])" "$2"'
SHIM = 'echo "pyenv: command not found" >&2; exit 127'  # Of a pyenv version that is not set.
UV = '[ "$*" = "python find >=3.12" ] && echo "{root}/by uv/python3"'


@pytest.mark.parametrize(
    ("programs", "want", "variables"),
    [
        (
            {"first/python3.12": NO_PIP, "first/python3": OLD, "second/python3.13": GOOD},
            "second/python3.13", {},
        ),
        (
            {"first/python3.12": SHIM, "first/python3": OLD,
             "home/.pyenv/versions/3.11.1/bin/python": OLD,
             "home/.pyenv/versions/3.12.1/bin/python": GOOD},
            "home/.pyenv/versions/3.12.1/bin/python", {},
        ),
        ({"pyenv/versions/3.13.0/bin/python": GOOD}, "pyenv/versions/3.13.0/bin/python",
         {"PYENV_ROOT": "{root}/pyenv"}),
        ({"first/uv": UV, "by uv/python3": GOOD}, "by uv/python3", {}),
        ({"first/python3.12": GOOD, "a folder/python": GOOD}, "a folder/python",
         {"PYTHON": "{root}/a folder/python"}),
        ({"first/python3.12": GOOD, "old": OLD}, None, {"PYTHON": "{root}/old"}),
        ({}, None, {"HOME": ""}),
    ],
    ids=["newer-name", "pyenv", "pyenv-root", "uv", "named", "named-old", "no-home"],
)  # fmt: skip
def test_the_first_python_that_suits(tmp_path, programs, want, variables):
    for path, body in programs.items():
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!{BASH}\n{body.replace('{root}', str(tmp_path))}\n")
        program.chmod(0o755)
    path = os.pathsep.join(str(tmp_path / folder) for folder in ("first", "second"))
    variables = {name: text.format(root=tmp_path) for name, text in variables.items()}
    assert BASH is not None
    done = subprocess.run(
        [BASH, str(FIND)], env={"PATH": path, "HOME": str(tmp_path / "home"), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if want is not None:
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / want}\n")
        return
    assert (done.returncode, done.stdout) == (1, "")
    where = variables.get("PYTHON", "PATH, pyenv or uv")
    assert f"No Python 3.12 or newer with venv in {where}: install one" in done.stderr
    assert "make PYTHON=" in done.stderr
