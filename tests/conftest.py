"""Tests run on eight CPU devices, whatever the machine has.

With ``--implementation`` the tests of local attention run compiled, on the GPU:
``pytest tests/pallas_kernels/test_local_*.py --implementation mosaic_sm90``.
"""

import os

# NumPy's other threads wait for their next product in a busy loop. NumPy reads this when it is
# imported; workers and subprocesses inherit it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import collections
import gc
import pathlib
import re
from typing import Any

import compiled_programs as compiled
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from register_operands import wrong_operands

from pallas_kernels import REFERENCE, XLA, choice

_GPU = ("mosaic_sm80", "mosaic_sm90")
CACHE = {
    "jax_compilation_cache_dir": str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
# Set by pytest_configure, before tests and their support are imported.
IMPLEMENTATION: Any = None  # a name, with --implementation
ON_GPU = REPLAYING = COMPILE_QUICKLY = False
DRAW_SEED = LOWERED_PROGRAMS = 0
USUAL_PROGRAMS = 28  # The option --lowered-programs.
collect_ignore: list[str] = []
# The garbage collector runs rarely: JAX's caches keep most objects of a trace alive.
gc.set_threshold(1_000_000, 10, 100)
# An implicit bfloat16 + float32 is a precision bug.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Why ``make test`` leaves a test out, and what runs it.
TIERS = {
    "slow": (
        "further cases of what quick tests show, or seconds of compiling and training",
        "make test-all runs them",
    ),
    "cuda_compiler": (
        "compiles for A100 and H100; needs JAX's CUDA plugin, no GPU",
        "make test-all runs them"
        if compiled.cuda_compiler_present()
        else "make test-all EXTRAS=test,compiler installs the plugin (700 MB) and runs them",
    ),
    "mosaic_interpreter": (
        "interprets the Hopper kernels, or finds races, which needs JAX 0.12 or newer",
        "make test-all runs them with that",
    ),
    "hopper_kernels": (
        "compiles for H100 and reads the compiler's output for one kernel; JAX before 0.12",
        ".ci/run runs them with the oldest JAX",
    ),
    "replay": (
        "cases of other projects' tests at their own sizes: an hour or two on two cores",
        "make replay runs them",
    ),
}

EVERY_JAX = "every_jax: .ci/run runs all of them on the oldest JAX, too"
WHOLE = {"hopper_kernels", "every_jax"}  # Also with --first.


def pytest_addoption(parser):
    parser.addoption(
        "--require-cuda-compiler",
        action="store_true",
        help="fail, instead of reporting it, if the tests that compile for GPUs cannot run",
    )
    parser.addoption(
        "--implementation",
        choices=_GPU,
        help="run tests/pallas_kernels/test_local_*.py with these kernels compiled, on a GPU",
    )
    parser.addoption(
        "--first",
        type=int,
        metavar="N",
        help="only one case of each of the first N tests of a file; all of hopper_kernels and "
        "every_jax",
    )
    parser.addoption(
        "--draw-seed",
        type=int,
        default=0,
        metavar="N",
        help="the first seed of drawn calls of local attention (default: 0)",
    )
    parser.addoption(
        "--kills",
        type=int,
        default=1,
        metavar="N",
        help="how often tests/training/test_kills.py kills a training run (default: 1)",
    )
    parser.addoption(
        "--lowered-programs",
        type=int,
        default=USUAL_PROGRAMS,
        metavar="N",
        help="how many calls tests/compiled/test_lowered_programs.py draws, a quarter as many "
        f"layers and a sixth as many training steps (default: {USUAL_PROGRAMS})",
    )


def compile_quickly(for_gpu=False):
    """For CPUs only: programs for GPUs are those that a user's GPU would run."""
    jax.config.update("jax_disable_most_optimizations", COMPILE_QUICKLY and not for_gpu)
    # A cached program has no compiler output.
    if jax.config.jax_enable_compilation_cache == for_gpu:
        jax.config.update("jax_enable_compilation_cache", not for_gpu)
        compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def _compile_quickly(request):
    """Outside of tests, too: fixtures of a module come before those of its tests."""
    for_gpu = request.node.get_closest_marker("cuda_compiler") is not None
    compile_quickly(for_gpu)
    yield
    compile_quickly()


@pytest.fixture
def assembled(monkeypatch, capfd):
    """``assembled(run, ...)``: what the assembler reports while ``run(...)`` compiles for an H100.

    With the oldest JAX and ptxas, products' operands in registers are right: newer ptxas do not
    write them at the wrong time, and printing the code takes half a second per kernel.
    """
    reads_code = jax.__version_info__ < (0, 12)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    if reads_code:
        monkeypatch.setenv("MOSAIC_GPU_DUMP_SASS", "1")

    def report(run, *args, **kwargs):
        capfd.readouterr()
        run(*args, **kwargs)
        printed = "".join(capfd.readouterr())
        assert not reads_code or not wrong_operands(printed)
        return compiled.ptxas(printed)

    return report


@pytest.fixture
def program(request):
    """Makes a program of a function: compiled, or, in slow tests, evaluated by NumPy.

    Slow cases are further ones of what quick tests compile.
    """
    import device_threads  # After pytest_configure.

    is_slow = request.node.get_closest_marker("slow") is not None
    return device_threads.evaluated if is_slow else device_threads.jitted


@pytest.fixture
def kills(request):
    """The option ``--kills``."""
    return request.config.getoption("--kills")


def pytest_configure(config):
    global IMPLEMENTATION, ON_GPU, REPLAYING, COMPILE_QUICKLY, DRAW_SEED, LOWERED_PROGRAMS
    for marker, (reason, _) in TIERS.items():
        config.addinivalue_line("markers", f"{marker}: {reason}")
    config.addinivalue_line("markers", EVERY_JAX)
    IMPLEMENTATION = config.getoption("--implementation")
    DRAW_SEED = config.getoption("--draw-seed")
    LOWERED_PROGRAMS = config.getoption("--lowered-programs")
    ON_GPU, REPLAYING = IMPLEMENTATION is not None, "replay" in config.option.markexpr
    # Most of the tests' time is compilation of programs that run a few times on small arrays.
    # Other projects' cases, at their own sizes, run longer than they compile.
    COMPILE_QUICKLY = not ON_GPU and not REPLAYING
    if ON_GPU:
        return
    collect_ignore.append("pallas_kernels/test_local_drawn.py")  # Hundreds of a GPU's kernels.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    if COMPILE_QUICKLY:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # Subprocesses inherit it.
        # By default XLA splits each small program into up to 32 for its compiler threads. Workers
        # and subprocesses inherit it.
        flags = os.environ.get("XLA_FLAGS", "")
        if (name := "--xla_cpu_parallel_codegen_split_count") not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {name}=1".strip()
    # Compiled programs are kept for the next run; subprocesses use them, too. Workers share the
    # folder: an entry that another worker is still writing counts as missing. The environment may
    # name another folder, which checkouts share.
    for option, value in CACHE.items():
        if option.upper() not in os.environ:
            os.environ[option.upper()] = str(value)
            jax.config.update(option, value)
    compile_quickly()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def absent_tiers(config):
    """The tiers that cannot run here."""
    present = {
        "cuda_compiler": compiled.cuda_compiler_present(),
        "mosaic_interpreter": jax.__version_info__ >= (0, 12),
        # Newer versions link kernels, and give every warpgroup as many registers: all spill.
        "hopper_kernels": jax.__version_info__ < (0, 12),
        # Too long unless the tier is asked for by name.
        "replay": "replay" in config.option.markexpr,
    }
    return {marker for marker, is_there in present.items() if not is_there}


@pytest.hookimpl(trylast=True)  # After -m and -k, to count the cases that they leave.
def pytest_collection_modifyitems(config, items):
    elsewhere = {item.path.name for item in items if not item.path.name.startswith("test_local_")}
    if ON_GPU and elsewhere:
        raise pytest.UsageError(
            f"--implementation is for tests/pallas_kernels/test_local_*.py alone, not {elsewhere}"
        )
    absent, most = absent_tiers(config), config.getoption("--first")
    if config.getoption("--require-cuda-compiler") and "cuda_compiler" in absent:
        raise pytest.UsageError("tests need JAX's CUDA plugin: pip install 'burst-jax[compiler]'")
    kept, seen = [], collections.defaultdict(set)
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        names = seen[item.path]
        few = most is None or (item.originalname not in names and len(names) < most)
        names.add(item.originalname)
        if markers.isdisjoint(absent) and (few or not markers.isdisjoint(WHOLE)):
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_terminal_summary(terminalreporter, config):
    """Lists the tiers that the run left out."""
    most, expression = config.getoption("--first"), config.option.markexpr
    terminalreporter.section("not run")
    if most is not None:
        terminalreporter.write_line(f"all but one case of {most} tests of a file: --first {most}.")
    for marker, (reason, remedy) in TIERS.items():
        excluded = re.search(rf"not {marker}\b|not \(.*{marker}\b", expression)
        if excluded or marker in absent_tiers(config):
            terminalreporter.write_line(f"tests marked {marker} ({reason}): {remedy}.")


# Folders and files that test what surrounds local attention: its dense reference compiles in two
# thirds of the time.
AROUND_ATTENTION = {
    "benchmarks", "layers", "models", "serving", "training", "verify",
    "test_docs.py", "test_examples.py", "test_hf_examples.py",
    "test_training_end.py",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _attend_densely(request):
    """Before other fixtures of the module; ``implementation=None`` and "xla" are the reference."""
    names = {request.path.parent.name, request.path.name}
    wanted = XLA if names.isdisjoint(AROUND_ATTENTION) else REFERENCE
    if choice.XLA is not wanted:
        jax.clear_caches()  # What was traced with the other one.
        choice.XLA = wanted


_MAPPINGS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def _mappings_stay_few():
    """Frees compiled programs between modules once a process has many.

    Every program needs some memory mappings, and JAX keeps all programs. Linux allows a process
    65,530 mappings by default, and one more crashes it.
    """
    yield
    if _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
