"""Times the kernels and FlashAttention-4 in turns, on the same arrays and one Hopper GPU.

FlashAttention-4 runs in torch, in the same process.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import require_gpus, require_outputs
from benchmarks.kernel_cases import Case, arrays_of
from benchmarks.kernels import matmul_ceiling, with_gradients
from benchmarks.results import Results
from benchmarks.turns import Side, add_options, compare_cases, with_arrays
from burst_jax.command_line import Unusable


def ours(case: Case, arrays: tuple[jax.Array, ...]) -> Side:
    """This project's kernels, as :func:`burst_jax.local_attention` chooses them.

    Segment ids are an argument of the compiled functions, as in training.
    """
    attend, others = with_arrays(case.arguments())
    forward, both = jax.jit(attend), with_gradients(attend)
    return Side(
        "burst-jax",
        lambda: forward(*arrays[:3], *others),
        lambda: both(*arrays, *others),
        jax.block_until_ready,
    )


def flash_attention_4(case: Case, arrays: tuple[jax.Array, ...]) -> Side:
    """FlashAttention-4 on the same arrays; packed documents as sequences of their own length."""
    torch: Any = importlib.import_module("torch")
    flash: Any = importlib.import_module("flash_attn.cute")
    q, k, v, do = (torch.from_dlpack(x).clone() for x in arrays)
    options: dict[str, Any] = {"causal": case.is_causal}
    if case.window is not None:
        options = {"window_size": (case.window - 1, 0)}
    ids, attend = case.segment_ids(), flash.flash_attn_func
    if ids is not None:
        sizes = [size for row in ids for size in np.bincount(row)[1:].tolist()]
        ends = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32, device="cuda")
        options |= {f"cu_seqlens_{side}": ends for side in "qk"}
        options |= {f"max_seqlen_{side}": max(sizes) for side in "qk"}
        q, k, v, do = (x.flatten(0, 1) for x in (q, k, v, do))
        attend = flash.flash_attn_varlen_func
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def run() -> Any:
        results = attend(*inputs, **options)
        return results[0] if isinstance(results, tuple) else results

    def forward() -> Any:
        with torch.no_grad():
            return run()

    def both() -> Any:
        out = run()
        return out.detach(), *torch.autograd.grad(out, inputs, do)

    return Side(
        "FlashAttention-4", forward, both,
        wait=lambda _: torch.cuda.synchronize(),
        to_jax=lambda results: [jax.dlpack.from_dlpack(x.contiguous()) for x in results],
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """The command."""
    require_gpus("benchmarks flash")
    require_outputs(args.json)
    for module in ("torch", "flash_attn.cute"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Unusable(
                f"benchmarks flash needs torch and flash-attn-4 ({error}); install them with: "
                "pip install torch flash-attn-4==4.0.0b36 (pre-releases only)"
            ) from error
    results = Results(
        jax.devices()[0].device_kind, jax.__version__, "bfloat16", matmul_ceiling(jnp.bfloat16)
    )
    print(
        f"{results.device}, jax {results.jax}; a large matmul: {results.matmul:.0f} TFLOP/s\n"
        "TFLOP/s forward / forward and backward: FlashAttention-4; burst-jax; ratio; difference"
    )

    def sides(case: Case) -> list[Side]:
        arrays = arrays_of(case)
        return [flash_attention_4(case, arrays), ours(case, arrays)]

    compare_cases(args, results, sides)


def add_command(commands: Any) -> None:
    """Adds ``flash`` to the benchmarks' command line."""
    parser = commands.add_parser("flash", help=__doc__.splitlines()[0])
    add_options(parser)
    parser.set_defaults(run=run)
