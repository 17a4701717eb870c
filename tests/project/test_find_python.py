"""``make`` finds a Python: on machines that are pretended, with the Pythons they would have."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIND = Path(__file__).parents[2] / ".ci" / "find-python"
BASH = shutil.which("bash")
PYTHON = shlex.quote(sys.executable)
# What a Python runs in front of the command that it is given.
GOOD = f'exec {PYTHON} "$@"'
OLD = f'exec {PYTHON} -c "import sys; sys.version_info = (3, 11, 9); exec(sys.argv[1])" "$2"'
WITHOUT_ENSUREPIP = (
    f'exec {PYTHON} -c "import sys; sys.modules[\'ensurepip\'] = None; exec(sys.argv[1])" "$2"'
)
# As pyenv's shim of a version that is installed and not set.
SHIM = 'echo "pyenv: $(basename "$0"): command not found" >&2; exit 127'


class Machine:
    """A PATH of two folders, a home, and nothing of the machine that the tests run on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders = [root / "first", root / "second"]
        for folder in self.folders:
            folder.mkdir()
        for tool in ("cat", "basename"):
            found = shutil.which(tool)
            assert found is not None
            (self.folders[1] / tool).symlink_to(found)

    def add(self, path: str, body: str) -> str:
        """A program; ``path`` is relative to the root."""
        program = self.root / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!{BASH}\n{body}\n")
        program.chmod(0o755)
        return str(program)

    def find(self, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, self.folders))
        environment = {"PATH": path, "HOME": str(self.root / "home"), **variables}
        assert BASH is not None
        return subprocess.run(
            [BASH, str(FIND)], env=environment, capture_output=True, text=True, check=False
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def assert_finds(machine, want, **variables):
    done = machine.find(**variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout == want + "\n"


def test_the_first_that_suits_is_taken(machine):
    machine.add("first/python3.12", WITHOUT_ENSUREPIP)
    machine.add("first/python3", OLD)
    want = machine.add("second/python3.13", GOOD)
    machine.add("second/python", GOOD)
    assert_finds(machine, want)


def test_a_shim_does_not_hide_the_python_behind_it(machine):
    machine.add("first/python3.12", SHIM)
    want = machine.add("second/python3.12", GOOD)
    assert_finds(machine, want)


@pytest.mark.parametrize("root", ["home/.pyenv", "elsewhere"])
def test_versions_of_pyenv_need_not_be_set(machine, root):
    machine.add("first/python3.12", SHIM)
    machine.add("first/python3", OLD)
    machine.add(f"{root}/versions/3.12.1/bin/python", WITHOUT_ENSUREPIP)
    want = machine.add(f"{root}/versions/3.13.0/bin/python", GOOD)
    variables = {} if root == "home/.pyenv" else {"PYENV_ROOT": str(machine.root / root)}
    assert_finds(machine, want, **variables)


def test_pythons_of_uv_are_found_with_uv_and_without(machine):
    at = "cpython-3.12.7-linux-x86_64-gnu/bin/python3"
    usual = machine.add(f"home/.local/share/uv/python/{at}", GOOD)
    assert_finds(machine, usual)
    other = machine.add(f"managed by uv/{at}", GOOD)
    machine.add("first/uv", f'[ "$*" = "python dir" ] && echo "{machine.root}/managed by uv"')
    assert_finds(machine, other)


def test_the_python_that_is_named_is_taken_or_refused(machine):
    machine.add("first/python3.12", GOOD)
    named = machine.add("a folder/python", GOOD)
    assert_finds(machine, named, PYTHON=named)
    for body in (OLD, WITHOUT_ENSUREPIP, SHIM):
        old = machine.add("a folder/old", body)
        done = machine.find(PYTHON=old)
        assert done.returncode == 1
        assert not done.stdout
        assert f"PYTHON is {old}: it must be Python 3.12 or newer, with venv" in done.stderr


@pytest.mark.parametrize("home", [True, False], ids=["home", "no_home"])
def test_where_there_is_none_it_says_what_to_do(machine, home):
    for name in ("python3.12", "python3", "python"):
        machine.add(f"first/{name}", OLD)
    done = machine.find() if home else machine.find(HOME="")
    assert done.returncode == 1
    assert not done.stdout
    assert "No Python 3.12 or newer found" in done.stderr
    for remedy in ("uv python install 3.12", "make PYTHON=/path/to/python3.12"):
        assert remedy in done.stderr
