"""Hugging Face checkpoints in the examples: loaded for inference, fine-tuned, exported.

A checkpoint is fine-tuned in full, or by LoRA next to its frozen weights. Frozen weights are in no
training checkpoint: a resumed run reads them from the Hugging Face checkpoint again.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from run_model import make_lora, model_options
from run_options import IGNORE_HELP, RunConfig

from burst_jax import ShardingRules, models
from burst_jax.command_line import file_or_folder, folder
from burst_jax.layouts.parse import LAYOUTS
from burst_jax.models import Decoder, abstract_decoder
from burst_jax.parallel.processes import by_first_process
from burst_jax.training import Optimizer, init_train_state, is_main, split_trained
from pallas_kernels import NAMES

# Files of a tokenizer, fast or slow, and of its chat templates, in one file, several or a folder.
TOKENIZER = ("*token*", "vocab.json", "merges.txt", "chat_template*", "additional_chat_templates")
# What ChatTokens reads next to a tokenizer.
CHAT = ("tokenizer_config.json", "chat_template*", "additional_chat_templates")
# Tokens that end a text, and sampling parameters.
GENERATION = "generation_config.json"


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    """Adds --model, its tokenizer, mesh, layout and dtype to a command line."""
    add = parser.add_argument
    add("--model", type=folder, required=True, help="Hugging Face checkpoint: a folder")
    add("--tokenizer", type=file_or_folder, help="a tokenizer.json (default: that of --model)")
    add("--adapter", type=folder, help="LoRA adapter of the model: a folder, as peft saves it")
    add("--ignore", nargs="+", default=[], metavar="KEY", help=IGNORE_HELP)
    add("--mesh", help="axes and sizes, like fsdp=2,seq=4 (default: seq over all devices)")
    add("--layout", choices=LAYOUTS, default="zigzag", help="sequence layout (default: zigzag)")
    add("--implementation", choices=NAMES, help="attention kernels (default: the fastest)")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default: bfloat16")


def load_for_inference(args: argparse.Namespace, mesh: Mesh) -> Decoder:
    """The decoder on a mesh, with the adapter merged into its weights.

    Raises:
      OSError, ValueError, NotImplementedError, ImportError: as :func:`burst_jax.models.load` and
        :func:`burst_jax.models.load_adapter`.
    """
    options: Any = {"mesh": mesh, "rules": ShardingRules.of(mesh), "layout": args.layout}
    options |= {"implementation": args.implementation, "ignore": args.ignore}
    model = models.load(args.model, dtype=jnp.dtype(args.dtype), **options)
    if args.adapter is None:
        return model
    return models.merge_lora(models.load_adapter(model, args.adapter))


def first_state(
    args: argparse.Namespace,
    run: RunConfig,
    optimizer: Optimizer,
    options: dict[str, Any],
    restored: Any,
) -> tuple[nnx.State, optax.OptState]:
    """Weights and optimizer state at the start of a run, new or resumed.

    Args:
      args: the command line.
      run: its configuration.
      optimizer: optimizer of the trained weights.
      options: options of the decoder.
      restored: trained weights and optimizer state of a training checkpoint, or None.
    """
    lora = make_lora(args)
    if restored is not None and lora is None:
        params, opt_state = restored
        return params, opt_state
    model = None
    if args.model is not None:
        if is_main():
            print(f"loading {args.model}", flush=True)
        model = models.load(args.model, mesh=run.mesh, **options, **model_options(args))
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


def frozen_checksum(params: nnx.State) -> dict[str, Any] | None:
    """Dtype and checksum of the frozen weights, the same on every mesh; None without LoRA."""
    frozen = jax.tree.leaves(split_trained(params)[1])
    return {"dtype": str(frozen[0].dtype), "sum": int(_sum_of_bits(frozen))} if frozen else None


@jax.jit
def _sum_of_bits(weights: list[jax.Array]) -> jax.Array:
    """A sum of integers, which wraps, so it does not depend on the order."""
    total = jnp.uint32(0)
    for weight in weights:
        bits = lax.bitcast_convert_type(weight, jnp.dtype(f"uint{8 * weight.dtype.itemsize}"))
        total = total * jnp.uint32(31) + jnp.sum(bits.astype(jnp.uint32))
    return total


def check_frozen(args: argparse.Namespace, then: Any, now: Any) -> None:
    """Raises ValueError if the frozen weights are not those the adapters were trained with.

    Checksums of different dtypes cannot be compared.
    """
    if then is not None and then["dtype"] == now["dtype"] and then != now:
        raise ValueError(
            f"--model is {args.model}, whose weights have changed: the adapters in "
            f"{args.checkpoint_dir} were trained with others; restore the weights, or use another "
            "--out and --checkpoint-dir"
        )


def copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copies the files and folders of a checkpoint that match, and what links in it point to."""
    for path in {path for pattern in patterns for path in source.glob(pattern)}:
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copy(path, target)


def replace_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copies what matches, as :func:`copy_files`, and removes from the target what matched before.

    A template that stayed would be another one than that of the training.
    """
    for path in {path for pattern in patterns for path in target.glob(pattern)}:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    copy_files(source, target, patterns)


def export(
    args: argparse.Namespace, run: RunConfig, options: dict[str, Any], params: nnx.State
) -> None:
    """Writes the fine-tuned model in --dtype, or its adapter, into --out.

    A model is complete: with the tokenizer, the chat template and the generation settings of
    --model. peft reads an adapter's generation settings from its base model.
    """
    adapter_only = args.lora_export == "adapter"
    name = "adapter" if adapter_only else "model"
    folder = args.out / name
    graphdef, _ = abstract_decoder(run.config, mesh=run.mesh, **run.axes, **options)
    model = nnx.merge(graphdef, params)

    def remove_old() -> None:
        if folder.exists():
            shutil.rmtree(folder)  # Of the same run, whose checkpoints have it all.

    def copy_rest() -> None:
        copy_files(args.model, folder, TOKENIZER if adapter_only else (*TOKENIZER, GENERATION))
        if args.tokenizer is not None:
            shutil.copy(args.tokenizer, folder / "tokenizer.json")
        if args.tokenizer is not None and args.chat:
            replace_files(args.tokenizer.parent, folder, CHAT)

    by_first_process(remove_old)
    if adapter_only:
        models.save_adapter(model, folder, base=args.model)
    else:
        models.save(model, folder, dtype=jnp.dtype(args.dtype))
    by_first_process(copy_rest)
    if is_main():
        print(f"wrote the {name} to {folder}", flush=True)
