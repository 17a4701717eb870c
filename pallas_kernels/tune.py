"""Finds the fastest tile configs for this GPU: ``python -m pallas_kernels.tune``.

Every candidate is compiled, compared with the ``xla`` implementation, and then timed. Prints a
table, fastest first, and the entry for ``configs.py`` of ``mosaic/sm80`` or ``mosaic/sm90``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    XLA,
    AttentionInputs,
    AttentionSpec,
    Implementation,
    KVSide,
    QuerySide,
    mosaic_sm80,
    mosaic_sm90,
)
from pallas_kernels.choice import obstacle_of
from pallas_kernels.mosaic.sm80 import configs as sm80
from pallas_kernels.mosaic.sm80.configs import BackwardConfig, ForwardConfig
from pallas_kernels.mosaic.sm90.backward_forms import (
    FORMS,
    SHARED_KEYS,
    WIDEST_NARROW_HEAD_DIM,
    BackwardForm,
)
from pallas_kernels.mosaic.sm90.configs import (
    SHARED_MEMORY,
    MosaicConfig,
    moves_registers,
    wide_backward_config,
)
from pallas_kernels.mosaic.sm90.shared_memory import BackwardMemory, ForwardMemory
from pallas_kernels.timing import median_time, relative_error


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation's search.

    Attributes:
      config: makes each kernel's tile configs.
      make: returns the implementation with ``forward_config`` or ``backward_config``.
      space: ``(kernel, head_dim, value_dim) -> candidates``.
      syntax: of a config on the command line.
      entry: format of the line for ``configs.py``, with the fields ``kernel``, ``dims`` (H, and Hv
        if it differs), ``name`` of the config's type, and ``tiles``.
    """

    config: Mapping[str, Callable[..., Any]]
    make: Callable[..., Implementation]
    space: Callable[[str, int, int], Iterable[Any]]
    syntax: str
    entry: str

    def parse(self, kernel: str, text: str) -> Any:
        """A config from the command line: numbers in the order of its fields, then NAME=VALUE."""
        parts = [part.partition("=") for part in text.split(",")]
        numbers = [int(number) for number, equals, _ in parts if not equals]
        named = {name: _value(text) for name, equals, text in parts if equals}
        return self.config[kernel](*numbers, **named)


def _value(text: str) -> int | BackwardForm:
    """A number on the command line, or True, False or a form, as entries are printed."""
    named = {"True": True, "False": False, **FORMS}
    return named[text] if text in named else int(text)


def sm80_space(kernel: str, head_dim: int, value_dim: int) -> Iterable[Any]:
    """Candidates that fit in an A100's shared memory."""
    if kernel == "forward":
        configs = (ForwardConfig(*x) for x in itertools.product((64, 128), (32, 64, 128)))
    else:
        sizes = itertools.product((64, 128), (64, 128), (1, 2))
        configs = (BackwardConfig(*x) for x in sizes)
    return (x for x in configs if x.shared_memory(head_dim, value_dim) <= sm80.SHARED_MEMORY)


def mosaic_config(*numbers: Any, **named: Any) -> MosaicConfig:
    """A config, without a producer warpgroup if the installed JAX moves no registers."""
    options: Any = {"producer_warpgroup": moves_registers(), **named}
    return MosaicConfig(*numbers, **options)


def mosaic_space(kernel: str, head_dim: int, value_dim: int) -> Iterable[MosaicConfig]:
    """Candidates that fit in shared memory, forward together with the float32 o of a carry.

    If the installed JAX moves registers between warpgroups, they have a producer warpgroup. If not,
    there are candidates with one and without: two consumers and a producer have 168 registers each,
    two consumers alone 255.
    """
    dims = head_dim, value_dim
    for producer in (True,) if moves_registers() else (False, True):
        if kernel == "forward":
            configs, memory = _forward_configs(producer), _forward_memory
        elif max(dims) > WIDEST_NARROW_HEAD_DIM:
            configs, memory = _wide_backward_configs(producer, *dims), _backward_memory
        else:
            configs, memory = _backward_configs(producer, max(dims)), _backward_memory
        for config in configs:
            if memory(config, *dims).nbytes <= SHARED_MEMORY:
                yield config


