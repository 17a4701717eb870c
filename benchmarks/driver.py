"""Loads PTX by NVIDIA's driver API, launches its kernels on JAX arrays and times them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Attributes of a function, and of a device, from cuda.h.
_LOCAL_BYTES, _REGISTERS, _MOST_DYNAMIC_SHARED = 3, 4, 8
_SHARED_PER_SM = 81
# Shared memory that the driver reserves per CTA, and the shared memory of an A100's SM, in bytes.
_RESERVED, _SHARED_OF_A100 = 1024, 164 * 1024


class Driver:
    """The driver and JAX's context.

    Attributes:
      shared: bytes of shared memory per SM.

    Raises:
      OSError: the machine has no driver.
    """

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        shared = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(shared), _SHARED_PER_SM, device)
        self.shared = shared.value
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()

    def enter(self) -> None:
        """Sets the context of the calling thread."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a driver function.

        Raises:
          RuntimeError: it fails; with the driver's message.
        """
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            words = (text.value or b"no such error").decode()
            raise RuntimeError(f"{name} fails with {code}: {words}")


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launch configuration of a kernel.

    Attributes:
      grid: number of CTAs, x first.
      threads: threads per CTA.
      shared: bytes of dynamic shared memory per CTA.
    """

    grid: tuple[int, int, int]
    threads: int
    shared: int

    def as_on_an_a100(self, shared: int) -> Launch:
        """The same launch on a GPU with ``shared`` bytes of shared memory per SM.

        An SM with more shared memory than an A100's would run more CTAs. Each CTA is given more
        shared memory, so that only as many fit as on an A100.
        """
        there = _SHARED_OF_A100 // (self.shared + _RESERVED)
        if there == 0 or shared // (self.shared + _RESERVED) <= there:
            return self
        # One more CTA does not fit; the driver allocates multiples of 1 KiB.
        padded = (shared // (there + 1) // 1024 + 1) * 1024 - _RESERVED
        return dataclasses.replace(self, shared=max(self.shared, padded))


class Kernel:
    """One kernel of a PTX text, assembled by the driver for the GPU that is present.

    Attributes:
      registers: registers per thread.
      local_bytes: bytes per thread spilled to local memory.
    """

    def __init__(self, driver: Driver, ptx: str, name: str, launch: Launch) -> None:
        driver.enter()
        self._driver, self._launch = driver, launch
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuModuleLoadData", ctypes.byref(self._module), ptx.encode() + b"\0")
        driver.call(
            "cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode()
        )
        driver.call(
            "cuFuncSetAttribute", self._function, _MOST_DYNAMIC_SHARED, launch.shared
        )  # fmt: skip
        self.registers = self._attribute(_REGISTERS)
        self.local_bytes = self._attribute(_LOCAL_BYTES)

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._driver.call("cuFuncGetAttribute", ctypes.byref(value), number, self._function)
        return value.value

    def __call__(self, operands: Sequence[jax.Array], results: Sequence[Any]) -> list[jax.Array]:
        """Runs the kernel; returns arrays of the shapes and dtypes of ``results``."""
        made = [jnp.zeros(x.shape, x.dtype) for x in results]
        jax.block_until_ready((operands, made))
        self._start(*operands, *made)
        self._driver.call("cuCtxSynchronize")
        return made

    def seconds(
        self, operands: Sequence[jax.Array], results: Sequence[Any], rounds: int = 5
    ) -> float:
        """Seconds per launch: the median over rounds of at least 50 ms."""
        made = self(operands, results)
        once = self._round(1, *operands, *made)
        launches = max(1, math.ceil(0.05 / once))
        return statistics.median(
            self._round(launches, *operands, *made) for _ in range(rounds)
        )  # fmt: skip

    def _round(self, launches: int, *arrays: jax.Array) -> float:
        """Seconds per launch, of consecutive launches."""
        first, last = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (first, last):
            self._driver.call("cuEventCreate", ctypes.byref(event), 0)
        self._driver.call("cuEventRecord", first, None)
        for _ in range(launches):
            self._start(*arrays)
        self._driver.call("cuEventRecord", last, None)
        self._driver.call("cuEventSynchronize", last)
        milliseconds = ctypes.c_float()
        self._driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), first, last)
        return milliseconds.value / 1e3 / launches

    def _start(self, *arrays: jax.Array) -> None:
        addresses = [ctypes.c_uint64(x.unsafe_buffer_pointer()) for x in arrays]
        pointers = (ctypes.c_void_p * len(addresses))(
            *(ctypes.addressof(address) for address in addresses)
        )
        self._driver.call(
            "cuLaunchKernel", self._function, *self._launch.grid, self._launch.threads, 1, 1,
            self._launch.shared, None, pointers, None,
        )  # fmt: skip
