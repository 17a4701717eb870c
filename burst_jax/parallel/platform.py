"""What the code that is being traced will run on, and the compiler options it needs there."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from typing import Any, NamedTuple

import jax

from burst_jax.jax_compat import backends_are_initialized, distributed_process_count

# Compute capability by the name that the driver gives a GPU. A GPU that no pattern matches is asked
# for its own.
_CAPABILITIES = (
    (r"A100|A800|A30\b", 8.0),
    (r"A10\b|A10G|A40|A16|RTX A\d|RTX 30\d\d", 8.6),
    (r"L4\b|L40|RTX 40\d\d|Ada", 8.9),
    (r"H100|H200|H800|H20\b|GH200", 9.0),
    (r"GB300|B300", 10.3),
    (r"B200|GB200|B100", 10.0),
    (r"RTX 50\d\d|RTX PRO", 12.0),
    (r"V100", 7.0),
    (r"T4\b|RTX 20\d\d", 7.5),
)
# Dense bfloat16 peak in FLOP/s, by a part of the GPU's name, from the vendor's data sheets.
_PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}

# Compute capabilities of GPUs that NVLink connects.
_LINKED = (8.0, 9.0, 10.0, 10.3)
# XLA combines permutes that begin and end together into one, up to this many bytes.
_ANY_SIZE = 2**50

Options = dict[str, bool | int | str]
_COPIES: Options = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
# The words that XLA_FLAGS has for the values of some options.
_FLAG_WORDS = {"COLLECTIVES_PEER_MEMORY": "peer", "True": "true", "False": "false"}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 peak of one device in FLOP/s, or None if its kind is not listed."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_kind), None)


def current_platform() -> str:
    """The platform ("gpu", "cpu", ...) of the mesh in context; JAX's default if it names none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compute_capability() -> float | None:
    """The GPU's compute capability, 8.0 for A100, 9.0 for H100 and H200.

    None if the code will not run on a GPU, or on a GPU that is neither listed nor present.
    """
    if current_platform() != "gpu":
        return None
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    capability = _listed_capability(kind)
    if capability is not None:
        return capability
    for present in jax.devices():
        if present.device_kind == kind and hasattr(present, "compute_capability"):
            return float(present.compute_capability)
    return None


class Target(NamedTuple):
    """What a program is for.

    Attributes:
      platform: "gpu", "cpu", ...
      compute_capability: compute capability of the NVIDIA GPU; None on another device, or on a GPU
        that is neither listed nor present.
    """

    platform: str
    compute_capability: float | None


def current_target() -> Target:
    """What the code being traced will run on."""
    return Target(current_platform(), compute_capability())


