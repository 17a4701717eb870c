"""Times the sm80 kernels, compiled for an A100, on a newer GPU.

Kernels that are compiled for an A100 use its instructions (``mma.sync``, ``cp.async``) and tiles on
a newer GPU, too. FlashAttention-2 in torch uses the same instructions, and is timed for comparison.

This shows how many instructions one kernel needs, and how well they overlap, relative to another
kernel. It does not show times of an A100, which has 108 SMs at 1.41 GHz, 40 MB of L2 cache and 2
TB/s, and slower matrix units relative to the rest of the SM.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils

import burst_jax
from benchmarks.command_line import add_cases, require_gpus
from benchmarks.kernel_cases import Case, arrays_of
from benchmarks.kernels import with_gradients
from pallas_kernels import AttentionInputs, KVSide, QuerySide, mosaic_sm80
from pallas_kernels.timing import median_time

CASES = (
    Case("full", 1, 16384, 32, 32, 128, False),
    Case("causal", 1, 16384, 32, 32, 128, True),
    Case("causal, 32/8 heads", 1, 16384, 32, 8, 128, True),
    Case("full, head dim 64", 4, 4096, 32, 32, 64, False),
    Case("causal, head dim 64", 4, 4096, 32, 32, 64, True),
)
FURTHER = (
    Case("full, 4K", 1, 4096, 32, 32, 128),
    Case("causal, 4K", 1, 4096, 32, 32, 128, True),
    Case("causal, head dim 96", 1, 16384, 32, 32, 96, True),
    Case("causal, head dim 256", 1, 16384, 16, 16, 256, True),
    Case("causal, head dims (192, 128)", 1, 16384, 32, 32, 192, True, value_dim=128),
    Case("window 4096 of 64K, 32/8 heads", 1, 65536, 32, 8, 128, True, window=4096),
    Case("8 documents, causal", 1, 16384, 32, 32, 128, True, documents=8),
)
ALL_CASES = CASES + FURTHER
# A newer GPU runs them, too.
SM80 = dataclasses.replace(mosaic_sm80(), unavailable=lambda platform, compute_capability: None)


def sm80_attention(case: Case, **options: Any) -> Callable[..., jax.Array]:
    """:func:`burst_jax.local_attention` of a case, on the sm80 kernels."""
    options = case.arguments() | options
    return functools.partial(burst_jax.local_attention, implementation=SM80, **options)


def sm80_times(case: Case, **options: Any) -> tuple[float, float]:
    """Seconds of the sm80 kernels, ``(forward, forward and backward)``.

    Mosaic GPU compiles them for the GPU at hand. Told that its architecture is Ampere's, it emits
    the same instructions as for an A100.
    """
    attend, arrays = sm80_attention(case, **options), arrays_of(case)
    forward, both = jax.jit(attend), with_gradients(attend)
    with as_ampere():
        return median_time(lambda: forward(*arrays[:3])), median_time(lambda: both(*arrays))


def as_ampere() -> Any:
    """A context in which Mosaic GPU compiles for an A100."""
    return mock.patch.object(utils, "_infer_arch", return_value=(8, 0))


def carry_shares(case: Case) -> tuple[float, float]:
    """A ring step's time relative to a call of its own, ``(forward, backward)``.

    A step merges its result with the carry; its gradients are added to given ones.
    """
    (q, k, v, do), spec = arrays_of(case), case.request().spec
    positions = jnp.arange(case.length, dtype=jnp.int32)
    inputs = AttentionInputs(QuerySide(q, positions), KVSide(k, v, positions))
    backward, accumulator = SM80.backward, SM80.dq_accumulator
    assert backward is not None
    assert accumulator is not None
    with as_ampere():
        bounds, tables = (
            jax.jit(functools.partial(of, spec=spec))(inputs)
            for of in (SM80.forward_bounds, SM80.backward_bounds)
        )
        forward = jax.jit(functools.partial(SM80.forward, spec=spec))
        carried = jax.jit(functools.partial(SM80.forward, spec=spec), donate_argnums=2)
        _, lse = carry = forward(inputs, bounds)
        stats = jnp.stack([lse, jnp.zeros_like(lse)])
        with_do = inputs._replace(query=inputs.query._replace(do=do, stats=stats))
        fresh = jax.jit(functools.partial(backward, spec=spec))
        added = jax.jit(functools.partial(accumulator.add, spec=spec), donate_argnums=(2, 3))
        dq = jax.jit(functools.partial(accumulator.zeros, spec=spec))(with_do, tables)
        sums = dq, fresh(with_do, tables)[1]

        def step() -> Any:
            nonlocal carry
            carry = carried(inputs, bounds, carry)
            return carry

        def backward_step() -> Any:
            nonlocal sums
            sums = added(with_do, tables, *sums)[:2]
            return sums

        times = [
            median_time(call)
            for call in (
                step,
                lambda: forward(inputs, bounds),
                backward_step,
                lambda: fresh(with_do, tables),
            )
        ]
    return times[0] / times[1], times[2] / times[3]


def torch_times(case: Case) -> tuple[float, float] | None:
    """Seconds of torch's FlashAttention-2 forward, and with backward; None without torch.

    It pads values that are narrower than keys, as it does not support them.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    length = case.length
    q, k, v, do = (
        torch.randn(case.batch * length, heads, case.head_dim, dtype=torch.bfloat16, device="cuda")
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    for x in (q, k, v):
        x.requires_grad_()
    ids = case.segment_ids()
    row = [length] if ids is None else np.bincount(ids[0])[1:].tolist()
    sizes = row * case.batch
    ends = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32, device="cuda")
    window = {} if case.window is None else {"window_size_left": case.window - 1}
    if window:
        window["window_size_right"] = 0

    def forward() -> Any:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, max(sizes), max(sizes), 0.0, case.is_causal, False, **window
        )[0]

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), do)

    return _torch_seconds(torch, forward), _torch_seconds(torch, both)


