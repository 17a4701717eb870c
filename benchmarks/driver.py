"""Loads PTX through NVIDIA's driver, launches its kernels on JAX's arrays and times them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Numbers that cuda.h gives to attributes of a function, and of a device.
_LOCAL_BYTES, _REGISTERS, _MOST_DYNAMIC_SHARED = 3, 4, 8
_SHARED_OF_MULTIPROCESSOR = 81
# What each program's shared memory takes beside its own, and the shared memory of an A100's
# multiprocessor, in bytes.
_RESERVED, _SHARED_OF_A100 = 1024, 164 * 1024


class Driver:
    """The driver and the context that JAX works in.

    Attributes:
      shared: bytes of shared memory that a multiprocessor has.

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
        self.call("cuDeviceGetAttribute", ctypes.byref(shared), _SHARED_OF_MULTIPROCESSOR, device)
        self.shared = shared.value
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()

    def enter(self) -> None:
        """Makes the context that of the calling thread."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver.

        Raises:
          RuntimeError: the function fails; the message is the driver's.
        """
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            words = (text.value or b"no such error").decode()
            raise RuntimeError(f"{name} fails with {code}: {words}")


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a compiled program launches a kernel.

    Attributes:
      grid: programs, x first.
      threads: of a program.
      shared: bytes of dynamic shared memory of a program.
    """

    grid: tuple[int, int, int]
    threads: int
    shared: int

    def as_on_an_a100(self, shared: int) -> Launch:
        """The same launch, on a GPU whose multiprocessors have ``shared`` bytes of shared memory.

        A multiprocessor with more shared memory than an A100's would run more programs at a time.
        Each program then asks for so much more that only as many fit as on an A100.
        """
        there = _SHARED_OF_A100 // (self.shared + _RESERVED)
        if there == 0 or shared // (self.shared + _RESERVED) <= there:
            return self
        # One program more would not fit, and a multiple of 1 KiB is what the driver hands out.
        padded = (shared // (there + 1) // 1024 + 1) * 1024 - _RESERVED
        return dataclasses.replace(self, shared=max(self.shared, padded))


class Kernel:
    """One kernel of a PTX text, assembled by the driver for the GPU that is there.

    Attributes:
      registers: of a thread.
      local_bytes: what a thread keeps in memory because its registers do not hold it.
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
        """Arrays of the shapes and dtypes of ``results``, made by the kernel."""
        made = [jnp.zeros(x.shape, x.dtype) for x in results]
        jax.block_until_ready((operands, made))
        self._start(*operands, *made)
        self._driver.call("cuCtxSynchronize")
        return made

    def seconds(
        self, operands: Sequence[jax.Array], results: Sequence[Any], rounds: int = 5
    ) -> float:
        """Seconds of one launch: the median over rounds, each of 50 ms and more."""
        made = self(operands, results)
        once = self._round(1, *operands, *made)
        launches = max(1, math.ceil(0.05 / once))
        return statistics.median(
            self._round(launches, *operands, *made) for _ in range(rounds)
        )  # fmt: skip

    def _round(self, launches: int, *arrays: jax.Array) -> float:
        """Seconds of a launch, of several that follow one another."""
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
