"""Finds the fastest Triton tiles on this GPU: ``python -m pallas_kernels.tune``.

Every candidate is compiled with register spills refused, held to the ``xla`` implementation, and
only then timed. Prints a table, fastest first, and the entry for ``triton_configs.py``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import XLA, AttentionSpec, Implementation, Tokens, triton
from pallas_kernels.timing import median_time, relative_error
from pallas_kernels.triton_configs import TritonConfig

KERNELS = ("forward", "dq", "dkv")
# Matmuls of 2 T S H floating-point operations that each kernel makes.
_MATMULS = {"forward": 2, "dq": 3, "dkv": 4}
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def space(kernel: str) -> Iterable[TritonConfig]:
    """Candidates: every warp has at least 16 rows, and 16 to 64 scores a thread."""
    registers = (False,) if kernel == "dkv" else (False, True)
    for block_q, block_kv in itertools.product((32, 64, 128), repeat=2):
        for warps, stages, rows in itertools.product((4, 8), (2, 3, 4), registers):
            rows_per_warp = (block_kv if kernel == "dkv" else block_q) / warps
            scores_per_thread = block_q * block_kv / (32 * warps)
            if rows_per_warp >= 16 and 16 <= scores_per_thread <= 64:
                yield TritonConfig(block_q, block_kv, warps, stages, rows)


class Problem:
    """One shape, its arrays, and what every candidate must give."""

    def __init__(self, args: argparse.Namespace):
        batch, length, heads, kv_heads, dim = args.shape
        dtype = jnp.dtype(args.dtype)
        keys = jax.random.split(jax.random.key(args.seed), 4)
        self.q, self.do = (
            jax.random.normal(k, (batch, length, heads, dim), dtype) for k in keys[:2]
        )
        kv = [jax.random.normal(k, (batch, length, kv_heads, dim), dtype) for k in keys[2:]]
        self.kv = (kv[0], kv[1])
        self.tokens = Tokens(jnp.arange(length, dtype=jnp.int32))
        self.spec = AttentionSpec(
            dim**-0.5, left=args.window, right=0 if args.causal else args.window
        )
        at = np.arange(length)
        first = np.maximum(at - args.window, 0) if args.window is not None else 0 * at
        last = at if args.causal else np.minimum(at + (args.window or length), length - 1)
        self.flops = 2 * batch * heads * dim * int((last - first + 1).sum())
        o, lse = self._compile(XLA, "forward")()
        delta = jnp.einsum("btnh,btnh->bnt", self.do.astype(jnp.float32), o)
        self.stats = (lse, delta)
        self.want: dict[str, Any] = {"forward": (o, lse)}
        if {"dq", "dkv"} & set(args.kernels):
            dq, dkv = self._compile(XLA, "backward")()
            self.want |= {"dq": dq, "dkv": dkv}

    def _compile(self, local: Implementation, what: str, **options: bool) -> Callable[[], Any]:
        """A call of one kernel, compiled."""
        forward = what == "forward"
        bounds_of = local.forward_bounds if forward else local.backward_bounds
        bounds = jax.jit(functools.partial(bounds_of, self.spec))(
            self.q, self.kv, self.tokens, self.tokens
        )
        queries = (self.q, self.kv) if forward else ((self.q, self.do), self.kv, self.stats)
        arrays = (*queries, self.tokens, self.tokens, bounds)
        name = what if what in ("forward", "backward") else f"backward_{what}"
        run = jax.jit(functools.partial(getattr(local, name), spec=self.spec))
        return functools.partial(run.lower(*arrays).compile(compiler_options=options), *arrays)

    def measure(self, kernel: str, config: TritonConfig, limit: float) -> float:
        """Seconds a call.

        Raises:
          ArithmeticError: the result is wrong.
        """
        call = self._compile(triton(config=config), kernel, **NO_SPILLS)
        error = relative_error(call(), self.want[kernel])
        if error > limit:
            raise ArithmeticError(f"relative error {error:.2g}, at most {limit:.2g} is right")
        return median_time(call)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", type=int, nargs=5, default=(1, 16384, 32, 32, 128),
        metavar=("B", "T", "N", "K", "H"), help="batch, tokens, heads, key heads, head dim",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--causal", action="store_true", help="mask the future")
    parser.add_argument("--window", type=int, help="keys a query sees back, and ahead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--configs", nargs="+", metavar="Q,KV,WARPS,STAGES[,1]",
        help="only these tiles, instead of the whole space; 1: rows in registers",
    )  # fmt: skip
    parser.add_argument("--top", type=int, default=8, help="how many to print")
    return parser.parse_args(given)


def main() -> None:
    """Runs the search."""
    args = arguments()
    if jax.default_backend() != "gpu":
        raise SystemExit(f"tuning needs an NVIDIA GPU; JAX runs on {jax.default_backend()!r} here")
    device = jax.devices()[0]
    problem = Problem(args)
    limit = 1e-5 if args.dtype == "float32" else 1e-2
    print(f"{device.device_kind}, {args.dtype}, B T N K H = {' '.join(map(str, args.shape))}")
    for kernel in args.kernels:
        rows, refused = [], {}
        candidates = [parse_entry(text) for text in args.configs] if args.configs else space(kernel)
        for config in candidates:
            try:
                rows.append((problem.measure(kernel, config, limit), config))
            except Exception as error:
                refused[config] = " ".join(str(error).split())[:100]
                if args.configs:
                    print(f"  refused {as_entry(config)}: {refused[config]}")
        rows.sort(key=lambda entry: entry[0])
        print(f"{kernel}: {len(rows)} configs run, {len(refused)} refused")
        for seconds, config in rows[: args.top]:
            rate = _MATMULS[kernel] * problem.flops / seconds / 1e12
            print(f"  {as_entry(config)!s:28} {seconds * 1e3:8.3f} ms {rate:6.0f} TFLOP/s")
        if rows:
            print(f"  entry: {args.shape[-1]}: {as_entry(rows[0][1])}", flush=True)


def parse_entry(text: str) -> TritonConfig:
    """A config from the command line: ``64,128,8,3``, or with ``,1`` rows in registers."""
    block_q, block_kv, warps, stages, *registers = (int(number) for number in text.split(","))
    return TritonConfig(block_q, block_kv, warps, stages, bool(registers and registers[0]))


def as_entry(config: TritonConfig) -> tuple:
    """A config as the table writes it."""
    entry = (config.block_q, config.block_kv, config.num_warps, config.num_stages)
    return (*entry, True) if config.rows_in_registers else entry


if __name__ == "__main__":
    main()
