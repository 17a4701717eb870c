"""What modules import: no cycles, no package above their own; optional libraries."""

from __future__ import annotations

import ast
import graphlib
import os
import pathlib
import subprocess
import sys

import pytest

from burst_jax.data import TokenizerFile
from burst_jax.errors import optional

REPOSITORY = pathlib.Path(__file__).parents[2]
# From low to high. A package may import itself and those before it.
PACKAGES = (
    "pallas_kernels",
    "pallas_kernels.linear",
    *(
        f"burst_jax.{name}"
        for name in (
            *("errors", "json_files", "array_files", "command_line", "jax_compat", "parallel"),
            *("layouts", "ring", "attention", "linear", "layers", "models"),
            *("data", "training", "serving", "plan", "verify"),
        )
    ),
    "burst_jax",
    "benchmarks",
    "examples",
)


def modules_of(root):
    """Paths by module name, of all packages under a folder."""
    found = {}
    for top in {name.partition(".")[0] for name in PACKAGES}:
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name, path, modules):
    """The modules that a module imports anywhere, also under TYPE_CHECKING and in functions."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{name} has a relative import"
            each = (f"{node.module}.{alias.name}" for alias in node.names)
            imported |= {full if full in modules else node.module for full in each}
    return (imported & set(modules)) - {name}


def graph_of(root):
    modules = modules_of(root)
    return {name: imports_of(name, path, modules) for name, path in modules.items()}


def upward(graph):
    """``(module, imported)`` where the imported module is in a higher package."""
    # Of the names that hold a module, the longest is its package.
    holders = {name: [x for x in PACKAGES if f"{name}.".startswith(f"{x}.")] for name in graph}
    rank = {name: PACKAGES.index(max(of_it, key=len)) for name, of_it in holders.items()}
    return [(name, to) for name in graph for to in sorted(graph[name]) if rank[to] > rank[name]]


def test_no_cycle_and_no_import_of_a_package_above():
    graph = graph_of(REPOSITORY)
    assert len(graph) > 150
    assert "pallas_kernels.inputs" in graph["burst_jax.ring.forward"]
    graphlib.TopologicalSorter(graph).prepare()
    assert upward(graph) == []
    # Which kernels serve a call is decided in pallas_kernels, which no other package goes past.
    past = {
        name: [x for x in graph[name] if x.startswith("pallas_kernels.mosaic")] for name in graph
    }
    outside = {
        name for name, found in past.items() if found and not name.startswith("pallas_kernels")
    }
    assert outside == set()


def test_importing_burst_jax_loads_no_kernels_and_no_packages():
    """Beyond jax and flax it takes 0.2 s, and stays below 0.3 s with so few modules."""
    script = """
import sys
import flax.linen, flax.nnx, jax
before = set(sys.modules)
import burst_jax
new = sorted(set(sys.modules) - before)
for name in ("data", "linear", "models", "plan", "serving", "training"):
    assert name in dir(burst_jax), name
print(*new)
from pallas_kernels import MOSAIC_SM80
assert burst_jax.models.Decoder.__name__ in dir(sys.modules["burst_jax.models"])
try:
    burst_jax.modles
except AttributeError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    modules, error = ran.stdout.splitlines()
    imported = modules.split()
    assert "pallas_kernels.choice" in imported
    assert len(imported) <= 85, imported
    own = [name for name in imported if name.startswith(("burst_jax", "pallas_kernels"))]
    assert len(imported) - len(own) < 5, imported
    lazy = ("mosaic", "linear", "data", "models", "plan", "serving", "training", "verify")
    assert not {name.split(".")[1] for name in own if "." in name} & set(lazy)
    assert error == "module 'burst_jax' has no attribute 'modles'"


def test_a_checkout_without_installation_or_extras():
    """Without an installation there is no metadata. What needs no extra imports none of theirs."""
    script = """
import importlib.metadata, sys
found = importlib.metadata.version
def version(name):
    if name.replace("_", "-") == "burst-jax":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
import burst_jax.training, burst_jax.plan.__main__, burst_jax.verify.__main__, burst_jax.serving
print(*{"burst_jax.data", "grain", "tokenizers", "safetensors", "qwix"} & set(sys.modules))
from burst_jax import models, plan, serving, training, verify
print(burst_jax.__version__)
"""
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "\n0+unknown\n", "")


def strings_of(path):
    """The strings of a module that are no documentation."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            yield str(node.value)


def test_the_wheel_names_no_script_that_it_lacks():
    found = {
        str(path.relative_to(REPOSITORY)): text
        for top in ("burst_jax", "pallas_kernels")
        for path in (REPOSITORY / top).rglob("*.py")
        for text in strings_of(path)
        if "examples/" in text or "-m benchmarks" in text
    }
    assert found == {}


def test_cycles_and_upward_imports_are_found(tmp_path):
    """Also those under TYPE_CHECKING, in functions, and from a package's ``__init__``."""
    files = {
        "pallas_kernels/__init__.py": "",
        "pallas_kernels/one.py": "if TYPE_CHECKING:\n    from pallas_kernels.two import x\n",
        "pallas_kernels/two.py": "def f():\n    from pallas_kernels import one\n",
        "burst_jax/ring/a.py": "from burst_jax import attention\n",
        "burst_jax/attention/__init__.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = graph_of(tmp_path)
    with pytest.raises(graphlib.CycleError, match=r"pallas_kernels\.one"):
        graphlib.TopologicalSorter(graph).prepare()
    assert upward(graph) == [("burst_jax.ring.a", "burst_jax.attention")]


def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = r"^TokenizerFile needs tokenizers, which is not .*: pip install 'burst-jax\[data\]'$"
    with pytest.raises(ImportError, match=message):
        TokenizerFile(tmp_path / "tokenizer.json")
    # Installing a library again would not help, if it misses another one.
    (tmp_path / "installed_library.py").write_text("import library_that_it_misses")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'library_that_it_misses'$"):
        optional("installed_library", user="this test", extra="test")
    assert optional("json.decoder", user="this test", extra="test") is sys.modules["json.decoder"]


IMPORT_ALL = """
import importlib, pkgutil
import burst_jax, pallas_kernels
for package in (burst_jax, pallas_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            print(module.name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing started a backend"
"""


def test_importing_touches_no_backend():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert {"burst_jax.ring.vjp", "burst_jax.training.step", "pallas_kernels.xla"} <= imported
