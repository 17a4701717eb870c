"""Times what masks and score options cost relative to a plain causal call, all in turns."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import require_gpus
from benchmarks.kernel_cases import Case, arrays_of
from benchmarks.kernels import TOLERANCE, with_gradients
from benchmarks.turns import Clock, add_turns, in_turns, with_arrays
from burst_jax.command_line import Unusable
from pallas_kernels.timing import relative_error

CASE = Case("causal", 1, 16384, 32, 32, 128, is_causal=True)
PLAIN = "plain"


def neutral(case: Case) -> dict[str, dict[str, Any]]:
    """Options by name that do not change a causal result."""
    length, batch = case.length, case.batch
    lengths = np.full(batch, length, np.int32)
    ids = np.ones((batch, length), np.int32)

    def same_document(batch: Any, head: Any, q_position: Any, kv_position: Any) -> Any:
        return q_position // length == kv_position // length

    return {
        "segment ids, one document": {"query_segment_ids": ids, "key_value_segment_ids": ids},
        "prefix_lengths": {"prefix_lengths": np.ones(batch, np.int32)},
        "sequence lengths": {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths},
        "key_starts": {"key_starts": np.zeros(length, np.int32)},
        "traced window": {"local_window_size": (jnp.int32(length), 0)},
        "mask_mod, one document": {"mask_mod": same_document},
    }


def others(case: Case) -> dict[str, dict[str, Any]]:
    """Options by name that change the result."""
    per_head = dataclasses.replace(case, sinks=True, slopes=True).per_head()

    def alibi(score: Any, batch: Any, head: Any, q_position: Any, kv_position: Any) -> Any:
        slope = jnp.exp2(-8 * (head + 1).astype(jnp.float32) / case.heads)
        return score - slope * abs(q_position - kv_position).astype(jnp.float32)

    return {
        **{name: {name: x} for name, x in per_head.items()},
        "ALiBi as score_mod": {"score_mod": alibi},
        "logits_soft_cap": {"logits_soft_cap": 50.0},
        "dropout_rate": {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
    }


def measure(
    case: Case, *, turns: int, seconds: float, clock: Clock
) -> dict[str, tuple[float, float]]:
    """Milliseconds forward, and forward and backward, by option; the first is the plain call.

    Raises:
      Unusable: an option that should not change the result does.
    """
    q, k, v, do = arrays_of(case)
    unchanged = neutral(case)
    options = {PLAIN: {}, **unchanged, **others(case)}
    calls, plain = {}, ()
    for name, arguments in options.items():
        attend, arrays = with_arrays({"is_causal": True} | arguments)
        forward = functools.partial(jax.jit(attend), q, k, v, *arrays)
        both = functools.partial(with_gradients(attend), q, k, v, do, *arrays)
        if name == PLAIN:
            plain = both()
        elif name in unchanged:
            error = max(map(relative_error, both(), plain))
            if not error <= TOLERANCE["bfloat16"]:
                raise Unusable(f"{name} changes the result by {error:.1e}")
        calls[name, "forward"] = forward, jax.block_until_ready
        calls[name, "both"] = both, jax.block_until_ready
    del plain
    measured = in_turns(calls, turns=turns, seconds=seconds, clock=clock)
    times = {
        call: 1e3 * statistics.median(turn.seconds for turn in each)
        for call, each in measured.items()
    }
    return {name: (times[name, "forward"], times[name, "both"]) for name in options}


def run(args: argparse.Namespace) -> None:
    """The command."""
    require_gpus("benchmarks modifiers")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\nms forward / both; ratios")
    with Clock() as clock:
        times = measure(CASE, turns=args.turns, seconds=args.seconds, clock=clock)
    plain = times[PLAIN]
    for name, (forward, both) in times.items():
        ratios = f"{forward / plain[0]:.3f} / {both / plain[1]:.3f}"
        print(f"{name}: {forward:.2f} / {both:.2f}; {ratios}", flush=True)


def add_command(commands: Any) -> None:
    """Adds ``modifiers`` to the benchmarks' command line."""
    parser = commands.add_parser("modifiers", help=__doc__)
    add_turns(parser)
    parser.set_defaults(run=run)
