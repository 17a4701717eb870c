"""XLA options that overlap communication with compute: as compiler options, or in ``XLA_FLAGS``."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import jax

from burst_jax.jax_compat import backends_are_initialized, distributed_process_count
from pallas_kernels.device import compute_capability, current_platform, listed_capability

# Compute capabilities of GPUs with NVLink.
_NVLINK = (8.0, 9.0, 10.0, 10.3)
# XLA combines permutes that start and end together into one, up to this size in bytes.
_UNLIMITED = 2**50

XlaOptions = dict[str, bool | int | str]
_PEER_COPIES: XlaOptions = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
# How XLA_FLAGS spells some option values.
_FLAG_VALUES = {"COLLECTIVES_PEER_MEMORY": "peer", "True": "true", "False": "false"}


def compiler_options(platform: str | None = None, *, peer_copies: bool | None = None) -> XlaOptions:
    """Options for the outermost ``jax.jit`` that let XLA overlap communication with the kernels.

    On GPUs they enable the latency-hiding scheduler, which is off by default on some generations,
    combine all arrays of one ring step into one permute of any size, and allow several permutes in
    flight, so that a K/V block and a gradient, or the inner and the outer ring of a two-level ring,
    are sent at the same time::

        step = jax.jit(step, compiler_options=burst_jax.compiler_options())

    :func:`set_compiler_options` sets them for every ``jax.jit`` instead.

    Args:
      platform: "gpu", "cpu", ...; None is the platform of the mesh in context, or JAX's default.
      peer_copies: whether the GPUs' copy engines do the permutes instead of NCCL's kernels, which
        occupy SMs that attention needs: 2.7 times the bandwidth on four H200 while a kernel runs.
        All GPUs must belong to one process and have peer access to each other. None is True for
        one process whose GPUs have NVLink (A100, H100, H200, B200, B300).

    Returns:
      Options for ``jax.jit(..., compiler_options=)``; empty on other platforms.
    """
    if (platform or current_platform()) not in ("gpu", "cuda"):
        return {}
    return _gpu_options(has_peer_copies() if peer_copies is None else peer_copies)


def has_peer_copies() -> bool:
    """Whether permutes in the program being traced are done by copy engines.

    True for one process whose GPUs have NVLink, the default of :func:`compiler_options`.
    """
    return jax.process_count() == 1 and compute_capability() in _NVLINK


def set_compiler_options(peer_copies: bool | None = None) -> XlaOptions:
    """Sets :func:`compiler_options` for every ``jax.jit`` of this process.

    Without these options a step takes about 10 % longer on two H200::

        burst_jax.set_compiler_options()  # before anything else but jax.distributed.initialize()

    JAX has no global setting for compiler options, so this adds flags to the environment variable
    ``XLA_FLAGS``, which XLA reads when JAX starts its backends. Flags that are already set are
    kept. Without NVIDIA GPUs, or if ``jax_platforms`` names no GPU, it does nothing. It starts no
    backend: it asks the driver which GPUs are present.

    Args:
      peer_copies: as in :func:`compiler_options`. None is True for one process whose GPUs all have
        NVLink. The number of processes is known only after ``jax.distributed.initialize()``: with
        several processes, call that first, or pass False.

    Returns:
      The options of :func:`compiler_options` as ``XLA_FLAGS`` has them after the call. An option
      that was set to another value before is returned as that value's text. Empty if there is
      nothing to set.

    Raises:
      RuntimeError: JAX's backends have started, so XLA has read its flags.
      ValueError: ``peer_copies=True`` with several processes, or an ``XLA_FLAGS`` that is the name
        of a flag file, to which nothing can be added.
    """
    platforms = jax.config.jax_platforms  # pyrefly: ignore[missing-attribute]
    if platforms and not {"gpu", "cuda"} & set(platforms.split(",")):
        return {}
    kinds = _gpu_kinds()
    return _set_compiler_options(kinds, distributed_process_count(), peer_copies) if kinds else {}


def _set_compiler_options(kinds: list[str], processes: int, peer_copies: bool | None) -> XlaOptions:
    """:func:`set_compiler_options` for GPUs of these device names and this number of processes."""
    if peer_copies and processes > 1:
        raise ValueError(
            f"peer_copies is True, and there are {processes} processes: copy engines reach the "
            "memory of one process only; leave it None, or run all GPUs in one process"
        )
    if peer_copies is None:
        peer_copies = processes == 1 and all(listed_capability(k) in _NVLINK for k in kinds)
    options = _gpu_options(peer_copies)
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        missing = " ".join(map(_flag, options.items()))
        raise ValueError(
            f"XLA_FLAGS is {flags!r}, the name of a flag file: add these to the file instead of "
            f"calling set_compiler_options: {missing}"
        )
    present = {flag.partition("=")[0]: flag.partition("=")[2] for flag in flags.split()}
    absent = {name: value for name, value in options.items() if f"--{name}" not in present}
    if absent and backends_are_initialized():
        raise RuntimeError(
            "set_compiler_options is called too late, XLA has read its flags: call it before "
            "anything asks JAX for devices or makes an array, or pass "
            "compiler_options=burst_jax.compiler_options() to jax.jit"
        )
    if absent:
        os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *map(_flag, absent.items())])
    for name, value in {**options, **_PEER_COPIES}.items():
        text = present.get(f"--{name}")
        if text is not None:
            options[name] = value if text == _flag_value(value) else text
    return options


def _gpu_options(peer_copies: bool) -> XlaOptions:
    """The options of :func:`compiler_options` on GPUs."""
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
        "xla_gpu_collective_permute_combine_threshold_bytes": _UNLIMITED,
        **(_PEER_COPIES if peer_copies else {}),
    }


def _flag(option: tuple[str, bool | int | str]) -> str:
    """An option, ``(name, value)``, as a flag of ``XLA_FLAGS``."""
    name, value = option
    return f"--{name}={_flag_value(value)}"


def _flag_value(value: bool | int | str) -> str:
    """An option's value as ``XLA_FLAGS`` spells it."""
    return _FLAG_VALUES.get(str(value), str(value))


def _gpu_kinds() -> list[str]:
    """The device names of this machine's NVIDIA GPUs, from the driver; empty without a driver."""
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
