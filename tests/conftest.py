"""Every test runs on eight CPU devices, whatever else the machine has.

But with ``--implementation`` the local attention's tests run compiled, on the GPU:
``pytest tests/test_local_*.py --implementation mosaic_gpu``, or ``triton``.
"""

import argparse
import sys

import compiled
import jax
import pytest

_GPU = ("triton", "mosaic_gpu")
# Read before pytest reads it: the platform is set here, and tests are parametrized with it.
_options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
_options.add_argument("--implementation")
IMPLEMENTATION = _options.parse_known_args(sys.argv[1:])[0].implementation
ON_GPU = IMPLEMENTATION is not None
if not ON_GPU:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
# An implicit bfloat16 + float32 is a precision bug here, never a convenience.
jax.config.update("jax_numpy_dtype_promotion", "strict")

_NOT_RUN = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption(
        "--require-cuda-compiler",
        action="store_true",
        help="fail, instead of saying so, if the tests that compile for GPUs cannot run",
    )

    parser.addoption(
        "--implementation",
        choices=_GPU,
        help="run tests/test_local_*.py with these kernels compiled, on a GPU",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "cuda_compiler: compiles for A100 and H100; needs JAX's CUDA plugin, no GPU"
    )
    config.addinivalue_line(
        "markers", "hopper_kernels: of those, what the compiler of one kernel says; JAX before 0.12"
    )


def pytest_collection_modifyitems(config, items):
    if ON_GPU:
        names = {item.path.name for item in items}
        elsewhere = {name for name in names if not name.startswith("test_local_")}
        if elsewhere:
            raise pytest.UsageError(
                f"--implementation is for tests/test_local_*.py alone, not {elsewhere}"
            )
    if compiled.cuda_compiler_present():
        return
    away = [item for item in items if item.get_closest_marker("cuda_compiler")]
    if away and config.getoption("--require-cuda-compiler"):
        raise pytest.UsageError(
            f"{len(away)} tests need JAX's CUDA plugin: pip install 'burst-jax[cuda13]'"
        )
    config.stash[_NOT_RUN] = len(away)
    config.hook.pytest_deselected(items=away)
    items[:] = [item for item in items if item not in away]


def pytest_terminal_summary(terminalreporter, config):
    if compiled.cuda_compiler_present():
        return
    terminalreporter.section("not run")
    terminalreporter.write_line(
        "The tests that compile for A100 and H100 (tests/test_compiled*.py and others): JAX's CUDA "
        "plugin is not installed. It needs no GPU: pip install 'burst-jax[cuda13]'"
    )
