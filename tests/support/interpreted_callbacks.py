"""JAX's interpreters without XLA, for the modules that interpret kernels.

The interpreters call Python for every access to memory, and JAX puts each argument on a device
before, which takes longer than the call. A warpgroup's program runs once in each CTA, which takes
NumPy a tenth of the time in which XLA compiles it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpy_jaxprs
from jax._src import callback
from jax._src.pallas import mpmd, pallas_call
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, shared_memory


@contextlib.contextmanager
def with_numpy() -> Iterator[None]:
    """Programs that are traced and run inside call Python with NumPy arrays, kernels with NumPy."""
    api = SimpleNamespace(device_put=_copied)
    with (
        mock.patch.object(callback, "api", api),
        mock.patch.object(shared_memory, "_to_int", _to_int),
        mock.patch.object(thread_map, "_run_jaxpr", numpy_jaxprs.evaluate),
        mock.patch.object(thread_map, "thread_map", _thread_map),
        mock.patch.dict(numpy_jaxprs.RULES, {"mpmd_map": _kernel}),
    ):
        yield


def run(function: Callable[..., Any], *arrays: Any) -> Any:
    """``function(*arrays)`` as NumPy arrays, inside of an interpreter."""
    return traced(function, *arrays)(*arrays)


def traced(function: Callable[..., Any], *arrays: Any) -> Callable[..., Any]:
    """The same for any arrays of these shapes."""
    if jax.__version_info__ >= (0, 12):
        return numpy_jaxprs.traced(function, *arrays)
    # A new function each time, so that nothing traced before is reused.
    jitted = jax.jit(lambda *arrays: function(*arrays))
    return lambda *arrays: jax.tree.map(np.asarray, jitted(*arrays))


def _kernel(params, _):
    """The program as which JAX interprets a kernel, evaluated by NumPy, too."""

    # It completes the parameters, and would lower the interpreter's program.
    completed: Any = mpmd._mpmd_map_fallback_lowering

    def interpret(_, *args, interpret, **params):
        return interpret_pallas_call.interpret_pallas_call(
            *args, interpret_params=interpret, **params
        )

    def program(*args):
        context = SimpleNamespace(avals_in=[jax.typeof(x) for x in args])
        with mock.patch.object(pallas_call, "_pallas_call_lowering", interpret):
            return list(completed(context, *args, **params))

    programs: list[Any] = []

    def run(*args):
        if not programs:
            programs.append(jax.make_jaxpr(program)(*args))
        return numpy_jaxprs.evaluate(programs[0], programs[0].consts, *args)

    return run


def _thread_map(
    f, num_threads, token, *args, use_ordered_callback=False, device_id=None, **options
):
    """As JAX's, of one thread, too, which that would make a part of the program around it."""

    def of_thread(thread, *args):
        return f(thread, jnp.int32(thread_map.NESTED_TOKEN_VALUE), *args)

    jaxpr = jax.make_jaxpr(of_thread)(jnp.int32(0), *args)
    of_callback = use_ordered_callback, options["on_exception"]
    return thread_map._call_threadmap_callback(
        token, device_id, jaxpr, num_threads, jaxpr.consts, args, *of_callback
    )


def _copied(args, _):
    """Numbers as NumPy's. XLA lends the memory of arguments for the call alone."""
    return [np.array(x)[()] for x in args]


def _to_int(x, original=shared_memory._to_int):
    return int(x) if isinstance(x, np.integer) else original(x)