def _torch_seconds(torch: Any, call: Callable[[], Any]) -> float:
    """Seconds of a call: the median of five rounds of ten."""
    times = []
    for _ in range(6):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(10):
            call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e4)
    return sorted(times[1:])[2]


def print_rates(cases: Sequence[Case]) -> None:
    """Prints the rates of the sm80 kernels and of FlashAttention-2, one after the other."""
    print("TFLOP/s forward / forward and backward: mosaic_sm80; FlashAttention-2; ratio")
    for case in cases:
        measured = []
        for times_of in (sm80_times, torch_times):
            try:
                measured.append(times_of(case))
            except Exception as error:  # Continue with the others.
                print(f"{case.name}: failed: " + " ".join(str(error).split())[:200])
                measured.append(None)
        tera, tera_both = 1e-12 * case.flops(), 1e-12 * case.flops_with_gradients()
        ours, theirs = (
            None if times is None else (tera / times[0], tera_both / times[1]) for times in measured
        )
        line = "; ".join("-" if x is None else f"{x[0]:.0f} / {x[1]:.0f}" for x in (ours, theirs))
        if ours is not None and theirs is not None:
            line += f"; {ours[0] / theirs[0]:.3f} / {ours[1] / theirs[1]:.3f}"
        print(f"{case.name}: {line}", flush=True)


def print_costs() -> None:
    """Prints what modifiers and a ring's carry cost relative to the causal case."""
    case = CASES[1]
    plain = sm80_times(case)
    print("time relative to causal, forward / forward and backward")
    for name, options in modifiers(case).items():
        times = sm80_times(case, **options)
        print(f"{name}: {times[0] / plain[0]:.3f} / {times[1] / plain[1]:.3f}", flush=True)
    print("a ring step relative to a call of its own, forward / backward")
    for case in CASES:
        forward, backward = carry_shares(case)
        print(f"{case.name}: {forward:.3f} / {backward:.3f}", flush=True)


def modifiers(case: Case) -> dict[str, dict[str, Any]]:
    """Arguments of attention by name, each of which alone modifies the case."""
    ids = np.ones((case.batch, case.length), np.int32)
    both = dataclasses.replace(case, sinks=True, slopes=True).per_head()
    return {
        "nothing": {},
        "sinks": {"sink_logits": both["sink_logits"]},
        "ALiBi": {"alibi_slopes": both["alibi_slopes"]},
        "segment ids": {"query_segment_ids": ids, "key_value_segment_ids": ids},
        "prefix of 512": {"prefix_lengths": np.full(case.batch, 512, np.int32)},
        "soft cap": {"logits_soft_cap": 30.0},
        "dropout": {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
    }


def run(args: argparse.Namespace) -> None:
    """The command."""
    require_gpus("benchmarks ampere")
    print_rates([ALL_CASES[case] for case in args.cases])
    print_costs()


def add_command(commands: Any) -> None:
    """Adds ``ampere`` to the benchmarks' command line."""
    parser = commands.add_parser("ampere", help=__doc__.splitlines()[0])
    add_cases(parser, [case.name for case in ALL_CASES])
    parser.set_defaults(run=run)
