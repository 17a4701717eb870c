"""Model folders in a training run: what it begins with, and what it writes at the end.

A folder is fine-tuned whole, or by low-rank adapters beside its frozen weights. Frozen weights are
in no checkpoint: a run that goes on reads them from the folder again.
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from run_options import Run, make_lora, model_options

from burst_jax import models
from burst_jax.models import Decoder, abstract_decoder
from burst_jax.parallel.processes import by_first_process
from burst_jax.training import Optimizer, init_train_state, is_main, split_trained


def load_model(args: argparse.Namespace, run: Run, options: dict[str, Any]) -> Decoder:
    """The decoder of ``--model``, without adapters."""
    if is_main():
        print(f"loading {args.model}", flush=True)
    return models.load(args.model, mesh=run.mesh, **options, **model_options(args))


def first_state(
    args: argparse.Namespace,
    run: Run,
    optimizer: Optimizer,
    options: dict[str, Any],
    restored: Any,
) -> tuple[nnx.State, optax.OptState]:
    """Weights and optimizer state that a run begins with, or goes on with.

    Args:
      args: the command line.
      run: what it asks for.
      optimizer: of the weights that are trained.
      options: of the decoder.
      restored: of a checkpoint the weights that are trained, and the optimizer's state; or None.
    """
    lora = make_lora(args)
    if restored is not None and lora is None:
        params, opt_state = restored
        return params, opt_state
    model = None if args.model is None else load_model(args, run, options)
    if restored is not None and model is not None:
        adapters, opt_state = restored
        return nnx.merge_state(adapters, nnx.state(model)), opt_state
    if model is not None and lora is not None:
        model = models.add_lora(
            model, lora.rank, alpha=lora.alpha, targets=lora.targets, seed=args.seed
        )
    weights = None if model is None else nnx.state(model)
    _, params, opt_state = init_train_state(
        run.config, optimizer, run.mesh, args.seed, params=weights, **options
    )
    return params, opt_state


def frozen_mark(params: nnx.State) -> dict[str, Any] | None:
    """A number that tells the frozen weights from others, on every mesh, and their dtype.

    None if all weights are trained, so that a checkpoint has them.
    """
    frozen = jax.tree.leaves(split_trained(params)[1])
    return {"dtype": str(frozen[0].dtype), "sum": int(_sum_of_bits(frozen))} if frozen else None


@jax.jit
def _sum_of_bits(weights: list[jax.Array]) -> jax.Array:
    """Integers wrap, so the sum is the same in every order."""
    total = jnp.uint32(0)
    for weight in weights:
        bits = lax.bitcast_convert_type(weight, jnp.dtype(f"uint{8 * weight.dtype.itemsize}"))
        total = total * jnp.uint32(31) + jnp.sum(bits.astype(jnp.uint32))
    return total


def check_frozen(args: argparse.Namespace, then: Any, now: Any) -> None:
    """Raises ValueError if a checkpoint's adapters were trained beside other weights.

    In another dtype the same weights have another sum, so nothing can be said.
    """
    if then is not None and then["dtype"] == now["dtype"] and then != now:
        raise ValueError(
            f"--model is {args.model}, whose weights have changed: the adapters in "
            f"{args.checkpoint_dir} were trained beside others; give the folder its weights again, "
            "or use another --out and --checkpoint-dir"
        )


def export(args: argparse.Namespace, run: Run, options: dict[str, Any], params: nnx.State) -> None:
    """Writes a fine-tuned model as a folder of transformers, or its adapters as one of peft.

    Its tokenizer lies beside it. A model is written in ``--dtype``.
    """
    adapters_alone = args.lora_export == "adapter"
    folder = args.out / ("adapter" if adapters_alone else "model")
    graphdef, _ = abstract_decoder(run.config, mesh=run.mesh, rules=run.rules, **options)
    model = nnx.merge(graphdef, params)

    def make_room() -> None:
        if folder.exists():
            shutil.rmtree(folder)  # Of the same run: its checkpoints have it all.

    def copy_tokenizer() -> None:
        for file in args.model.glob("*token*"):
            shutil.copy(file, folder)

    by_first_process(make_room)
    if adapters_alone:
        models.save_adapter(model, folder, base=args.model)
    else:
        models.save(model, folder, dtype=jnp.dtype(args.dtype))
    by_first_process(copy_tokenizer)
    if is_main():
        print(f"the {'adapter' if adapters_alone else 'model'} is in {folder}", flush=True)
