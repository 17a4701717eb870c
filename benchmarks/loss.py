"""Benchmark of the head and cross entropy of a language model on one GPU.

The value and both gradients are compared with float64 first, and wrong implementations are not
timed. Counted FLOPs: ``2 tokens D V`` for the value, which takes one matmul, three times that with
the gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from benchmarks.command_line import add_outputs, require_gpus, require_outputs
from benchmarks.kernels import matmul_ceiling
from benchmarks.results import save_json
from burst_jax.command_line import integer
from burst_jax.training import chunked_cross_entropy
from burst_jax.training.loss import CHUNK_SIZE
from pallas_kernels.timing import median_time, relative_error

# Accepted relative errors of loss and gradients: a rounded log-sum-exp, and gradients of rounded
# logits.
_TOLERANCE = {"bfloat16": (4e-3, 2e-2), "float32": (1e-5, 2e-3)}
# Tokens per block of float64 logits.
_ROWS = 512

# (hidden [tokens, D], kernel [D, V], targets [tokens]) -> sum of losses.
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class LossShape:
    """LossShape and dtypes of a loss.

    Attributes:
      tokens: number of tokens.
      features: number of features of a hidden state, D.
      vocab: size of the vocabulary, V.
      dtype: of the hidden states.
      kernel_dtype: of the kernel.
    """

    tokens: int = 32768
    features: int = 4096
    vocab: int = 128256
    dtype: str = "bfloat16"
    kernel_dtype: str = "bfloat16"

    @property
    def flops(self) -> float:
        """FLOPs of one matmul."""
        return 2.0 * self.tokens * self.features * self.vocab


class LossInputs:
    """The arrays, and float64 results.

    Hidden states are standard normal, logits have a standard deviation of 3.
    """

    def __init__(self, sizes: LossShape):
        self.sizes = sizes
        keys = jax.random.split(jax.random.key(0), 3)
        self.hidden = jax.random.normal(keys[0], (sizes.tokens, sizes.features), sizes.dtype)
        spread = jnp.asarray(3 / math.sqrt(sizes.features), sizes.kernel_dtype)
        shape = sizes.features, sizes.vocab
        self.kernel = spread * jax.random.normal(keys[1], shape, sizes.kernel_dtype)
        self.targets = jax.random.randint(keys[2], (sizes.tokens,), 0, sizes.vocab, jnp.int32)
        self._truth = truth(self.hidden, self.kernel, self.targets)

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Hidden states, kernel and targets."""
        return self.hidden, self.kernel, self.targets

    def errors(self, **results: jax.Array) -> dict[str, float]:
        """The relative error of each result, named loss, d_hidden or d_kernel."""
        with jax.enable_x64(True):
            return {name: relative_error(x, self._truth[name]) for name, x in results.items()}


