"""Times a jitted training step of a language model on all GPUs present: ``bench train``.

Layers of a 7B model's shape, rematerialised but for attention's results, on one long row. Sequence
parallel in every layout (contiguous is plain Ring Attention), and tensor parallel by heads with the
same kernels: every device has the whole sequence and a part of the heads and of the MLP.
All take the same first step from the same weights; one whose loss or whose gradients' norm differs
is no row of the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.bench.links import links_of
from burst_jax.bench.needs import add_outputs, need_gpus, need_outputs, positive
from burst_jax.bench.results import gib, replacing
from burst_jax.layout import check_length
from burst_jax.models import DecoderConfig
from burst_jax.platform import peak_flops
from burst_jax.training import init_train_state, make_batch, make_optimizer, make_train_step

CONFIG = DecoderConfig(
    vocab_size=32000, num_layers=4, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128,
    mlp_dim=14336, qk_norm=False, dtype=jnp.bfloat16,
)  # fmt: skip
WAYS = ("zigzag", "striped", "contiguous", "tensor parallel")
# How a weight is split by heads, by the name of its layer: [layers, in, out] or with heads.
_BY_HEADS = {
    "query": P(None, None, "heads"),
    "key": P(None, None, "heads"),
    "value": P(None, None, "heads"),
    "out": P(None, "heads"),
    "gate": P(None, None, "heads"),
    "up": P(None, None, "heads"),
    "down": P(None, "heads"),
}
# By how much of the first way's another may differ: each rounds on its own. Of uniformly random
# tokens unrelated weights, too, have losses within a thousandth or so.
_AGREE = {"loss": 1e-4, "grad_norm": 5e-3}


class Run:
    """A model, its states and its one batch on the devices; calling it takes a step."""

    def __init__(self, config: DecoderConfig, way: str, length: int, n: int):
        split = way == "tensor parallel"
        shape, kinds = (1, n) if split else (n, 1), (AxisType.Auto,) * 2
        devices = jax.devices()[:n]
        mesh = jax.make_mesh(shape, ("seq", "heads"), axis_types=kinds, devices=devices)
        options: dict[str, Any] = {"head_axis": "heads"} if split else {"layout": way}
        optimizer = make_optimizer(1e-4, 100)
        graphdef, params, state = init_train_state(config, optimizer, mesh, 0, **options)
        if split:
            params, state = (_by_heads(tree, mesh) for tree in (params, state))
        rows = np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1))
        batch = make_batch(
            rows, layout=options.get("layout", "contiguous"), num_shards=mesh.shape["seq"]
        )
        self._batch = jax.device_put(batch, NamedSharding(mesh, P(None, ("seq", "heads"))))
        step = make_train_step(graphdef, optimizer, token_axes=("seq", "heads"))
        self._program = step.trace(params, state, self._batch).lower().compile()
        self._states = params, state

    def __call__(self) -> dict[str, float]:
        """The step's metrics, once it is done: loss and gradients are those before it."""
        params, state, metrics = self._program(*self._states, self._batch)
        self._states = params, state
        jax.block_until_ready(self._states)
        return {name: float(metrics[name]) for name in _AGREE}

    @property
    def gib(self) -> float:
        """GiB per device: states, batch and all that a step needs."""
        return gib(self._program)


def _by_heads(tree: Any, mesh: Any) -> Any:
    """The weights of a decoder, or what an optimizer keeps of them, split by heads."""

    def place(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        names = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        spec = next((_BY_HEADS[name] for name in names if name in _BY_HEADS), P())
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, tree)


def measure(config: DecoderConfig, way: str, length: int, n: int, steps: int) -> dict[str, Any]:
    """One row: seconds of the median step and of its transfers, its first metrics, GiB per device.

    Raises:
      ValueError: the way cannot split such a length, or the model, over so many devices.
    """
    if way != "tensor parallel":  # Else batches are padded, which takes time and other kernels.
        check_length(way, length, n)
    run = Run(config, way, length, n)
    first, seconds = run(), []
    for _ in range(steps):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    median = float(np.median(seconds))
    spent = links_of(run)
    return {
        "way": way, "length": length, "seconds": median, **first, "gib": run.gib,
        "links": spent.busy, "bare": spent.bare,
    }  # fmt: skip


def add_command(commands: Any) -> None:
    """Adds ``train`` to the command line."""
    parser = commands.add_parser("train", help=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", nargs="+", type=positive, default=[65536, 131072, 262144], metavar="TOKENS"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--layers", type=positive, default=CONFIG.num_layers)
    parser.add_argument("--steps", type=positive, default=3, help="timed, after one that is not")
    add_outputs(parser, png=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the table and keeps it."""
    need_gpus("bench train")
    need_outputs(args.json)
    devices = jax.devices()
    n, kind = len(devices), devices[0].device_kind
    config = dataclasses.replace(CONFIG, num_layers=args.layers)
    peak = peak_flops(kind)
    heads = f"{config.num_heads}/{config.num_kv_heads} heads x {config.head_dim}"
    print(
        f"{n} x {kind}, jax {jax.__version__}; one row; {args.layers} layers of "
        f"{config.embed_dim} features, {heads}, {jnp.dtype(config.dtype).name}\n"
        "MFU: of the data sheet's peak, recomputed work not counted; GiB per device; links: ms in "
        "which a GPU's transfers ran; bare: of these, with nothing else on it\n"
    )
    heading = f"{'length':>9}  {'way':18}{'ms':>9}{'tokens/s':>11}{'MFU':>7}{'GiB':>8}{'loss':>9}"
    heading += f"{'links':>9}{'bare':>8}"
    print(heading + "\n" + "-" * len(heading))
    rows: list[dict[str, Any]] = []
    for length in args.lengths:
        first: dict[str, Any] | None = None
        for way in args.ways:
            try:
                row = measure(config, way, length, n, args.steps)
            # Out of memory, or no such split: a line of the table.
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                print(f"{length:9,}  {way:18}  {' '.join(str(error).split())[:70]}", flush=True)
                continue
            first = row if first is None else first
            off = [
                name
                for name, share in _AGREE.items()
                if not abs(row[name] - first[name]) <= share * first[name]  # nor is NaN
            ]
            flops = length * config.train_flops_per_token(length)
            row["mfu"] = None if peak is None else flops / (row["seconds"] * n * peak)
            print(_line(row, off), flush=True)
            if off:
                continue
            rows.append(row)
            if args.json is not None:  # A row takes a minute: what is measured is kept at once.
                with replacing(args.json) as file:
                    record = {"device": kind, "devices": n, "jax": jax.__version__, "rows": rows}
                    file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def _line(row: dict[str, Any], off: list[str]) -> str:
    start = f"{row['length']:9,}  {row['way']:18}"
    if off:
        return f"{start}  wrong: {', '.join(f'{name} {row[name]:.4f}' for name in off)}"
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    links, bare = (
        "-" if row[name] is None else f"{1e3 * row[name]:.1f}" for name in ("links", "bare")
    )
    return (
        f"{start}{1e3 * row['seconds']:9.1f}{row['length'] / row['seconds']:11,.0f}{mfu:>7}"
        f"{row['gib']:8.2f}{row['loss']:9.4f}{links:>9}{bare:>8}"
    )