def _forward_configs(producer: bool) -> Iterable[MosaicConfig]:
    # Next to a producer, three consumers with equal registers would have 128 each: too few.
    queries = (128,) if producer and not moves_registers() else (128, 192)
    # Consumers that start copies need a third stage of values, and no other CTA's consumers.
    options = [{"cluster": n} for n in (1, 2)] if producer else [{}, {"v_stages": 3}]
    keys = 64, 96, 112, 128, 192, 256
    for option, numbers in itertools.product(options, itertools.product(queries, keys, (2, 3, 4))):
        yield mosaic_config(*numbers, **option, producer_warpgroup=producer)


def _backward_configs(producer: bool, widest: int) -> Iterable[MosaicConfig]:
    # Wider heads leave no registers for 128 queries.
    queries = (64, 128) if widest <= 64 else (64,)
    if producer and not moves_registers():
        # 168 registers hold dK, dV and the scores of 64 queries up to head dim 64.
        queries = (64,) if widest <= 64 else ()
    counts = (2, 3, 4) if producer else (3, 4)
    for block_q, stages, do_stages in itertools.product(queries, counts, (None, 2, 3)):
        if do_stages is None or do_stages < stages:
            yield mosaic_config(block_q, 128, stages, do_stages, producer_warpgroup=producer)


def _wide_backward_configs(producer: bool, head_dim: int, value_dim: int) -> Iterable[MosaicConfig]:
    if producer and not moves_registers():
        return  # dK and dV alone take most of 168 registers.
    shipped = wide_backward_config(head_dim, value_dim)
    forms = {SHARED_KEYS: None, shipped.form: shipped.do_stages}
    for (form, do_stages), stages in itertools.product(forms.items(), (2, 3)):
        options = {"form": form, "producer_warpgroup": producer}
        yield mosaic_config(64, form.block_kv, stages, do_stages, **options)


def _forward_memory(config: MosaicConfig, head_dim: int, value_dim: int) -> ForwardMemory:
    carry = {"carry_dtype": jnp.float32, "value_dim": value_dim}
    return ForwardMemory.of(config, head_dim, jnp.bfloat16, jnp.float32, **carry)


def _backward_memory(config: MosaicConfig, head_dim: int, value_dim: int) -> BackwardMemory:
    return BackwardMemory.of(config, head_dim, jnp.bfloat16, value_dim)


# Number of matrix products with 2 T S H and with 2 T S Hv operations.
MATMULS = {"forward": (1, 1), "backward": (3, 2)}
# Kernels that spill registers run slowly; no compiler option rejects them.
BACKENDS = {
    "mosaic_sm80": Backend(
        config={"forward": ForwardConfig, "backward": BackwardConfig},
        make=mosaic_sm80,
        space=sm80_space,
        syntax="Q,KV[,STAGES of backward]",
        entry="{kernel}_config({dims}): {name}{tiles}",
    ),
    # One kernel computes all gradients. It sums dQ in the order in which CTAs arrive, so results
    # differ from run to run, and from xla's, in the order of float32 sums only.
    "mosaic_sm90": Backend(
        config={"forward": mosaic_config, "backward": mosaic_config},
        make=mosaic_sm90,
        space=mosaic_space,
        syntax="Q,KV,STAGES[,DO_STAGES][,cluster=2][,form=SHARED_KEYS][,producer_warpgroup=0 or 1]",
        entry="{kernel}_config({dims}): {name}{tiles}",
    ),
}