def target_of(array: Any) -> Target:
    """What a program on this array will run on: where it lies, if that is known."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return current_target()
    device = next(iter(array.sharding.device_set))
    if device.platform != "gpu":
        return Target(device.platform, None)
    capability = _listed_capability(device.device_kind)
    return Target("gpu", capability or float(device.compute_capability))


def _listed_capability(kind: str) -> float | None:
    """The compute capability of GPUs of this name, or None if no pattern matches it."""
    return next((number for name, number in _CAPABILITIES if re.search(name, kind)), None)


def compiler_options(platform: str | None = None, *, peer_copies: bool | None = None) -> Options:
    """Options for the outermost ``jax.jit``, with which XLA hides transfers behind the kernels.

    On GPUs they switch on the latency-hiding scheduler, which XLA leaves off on some generations.
    They make one permute of all arrays that travel together, however large. They allow several
    permutes at once, so that a block and a gradient travel together, and the inner and the outer
    links of a two-level ring are used together::

        step = jax.jit(step, compiler_options=burst_jax.compiler_options())

    :func:`set_compiler_options` sets them for every ``jax.jit`` instead.

    Args:
      platform: "gpu", "cpu", ...; None is the platform of the mesh in context, or JAX's default.
      peer_copies: whether the GPUs' copy engines move blocks, instead of NCCL's kernels, which take
        multiprocessors from the attention: 2.7 times as fast on four H200 while a kernel runs. All
        GPUs must belong to one process and reach each other's memory. None is True if there is one
        process and its GPUs are of a kind that NVLink connects (A100, H100, H200, B200, B300).

    Returns:
      Options for ``jax.jit(..., compiler_options=)``; empty where there is nothing to set.
    """
    if (platform or current_platform()) not in ("gpu", "cuda"):
        return {}
    return _gpu_options(has_peer_copies() if peer_copies is None else peer_copies)


def has_peer_copies() -> bool:
    """Whether copy engines move what a permute of the code being traced sends.

    True if there is one process and its GPUs are of a kind that NVLink connects, which is what
    :func:`compiler_options` takes for granted unless it is told otherwise.
    """
    return jax.process_count() == 1 and compute_capability() in _LINKED


def set_compiler_options(peer_copies: bool | None = None) -> Options:
    """Sets :func:`compiler_options` for every ``jax.jit`` that this process will compile.

    A ``jax.jit`` without these options takes a tenth longer on two H200::

        burst_jax.set_compiler_options()  # first of all, but after jax.distributed.initialize()

    JAX has no setting for compiler options, so this adds flags to the environment variable
    ``XLA_FLAGS``, which XLA reads when JAX first asks for devices. Flags that are there already
    stay as they are. Without NVIDIA GPUs, or where ``jax_platforms`` names no GPU, it does nothing.
    It starts no JAX backend: it asks the driver which GPUs there are.

    Args:
      peer_copies: as in :func:`compiler_options`. None is True if there is one process and all GPUs
        are of kinds that NVLink connects. How many processes there are is known only after
        ``jax.distributed.initialize()``: where there are several, call that first, or pass False.

    Returns:
      The options of :func:`compiler_options` as they stand in ``XLA_FLAGS`` after the call. An
      option that had another value there before keeps it, and is returned as that value's text.
      Empty where there is nothing to set.

    Raises:
      RuntimeError: JAX has its devices already, so it is too late.
      ValueError: ``peer_copies=True`` with several processes, or an ``XLA_FLAGS`` that names a file
        of flags, to which nothing can be added.
    """
    platforms = jax.config.jax_platforms  # pyrefly: ignore[missing-attribute]
    if platforms and not {"gpu", "cuda"} & set(platforms.split(",")):
        return {}
    kinds = _gpu_kinds()
    if not kinds:
        return {}
    return _set_compiler_options(kinds, distributed_process_count(), peer_copies)


def _set_compiler_options(kinds: list[str], processes: int, peer_copies: bool | None) -> Options:
    """:func:`set_compiler_options` for so many processes and GPUs of these kinds."""
    if peer_copies and processes > 1:
        raise ValueError(
            f"peer_copies is True, and there are {processes} processes: copy engines reach the "
            "memory of one process only; leave it None, or run all GPUs in one process"
        )
    if peer_copies is None:
        peer_copies = processes == 1 and all(_listed_capability(k) in _LINKED for k in kinds)
    options = _gpu_options(peer_copies)
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        missing = " ".join(map(_flag, options.items()))
        raise ValueError(
            f"XLA_FLAGS is {flags!r}, the name of a file of flags: add these to the file instead "
            f"of calling set_compiler_options: {missing}"
        )
    present = {flag.partition("=")[0]: flag.partition("=")[2] for flag in flags.split()}
    absent = {name: value for name, value in options.items() if f"--{name}" not in present}
    if absent and backends_are_initialized():
        raise RuntimeError(
            "set_compiler_options comes too late, XLA has read its flags: call it before anything "
            "asks JAX for devices or makes an array, or pass "
            "compiler_options=burst_jax.compiler_options() to jax.jit"
        )
    if absent:
        os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *map(_flag, absent.items())])
    for name, value in {**options, **_COPIES}.items():
        text = present.get(f"--{name}")
        if text is not None:
            options[name] = value if text == _flag_word(value) else text
    return options


def _gpu_options(peer_copies: bool) -> Options:
    """The options of :func:`compiler_options` on GPUs."""
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
        "xla_gpu_collective_permute_combine_threshold_bytes": _ANY_SIZE,
        **(_COPIES if peer_copies else {}),
    }


def _flag(option: tuple[str, bool | int | str]) -> str:
    """An option, ``(name, value)``, as ``XLA_FLAGS`` writes it."""
    name, value = option
    return f"--{name}={_flag_word(value)}"


def _flag_word(value: bool | int | str) -> str:
    """An option's value as ``XLA_FLAGS`` writes it."""
    return _FLAG_WORDS.get(str(value), str(value))


def _gpu_kinds() -> list[str]:
    """The names of this machine's NVIDIA GPUs, asked from the driver; none without a driver."""
    files = pathlib.Path("/proc/driver/nvidia/gpus").glob("*/information")
    models = (re.search(r"^Model:\s*(.+?)\s*$", file.read_text(), re.M) for file in files)
    kinds = [model.group(1) for model in models if model]
    command = shutil.which("nvidia-smi")
    if kinds or command is None:
        return kinds
    # Some containers hide /proc/driver. Lines like "GPU 0: NVIDIA H200 (UUID: ...)".
    try:
        listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU \d+: (.+?) \(UUID", listed.stdout, re.M)
