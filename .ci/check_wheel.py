"""Builds the wheel as a release is built, and runs it in an environment that holds nothing else.

The sdist is made from a copy of the sources and the wheel from the sdist. The environment gets
the wheel and links to what its metadata requires without extras, which this interpreter's
environment has: nothing is downloaded but setuptools, and neither an extra nor the checkout is on
the path.

Run by an interpreter with the extra dev: .venv-newest/bin/python .ci/check_wheel.py
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("burst_jax", "pallas_kernels")

# What a user of the wheel does first. Dense attention in NumPy is the reference.
SMOKE = """
import importlib.resources, importlib.util, runpy, sys
import jax, jax.numpy as jnp, numpy as np

jax.config.update("jax_num_cpu_devices", 2)
import burst_jax, pallas_kernels

version, environment = sys.argv[1:]
for package in (burst_jax, pallas_kernels):
    assert package.__file__.startswith(environment), package.__file__
    assert importlib.resources.files(package).joinpath("py.typed").is_file(), package
assert burst_jax.__version__ == version, burst_jax.__version__
targets = importlib.resources.files(burst_jax) / "gpu_targets"
assert {x.name for x in targets.iterdir()} == {f"{x}.txtpb" for x in ("a100", "h100", "h200")}
assert not any(map(importlib.util.find_spec, ("benchmarks", "tests", "grain", "safetensors")))
for name in ("linear", "models", "plan", "serving", "training", "verify"):
    getattr(burst_jax, name)
try:
    burst_jax.data
except ImportError as error:
    assert "burst-jax[data]" in str(error), error
else:
    raise AssertionError("burst_jax.data is imported without its extra")

mesh = jax.make_mesh((2,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 8), np.float32)
out = burst_jax.burst_attention(*map(jnp.asarray, (q, k, v)), mesh=mesh, is_causal=True)
scores = np.einsum("bqnh,bknh->bnqk", q, k) / np.sqrt(8) + np.where(np.tri(16), 0, -np.inf)
weights = np.exp(scores - scores.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)
np.testing.assert_allclose(out, np.einsum("bnqk,bknh->bqnh", weights, v), atol=1e-5)

# As python -m runs it.
sys.argv[1:] = ["--length", "64K", "--heads", "32"]
runpy.run_module("burst_jax.plan", run_name="__main__", alter_sys=True)
"""


def main() -> None:
    """Builds, compares the files, installs, runs; raises on the first thing that is wrong."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with tempfile.TemporaryDirectory() as folder:
        checkout, dist, environment = (
            Path(folder).resolve() / x for x in ("checkout", "dist", "venv")
        )
        sources = copy_sources(checkout)
        run(sys.executable, "-m", "build", "--outdir", dist, checkout)
        (wheel,) = dist.glob("*.whl")
        assert {x.name for x in dist.iterdir()} == {f"burst_jax-{version}.tar.gz", wheel.name}
        check_files(wheel, sources)

        venv.create(environment, with_pip=False, symlinks=True)
        python = environment / "bin" / "python"
        run(
            sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
            "--no-index", "--no-compile", "--disable-pip-version-check", wheel,
        )  # fmt: skip
        (site,) = environment.glob("lib/python*/site-packages")
        link_dependencies(site)
        # -I: neither the working directory nor PYTHONPATH.
        printed = run(python, "-I", "-c", SMOKE, version, environment)
        assert "zigzag" in printed, printed
    print(f"{wheel.name}: built from the sdist, complete, runs without extras")


def run(*command: object) -> str:
    """The output of a command; its error output, and an exit, if it fails."""
    arguments = [str(x) for x in command]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{arguments[:4]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def copy_sources(target: Path) -> set[str]:
    """Copies what a release is built from, and returns the files that a wheel must hold.

    In the checkout an earlier build's list of sources would add files to the sdist.
    """
    found = {x for x in ROOT.iterdir() if x.is_file() and not x.name.startswith(".")}
    for package in PACKAGES:
        found |= {x for x in (ROOT / package).rglob("*") if x.is_file()}
    names = {x.relative_to(ROOT).as_posix() for x in found if x.parent.name != "__pycache__"}
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    return {x for x in names if x.split("/")[0] in PACKAGES and not x.endswith(".md")}


def check_files(wheel: Path, wanted: set[str]) -> None:
    """Raises unless the wheel holds these files, its licence, and no others."""
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {x for x in names if ".dist-info/" in x}
    assert any(x.endswith("/licenses/LICENSE") for x in metadata), metadata
    missing, surplus = wanted - names, names - metadata - wanted
    assert not missing | surplus, f"missing: {missing}, surplus: {surplus}"


def link_dependencies(site: Path) -> None:
    """Links what the wheel requires without extras, directly or not, into its environment."""
    (own,) = site.glob("burst_jax-*.dist-info")
    left = list(names(importlib.metadata.Distribution.at(own)))
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # Of another platform or Python.
        left += names(distribution)
        for top in {x.parts[0] for x in distribution.files or () if x.parts[0] != ".."}:
            link, source = site / top, Path(str(distribution.locate_file(top)))
            if not link.exists():
                link.symlink_to(source)


def names(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    """The distributions that one requires without extras."""
    for requirement in distribution.requires or ():
        if "extra ==" not in requirement and (match := re.match(r"[\w.-]+", requirement)):
            yield match.group()


if __name__ == "__main__":
    main()