class Measurement:
    """One shape, its arrays, and the results every candidate must reproduce.

    Attributes:
      scores: number of scores that count, over the batch and all query heads.
    """

    def __init__(self, args: argparse.Namespace):
        batch, length, heads, kv_heads, dim = args.shape
        dtype = jnp.dtype(args.dtype)
        self.backend: Backend = BACKENDS[args.implementation]
        keys = jax.random.split(jax.random.key(args.seed), 4)
        shapes = itertools.product((heads, kv_heads), (dim, args.value_dim))
        q, do, k, v = (
            jax.random.normal(key, (batch, length, *shape), dtype)
            for key, shape in zip(keys, shapes, strict=True)
        )
        positions = jnp.arange(length, dtype=jnp.int32)
        self.inputs = AttentionInputs(QuerySide(q, positions), KVSide(k, v, positions))
        self.spec = AttentionSpec.of(
            dim**-0.5, left=args.window, right=0 if args.causal else args.window
        )
        queries = np.arange(length)
        first = np.maximum(queries - args.window, 0) if args.window is not None else 0 * queries
        last = queries if args.causal else np.minimum(queries + (args.window or length), length - 1)
        self.scores = batch * heads * int((last - first + 1).sum())
        o, lse = self._compile(XLA, "forward")()
        delta = jnp.einsum("btnh,btnh->bnt", do.astype(jnp.float32), o)
        query = self.inputs.query._replace(do=do, stats=jnp.stack([lse, delta]))
        self.inputs = self.inputs._replace(query=query)
        self.want: dict[str, Any] = {"forward": (o, lse)}
        if set(args.kernels) != {"forward"}:
            self.want["backward"] = self._compile(XLA, "backward")()[:2]

    def _compile(self, implementation: Implementation, what: str) -> Callable[[], Any]:
        """A call of one kernel, compiled."""
        forward = what == "forward"
        bounds_of = implementation.forward_bounds if forward else implementation.backward_bounds
        bounds = jax.jit(functools.partial(bounds_of, spec=self.spec))(self.inputs)
        arrays = self.inputs, bounds
        run = jax.jit(functools.partial(getattr(implementation, what), spec=self.spec))
        return functools.partial(run.lower(*arrays).compile(), *arrays)

    def measure(self, kernel: str, config: Any, limit: float) -> float:
        """Seconds a call.

        Raises:
          ArithmeticError: the result is wrong.
        """
        call = self._compile(self.backend.make(**{f"{kernel}_config": config}), kernel)
        results, wanted = jax.tree.leaves(call()[:2]), jax.tree.leaves(self.want[kernel])
        # Each on its own: an error in o would vanish in a joint norm dominated by lse.
        error = max(relative_error(*pair) for pair in zip(results, wanted, strict=True))
        if error > limit:
            raise ArithmeticError(f"relative error {error:.2g}, at most {limit:.2g} is right")
        return median_time(call)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    tiles = (f"{name}: TILES {backend.syntax}" for name, backend in BACKENDS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"Tiles of {'. '.join(tiles)}."
    )
    parser.add_argument(
        "--implementation", choices=sorted(BACKENDS),
        help="default: mosaic_sm90 where it runs, else mosaic_sm80",
    )  # fmt: skip
    parser.add_argument(
        "--shape", type=int, nargs=5, default=(1, 16384, 32, 32, 128),
        metavar=("B", "T", "N", "K", "H"), help="batch, tokens, heads, key heads, head dim",
    )  # fmt: skip
    parser.add_argument("--value-dim", type=int, metavar="HV", help="of values (default: H)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--kernels", nargs="+", choices=list(MATMULS), default=list(MATMULS), help="default: both"
    )  # fmt: skip
    parser.add_argument("--causal", action="store_true", help="mask the future")
    parser.add_argument("--window", type=int, help="keys a query sees back, and ahead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--configs", nargs="+", metavar="TILES", help="only these, instead of the whole space"
    )
    parser.add_argument("--top", type=int, default=8, help="how many to print")
    args = parser.parse_args(given)
    _, _, heads, kv_heads, head_dim = args.shape
    if min(args.shape) < 1 or heads % kv_heads:
        parser.error(
            f"--shape is {args.shape}: all are 1 or more, and heads a multiple of key heads"
        )
    if args.value_dim is None:
        args.value_dim = head_dim
    elif args.value_dim < 1:
        parser.error(f"--value-dim is {args.value_dim}: it must be 1 or more")
    if args.top < 1 or (args.window is not None and args.window < 0):
        parser.error(f"--top is {args.top}, --window {args.window}: at least 1 and 0")
    if args.implementation is None:
        hopper = mosaic_sm90().unavailable(jax.default_backend(), compute_capability()) is None
        args.implementation = "mosaic_sm90" if hopper else "mosaic_sm80"
    backend = BACKENDS[args.implementation]
    try:
        args.configs = {
            kernel: [backend.parse(kernel, text) for text in args.configs or ()]
            for kernel in args.kernels
        }
    except (TypeError, ValueError) as error:
        parser.error(f"--configs of {args.implementation} are {backend.syntax} ({error})")
    return args