def truth(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """The sum of the losses and its gradients in float64, by autodiff of the formula.

    Returns:
      "loss", "d_hidden" and "d_kernel".
    """

    def loss(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
        logits = hidden.astype(jnp.float64) @ kernel
        picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked)

    @functools.partial(jax.jit, donate_argnums=0)
    def add(sums: Any, hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> Any:
        wide = hidden.astype(jnp.float64)
        value, (d_hidden, d_kernel) = jax.value_and_grad(loss, (0, 1))(wide, kernel, targets)
        return (sums[0] + value, sums[1] + d_kernel), d_hidden

    with jax.enable_x64(True):
        kernel = kernel.astype(jnp.float64)
        sums: Any = jnp.zeros((), jnp.float64), jnp.zeros_like(kernel)
        parts = []
        for start in range(0, hidden.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            sums, d_hidden = add(sums, hidden[rows], kernel, targets[rows])
            parts.append(d_hidden)
        return {"loss": sums[0], "d_hidden": jnp.concatenate(parts), "d_kernel": sums[1]}


def ours(chunk_size: int) -> Loss:
    """:func:`burst_jax.training.chunked_cross_entropy` on a mesh of this one device."""
    kinds = (AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("seq",), axis_types=kinds, devices=jax.devices()[:1])

    def loss(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
        return chunked_cross_entropy(
            hidden[None], kernel, targets[None], mesh=mesh, chunk_size=chunk_size
        )[0]

    return loss


def materialized(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
    """Materialized logits in the dtype of the hidden states, cross entropy in float32."""
    logits = (hidden @ kernel.astype(hidden.dtype)).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked)


def tokamax(implementation: str) -> Loss:
    """One of tokamax's implementations."""

    def loss(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
        import tokamax  # pyrefly: ignore[missing-import]  # Not a dependency; measured where it is.

        return tokamax.linear_softmax_cross_entropy_loss(
            hidden, targets, kernel.astype(hidden.dtype), implementation=implementation
        )

    return loss


def peers(chunk_sizes: list[int]) -> dict[str, Loss]:
    """The measured losses by name."""
    others = {"materialized logits": materialized}
    if importlib.util.find_spec("tokamax") is not None:
        others |= {f"tokamax, {name}": tokamax(name) for name in ("xla", "chunked_xla")}
    return {f"fused, chunks of {size:,}": ours(size) for size in chunk_sizes} | others


def measure(inputs: LossInputs, name: str, loss: Loss) -> dict[str, Any]:
    """Checks and times one implementation.

    Args:
      inputs: the arrays.
      name: of the implementation.
      loss: the implementation.

    Returns:
      A row of the table: "name"; "value" and "both", seconds of the value and of value and
      gradients; "gib", temporary memory of the latter; "loss_error" and "gradient_error", the
      largest relative errors; "note", why it was not timed, or empty. Missing values are None.
    """
    row: dict[str, Any] = dict.fromkeys(("value", "both", "gib", "loss_error", "gradient_error"))
    row |= {"name": name, "note": ""}
    arrays = inputs.arrays
    try:
        value = jax.jit(loss).lower(*arrays).compile()
        both = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
        total, (d_hidden, d_kernel) = both(*arrays)
        errors = inputs.errors(loss=total, d_hidden=d_hidden, d_kernel=d_kernel)
        errors["value alone"] = inputs.errors(loss=value(*arrays))["loss"]
        del total, d_hidden, d_kernel
    except Exception as error:  # The table has the reason, and the benchmark continues.
        row["note"] = " ".join(f"{type(error).__name__}: {error}".split())[:60]
        return row
    row["loss_error"] = max(errors.pop("loss"), errors.pop("value alone"))
    row["gradient_error"] = max(errors.values())
    kinds = zip(("loss_error", "gradient_error"), _TOLERANCE[inputs.sizes.dtype], strict=True)
    if wrong := [name for name, limit in kinds if not row[name] <= limit]:
        said = ", ".join(f"{name.replace('_', ' ')} {row[name]:.1e}" for name in wrong)
        # JSON has no infinity, the error of a result that is not finite.
        row |= {name: None for name in wrong if math.isinf(row[name])}
        row["note"] = f"wrong: {said}; not timed"
        return row
    memory: Any = both.memory_analysis()
    row["gib"] = None if memory is None else memory.temp_size_in_bytes / 2**30
    row["value"] = median_time(lambda: value(*arrays))
    row["both"] = median_time(lambda: both(*arrays))
    return row


def add_command(commands: Any) -> None:
    """Adds ``loss`` to the command line."""
    parser = commands.add_parser("loss", help=__doc__.splitlines()[0])
    for name in ("tokens", "features", "vocab"):
        parser.add_argument(f"--{name}", type=integer(1), default=getattr(LossShape, name))
    for name in ("dtype", "kernel_dtype"):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, choices=sorted(_TOLERANCE), default=getattr(LossShape, name))
    parser.add_argument(
        "--chunk-sizes", nargs="+", type=integer(1), default=[CHUNK_SIZE], metavar="TOKENS"
    )
    add_outputs(parser, png=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the table and saves it."""
    require_gpus("benchmarks loss")
    require_outputs(args.json)
    sizes = LossShape(args.tokens, args.features, args.vocab, args.dtype, args.kernel_dtype)
    kind, ceiling = jax.devices()[0].device_kind, matmul_ceiling(sizes.dtype)
    print(
        f"{kind}, jax {jax.__version__}; {sizes.tokens:,} tokens, {sizes.features:,} features in "
        f"{sizes.dtype}, vocabulary {sizes.vocab:,} in {sizes.kernel_dtype}; a large matmul: "
        f"{ceiling:.0f} TFLOP/s\n"
        "ms (fraction of the matmul's rate, for one matmul, and for three with gradients);\n"
        "GiB of temporaries; relative errors of loss and gradients\n"
    )
    heading = f"{'loss':26}{'value':>16}{'with gradients':>18}{'GiB':>8}{'errors':>18}"
    print(heading + "\n" + "-" * len(heading))
    inputs, rows = LossInputs(sizes), []
    for name, loss in peers(args.chunk_sizes).items():
        rows.append(measure(inputs, name, loss))
        print(_line(rows[-1], sizes.flops * 1e-12 / ceiling), flush=True)
        if args.json is not None:  # After every row: a later failure loses none.
            record = {
                "device": kind, "jax": jax.__version__, "matmul": ceiling,
                **dataclasses.asdict(sizes), "rows": rows,
            }  # fmt: skip
            save_json(record, args.json)


def _line(row: dict[str, Any], least: float) -> str:
    """A row of the table; ``least``: seconds of one matmul at the rate of a large one."""
    if row["note"]:
        return f"{row['name']:26}  {row['note']}"
    cells = (
        f"{1e3 * row[name]:.1f} ({count * least / row[name]:.0%})"
        for name, count in (("value", 1), ("both", 3))
    )
    value, both = cells
    memory = "-" if row["gib"] is None else f"{row['gib']:.2f}"
    errors = f"{row['loss_error']:.1e} {row['gradient_error']:.1e}"
    return f"{row['name']:26}{value:>16}{both:>18}{memory:>8}{errors:>18}"
