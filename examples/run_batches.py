"""The batches of ``train_lm.py``: loaded, ordered by the layout, sharded over a mesh."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from run_mesh import BATCH_AXES, ring_size, token_axes
from run_options import RunConfig
from work_log import WorkLog

from burst_jax.data import Corpus, Loader, Rows
from burst_jax.layouts import document_tables
from burst_jax.layouts.parse import parse_layout
from burst_jax.models import DecoderConfig
from burst_jax.training import (
    Batch,
    TrainStep,
    make_batch,
    place_batch,
    rows_here,
)


class Placed(NamedTuple):
    """A batch on a mesh.

    Attributes:
      batch: its arrays.
      layout: its layout: with ``--layout balanced`` each batch has its own.
      work: metrics of the ring's work on it.
    """

    batch: Batch[jax.Array]
    layout: str
    work: dict[str, float]


def make_loader(args: argparse.Namespace, run: RunConfig, corpus: Corpus) -> Loader:
    """A loader of the sequences that this process' devices hold."""
    return Loader(
        corpus,
        seq_len=args.seq_len,
        batch=args.batch,
        rows=rows_here(run.mesh, args.batch, batch_axis=BATCH_AXES),
        tokens=run.tokens,
        # The model's own size is rounded up, so it would accept ids that the text must not have.
        vocab_size=args.vocab_size or run.config.vocab_size,
        packing=args.packing,
        seed=args.seed,
    )


def place(
    args: argparse.Namespace,
    config: DecoderConfig,
    rows: Rows,
    mesh: Mesh,
    work_log: WorkLog | None = None,
) -> Placed:
    """Makes a batch of this process' sequences and shards it over the mesh."""
    n, (layout, *others) = ring_size(mesh), layouts(args, mesh)
    if others:
        # All devices run one program, so all processes need one layout.
        layout, batch = make_batch(
            **rows,
            layout="balanced",
            num_shards=n,
            local_window_sizes=config.local_window_sizes,
            linear_attention=config.has_linear_attention,
            process_local=True,
        )
    else:
        batch = make_batch(**rows, layout=layout, num_shards=n)
    axes: Any = {"batch_axis": BATCH_AXES, "seq_axis": token_axes(mesh)}
    work = {} if work_log is None else work_log(batch, layout)
    return Placed(place_batch(batch, mesh, **axes, process_local=True), layout, work)


def shapes(args: argparse.Namespace, mesh: Mesh) -> tuple[Any, str]:
    """Shapes and shardings of a batch of :func:`place`, and the layout that it may have."""
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES, token_axes(mesh)))

    def array(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((args.batch, args.seq_len), dtype, sharding=sharding)

    tokens = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), array(jnp.int32))
    return tokens | {"weights": array(jnp.float32)}, layouts(args, mesh)[-1]


def layouts(args: argparse.Namespace, mesh: Mesh) -> tuple[str, ...]:
    """The layouts that batches of :func:`place` may have."""
    n = ring_size(mesh)
    if n == 1:
        return ("contiguous",)  # There is nothing to balance without a ring.
    return tuple(each.name for each in parse_layout(args.layout).variants(args.seq_len // n))


def compiled_steps(
    make_step: Callable[[str], TrainStep],
    layouts: Sequence[str],
    arrays: Any,
    config: DecoderConfig,
) -> dict[str, TrainStep]:
    """The training step of each layout, compiled ahead, in threads, if there are several.

    Otherwise XLA would compile one whenever a batch is the first of its layout, and all devices
    would wait for it.

    Args:
      make_step: makes the step of a layout.
      layouts: the layouts.
      arrays: arguments of a step, in any of the layouts.
      config: the model's.
    """
    steps = {layout: make_step(layout) for layout in layouts}
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )

    def compile_ahead(layout: str) -> None:
        *state, batch = types
        given = *state, _with_tables(batch, layout, config)
        steps[layout].trace(*given).lower().compile()

    if len(steps) > 1:
        with ThreadPoolExecutor(len(steps)) as pool:
            list(pool.map(compile_ahead, steps))
    return steps


def _with_tables(batch: Any, layout: str, config: DecoderConfig) -> Any:
    """The types of a batch in another balanced layout, whose tables have other sizes."""
    inputs, padding = batch["inputs"], np.zeros(batch["inputs"].shape, np.int32)
    tables = document_tables(
        layout,
        padding,
        padding,
        batch["document_tables"].num_shards,
        local_window_sizes=config.local_window_sizes,
        linear_attention=config.has_linear_attention,
    )

    def of_table(x: np.ndarray, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(inputs.sharding.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    specs = tables.specs(*inputs.sharding.spec)
    return batch | {"document_tables": jax.tree.map(of_table, tables, specs)}