def compute_capability() -> float | None:
    """Of the first device; None if it is not an NVIDIA GPU."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return None if capability is None else float(capability)


def main() -> None:
    """Runs the search."""
    args = arguments()
    if jax.default_backend() != "gpu":
        raise SystemExit(f"tuning needs an NVIDIA GPU; JAX runs on {jax.default_backend()!r} here")
    device, problem = jax.devices()[0], Measurement(args)
    dims = args.shape[-1], args.value_dim
    value = f", Hv = {dims[1]}" if dims[1] != dims[0] else ""
    backend = problem.backend
    obstacle = obstacle_of(
        problem.backend.make(), "gpu", compute_capability(), problem.inputs,
        backward=set(args.kernels) != {"forward"},
    )  # fmt: skip
    if obstacle is not None:
        raise SystemExit(
            f"implementation {args.implementation!r} cannot run: {obstacle}; see --shape, "
            "--implementation, --kernels and --dtype"
        )
    print(f"{device.device_kind}, {args.implementation}, {args.dtype}, B T N K H =", end=" ")
    print(*args.shape, end=f"{value}\n")
    for kernel in args.kernels:
        rows, failed = [], {}
        for config in args.configs[kernel] or backend.space(kernel, *dims):
            try:
                rows.append((problem.measure(kernel, config, limit=1e-2), config))
            except Exception as error:
                failed[config] = " ".join(str(error).split())[:100]
        rows.sort(key=lambda entry: entry[0])
        print(f"{kernel}: {len(rows)} configs run, {len(failed)} failed")
        if args.configs[kernel] or not rows:
            for config, reason in failed.items():
                print(f"  failed {written(config)}: {reason}")
        for seconds, config in rows[: args.top]:
            lanes = sum(n * x for n, x in zip(MATMULS[kernel], dims, strict=True))
            rate = 2 * problem.scores * lanes / seconds / 1e12
            print(f"  {written(config):28} {seconds * 1e3:8.3f} ms {rate:6.0f} TFLOP/s")
        if rows:
            of = {"kernel": kernel, "dims": f"{dims[0]}{value}"}
            of["name"] = type(rows[0][1]).__name__
            entry = backend.entry.format(**of, tiles=written(rows[0][1]))
            print(f"  entry: {entry}", flush=True)


def as_entry(config: Any) -> tuple:
    """A config's fields as in ``configs.py``, without those that are False or None.

    A keyword-only field is text, "cluster=2", and is omitted if it has its default. For a producer
    warpgroup that is whether the installed JAX moves registers, as in :func:`mosaic_config`.
    """
    values = [(field, getattr(config, field.name)) for field in dataclasses.fields(config)]
    given = [x for field, x in values if not field.kw_only and x is not None]
    named = [
        f"{field.name}={x}"
        for field, x in values
        if field.kw_only
        and x != (moves_registers() if field.name == "producer_warpgroup" else field.default)
    ]
    return (*given, *named)


def written(config: Any) -> str:
    """:func:`as_entry` in parentheses, as code."""
    return f"({', '.join(map(str, as_entry(config)))})"


if __name__ == "__main__":
    main()
