"""Trains a language model on sequences that are sharded over a mesh of devices.

    python examples/train_lm.py                              # Python's own source, all devices
    python examples/train_lm.py --data notes/ --seq-len 4096 --mesh fsdp=2,seq=4
    srun python examples/train_lm.py --data notes/           # on many hosts, each a part of it

Without GPUs it makes 8 CPU devices and takes some minutes on two cores. With GPUs it takes all of
them and a bigger model. It ends with the held-out perplexity by the ring and by one device, which
must agree, and a sample. It writes metrics.jsonl, summary.json and loss.png into the folder that
``--out`` names, and checkpoints into a folder beside them. Started again with the same command it
goes on from the last checkpoint, on the same mesh or on another one. With ``--model`` it fine-tunes
a folder of transformers, and writes the result as such a folder, OUT/model; with ``--lora-rank``
beside it, it trains low-rank adapters alone, and merges them or writes OUT/adapter, a folder of
peft. metrics.jsonl has a line for each step; runs of one seed and batch size see the same data on
any mesh and any number of processes, so their lines can be compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from model_folder import check_frozen, export, first_state, frozen_mark
from reporting import RESULTS, Interrupt, can_plot, check_out, plot_loss
from run_options import SAMPLE_CONTEXT, Run, one_device, parse_args, prepare

from burst_jax.data import Corpus, Loader, Rows, gather_state
from burst_jax.models import Decoder, abstract_decoder
from burst_jax.parallel.processes import by_first_process
from burst_jax.parallel.target import peak_flops
from burst_jax.parallel.xla_options import set_compiler_options
from burst_jax.training import (
    Batch,
    CheckpointError,
    Checkpoints,
    Evaluation,
    NonFinite,
    Profile,
    Restored,
    RunLog,
    abstract_train_state,
    evaluate,
    initialize,
    is_main,
    make_batch,
    make_eval_step,
    make_optimizer,
    make_train_step,
    place_batch,
    rows_here,
    split_trained,
)
from burst_jax.training.watch import CURVES, METRICS, read_metrics, replace_file, set_aside

CPU_DEVICES = 8
# Largest relative difference of the two held-out perplexities.
TOLERANCE = 1e-4
# A run goes on from a checkpoint only with the same data and schedule; the sizes of the weights are
# compared when they are restored. Learning rate and dtype may change, on purpose.
MAY_CHANGE = ("lr", "dtype")
SAME = (
    "seq_len", "batch", "packing", "steps", "seed", "model", "moment_dtype",
    "lora_rank", "lora_alpha", "lora_targets",
)  # fmt: skip
# What a run had whose checkpoints do not say it.
UNSAID = {"moment_dtype": "float32"}
# What a run writes into --out, beside its checkpoints.
OF_A_RUN = (*RESULTS, CURVES, "model", "adapter")


def say(text: str) -> None:
    """Prints a line, on the first of several processes."""
    if is_main():
        print(text, flush=True)


def attention_options(args: argparse.Namespace) -> dict[str, Any]:
    """Attention options of the decoder in training and evaluation."""
    return {"layout": args.layout, "implementation": args.implementation}


def make_loader(args: argparse.Namespace, run: Run, corpus: Corpus) -> Loader:
    """Loads the rows of each batch that this process' devices need."""
    return Loader(
        corpus,
        seq_len=args.seq_len,
        batch=args.batch,
        rows=rows_here(run.mesh, args.batch, rules=run.rules),
        tokens=run.tokens,
        # The model's is rounded up, so it would let pass ids that the text may not have.
        vocab_size=args.vocab_size or run.config.vocab_size,
        packing=args.packing,
        seed=args.seed,
    )


def place(args: argparse.Namespace, run: Run, rows: Rows, mesh: Mesh) -> Batch[jax.Array]:
    """Makes a batch of this process' rows and puts it onto the mesh."""
    batch = make_batch(**rows, layout=args.layout, num_shards=mesh.shape["seq"])
    return place_batch(batch, mesh, rules=run.rules, process_local=True)


def same_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that a resumed run must have, or may change, as a checkpoint keeps them."""
    found = {name: getattr(args, name) for name in (*SAME, *MAY_CHANGE)}
    return found | {"model": None if args.model is None else str(args.model)}


def check_same(args: argparse.Namespace, extra: Any) -> None:
    """Raises ValueError if a checkpoint is of a run with other arguments."""
    for name in SAME:
        then = extra["arguments"].get(name, UNSAID.get(name))
        now = same_arguments(args)[name]
        if then != now:
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} is {now}: the checkpoints in {args.checkpoint_dir} are of a run with "
                f"{then}; use the same, or another --out and --checkpoint-dir"
            )


def restore(
    args: argparse.Namespace, checkpoints: Checkpoints, abstract: Any
) -> tuple[int, Any, Any]:
    """``(step, state, extra)`` of the last good checkpoint; ``(0, None, {})`` if there is none.

    Raises:
      ValueError: the checkpoint is of a run with other arguments.
    """
    if args.resume == "never" and checkpoints.latest() is not None:
        raise ValueError(
            f"--resume is never, and {checkpoints.folder} holds checkpoints: name another "
            "--checkpoint-dir, or remove them"
        )
    restored = checkpoints.restore(abstract, check=partial(check_same, args))
    if restored is None:
        return 0, None, {}
    by_first_process(partial(refuse_metrics_of_another_run, args, restored))
    say(f"going on from step {restored.step}, {checkpoints.folder}")
    for name in MAY_CHANGE:
        then, now = restored.extra["arguments"].get(name), getattr(args, name)
        if then is not None and then != now:
            say(f"with --{name} {now}, which was {then}")
    return restored.step, restored.state, restored.extra


def refuse_metrics_of_another_run(args: argparse.Namespace, restored: Restored) -> None:
    """Raises ValueError if the metrics in ``--out`` are not those of the checkpoint's run.

    Going on would cut off that run's lines, and write others behind what is left of them.
    """
    line = read_metrics(args.out / METRICS).get(restored.step)
    # Equal runs have equal losses to the last bit: a step is logged before it is saved.
    if line is not None and line.get("loss") != restored.extra.get("loss", line.get("loss")):
        raise ValueError(
            f"--out is {args.out}, whose {METRICS} is of another run than the checkpoints in "
            f"{args.checkpoint_dir}: their losses at step {restored.step} are {line.get('loss')} "
            f"and {restored.extra['loss']}; use another --out, or that of these checkpoints"
        )


def train(args: argparse.Namespace, run: Run, interrupt: Interrupt) -> tuple[nnx.State, RunLog]:
    """Runs the steps, until Ctrl-C if it comes, and returns the weights and the log."""
    optimizer = make_optimizer(
        args.lr, args.steps, moment_dtype=args.moment_dtype, moments=args.moments
    )
    options = attention_options(args) | {"rules": run.rules, "microbatches": args.microbatches}
    graphdef, shapes, opt_shapes = abstract_train_state(run.config, optimizer, run.mesh, **options)
    train_step = make_train_step(graphdef, optimizer, accumulate=args.accumulate)
    peak, tokens = peak_flops(run.mesh.devices.flat[0].device_kind), args.batch * args.seq_len

    with ExitStack() as stack:
        loader = stack.enter_context(make_loader(args, run, run.text))
        checkpoints = stack.enter_context(Checkpoints(args.checkpoint_dir, args.keep))
        # Frozen weights are in no checkpoint: the model's folder has them.
        abstract = [split_trained(shapes)[0], opt_shapes]
        start, state, extra = restore(args, checkpoints, abstract)
        loaded = extra.get("loader")
        if state is not None:
            loader.set_state(loaded)
        elif is_main() and (moved := set_aside(args.out, OF_A_RUN)):
            say(moved)
        params, opt_state = first_state(args, run, optimizer, options, state)
        mark = frozen_mark(params)
        check_frozen(args, extra.get("frozen"), mark)
        log = stack.enter_context(
            RunLog(
                args.out,
                args.steps,
                start=start,
                tokens_per_step=tokens,
                flops_per_step=tokens * run.config.train_flops_per_token(args.seq_len),
                peak=None if peak is None else peak * run.mesh.size,
                checkpoints=checkpoints,
                tensorboard=args.tensorboard,
                stall_timeout=args.stall_timeout,
            )
        )
        profile = stack.enter_context(Profile(args.out / "profile", args.profile))

        def save(step: int, loss: float) -> None:
            extra = {
                "loader": gather_state(loaded),
                "arguments": same_arguments(args),
                "loss": loss,
                "frozen": mark,
            }
            checkpoints.save(step, [split_trained(params)[0], opt_state], extra)

        def batches() -> Iterator[tuple[Batch[jax.Array], Any]]:
            """Each batch, and the loader's state after it."""
            for rows in loader:
                yield place(args, run, rows, run.mesh), loader.get_state()

        saved, ahead = start, batches()
        following = next(ahead) if start < args.steps else None
        for step in range(start + 1, args.steps + 1):
            if interrupt.requested or following is None:
                break
            with profile.step(step):
                batch, loaded = following
                params, opt_state, metrics = train_step(params, opt_state, batch)
                # Made while the devices compute the step.
                following = next(ahead) if step < args.steps else None
                numbers = {name: float(value) for name, value in metrics.items()}
            log.step(step, numbers)
            due = args.checkpoint_every and step % args.checkpoint_every == 0
            if due or (args.checkpoint_every and step == args.steps):
                save(step, numbers["loss"])
                saved = step
        reached = log.history[-1]["step"] if log.history else start
        if interrupt.requested and args.checkpoint_every and reached > saved:
            save(reached, log.history[-1]["loss"])
    return params, log


def held_out(args: argparse.Namespace, run: Run, params: nnx.State, mesh: Mesh) -> Evaluation:
    """Evaluates the weights on the held-out rows: by the run's mesh, or by one device."""
    whole = mesh is run.mesh
    options: Any = attention_options(args) | ({"rules": run.rules} if whole else {})
    graphdef, _ = abstract_decoder(run.config, mesh=mesh, **options)
    with make_loader(args, run, run.held_out) as loader:
        batches = (place(args, run, next(loader), mesh) for _ in range(args.eval_batches))
        return evaluate(make_eval_step(graphdef), params, batches)


@partial(jax.jit, static_argnums=(0, 3))
def sample(
    graphdef: nnx.GraphDef, params: nnx.State, prompt: jax.Array, length: int, key: jax.Array
) -> jax.Array:
    """Draws tokens at temperature 0.8, each from the ``len(prompt)`` tokens before it.

    Args:
      graphdef: graph definition of the decoder, see :func:`sampler`.
      params: its weights.
      prompt: int32 ``[T]``, the tokens to continue.
      length: number of tokens to draw.
      key: for the random draws.

    Returns:
      int32 ``[length]``.
    """
    model: Decoder = nnx.merge(graphdef, params)
    positions = jnp.arange(prompt.shape[0], dtype=jnp.int32)

    def next_token(context: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.unembed(model(context[None], positions)[0, -1])
        token = jax.random.categorical(key, logits / 0.8).astype(jnp.int32)
        return jnp.append(context[1:], token), token

    return jax.lax.scan(next_token, prompt, jax.random.split(key, length))[1]


def sampler(args: argparse.Namespace, run: Run, mesh: Mesh) -> nnx.GraphDef:
    """Graph definition of the decoder that :func:`sample` runs, tokens in natural order."""
    # The context is short, and --mlp-chunks need not divide it.
    config = dataclasses.replace(run.config, mlp_chunks=1)
    return abstract_decoder(config, mesh=mesh, implementation=args.implementation)[0]


def show_sample(args: argparse.Namespace, run: Run, mesh: Mesh, params: nnx.State) -> str:
    """Continues the beginning of the held-out text on one device."""
    context = min(SAMPLE_CONTEXT, args.seq_len)
    with make_loader(args, run, run.held_out) as loader:
        prompt = next(loader)["rows"][0, :context]
    drawn = sample(
        sampler(args, run, mesh),
        params,
        jnp.asarray(prompt),
        args.sample_tokens,
        jax.random.key(args.seed),
    )

    def text(ids: Any) -> str:
        if run.tokens is None:
            return " ".join(map(str, np.asarray(ids)))
        return run.tokens.decode(np.asarray(ids))

    return f"...{text(prompt[-80:])}[sample starts]{text(drawn)}"


def rehearse(args: argparse.Namespace, run: Run) -> None:
    """Traces evaluation and sampling before the training, to find out whether they can run.

    A named implementation may support the dtype and lengths of the training, but not the dtype and
    lengths of evaluation and sample. Without a name the library takes one that supports them.

    Raises:
      NotImplementedError: the implementation cannot evaluate or sample.
    """
    if args.implementation is None:
        return
    run = with_dtype(run, args.eval_dtype)
    one, alone = one_device(run.mesh), jax.process_count() == 1
    try:
        for each, rules in ((run.mesh, run.rules), (one, None))[: 1 + alone]:
            graphdef, params = abstract_decoder(
                run.config, mesh=each, rules=rules, **attention_options(args)
            )
            jax.eval_shape(make_eval_step(graphdef), params, shapes(args, run, each))
        if alone and args.sample_tokens > 0:
            graphdef, prompt = sampler(args, run, one), np.zeros(SAMPLE_CONTEXT, np.int32)
            key = jax.random.key(0)
            jax.eval_shape(lambda *given: sample(graphdef, *given, 1, key), params, prompt)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{error}; so the evaluation and the sample after the last step could not run: see "
            f"--implementation, --eval-dtype ({args.eval_dtype}) and --sample-tokens"
        ) from error


def shapes(args: argparse.Namespace, run: Run, mesh: Mesh) -> Any:
    """What :func:`place` makes, without arrays."""
    sharding = NamedSharding(mesh, PartitionSpec(run.rules.batch_axes, "seq"))

    def array(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((args.batch, args.seq_len), dtype, sharding=sharding)

    tokens = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), array(jnp.int32))
    return tokens | {"weights": array(jnp.float32)}


def with_dtype(run: Run, dtype: str) -> Run:
    """The run, whose model computes in another dtype."""
    return dataclasses.replace(run, config=dataclasses.replace(run.config, dtype=jnp.dtype(dtype)))


def finish(args: argparse.Namespace, run: Run, params: nnx.State, log: RunLog) -> int:
    """Evaluates by the ring and by one device, samples, and writes the summary and the curve.

    A model that was fine-tuned is exported first. With several processes no single device can reach
    all weights: there the ring evaluates alone.

    Returns:
      The exit code: 1 if the two perplexities differ by more than ``TOLERANCE``.
    """
    if args.model is not None:
        export(args, run, attention_options(args), params)
    run = with_dtype(run, args.eval_dtype)
    ring = held_out(args, run, params, run.mesh)
    say(f"held-out perplexity of {ring.tokens:,} tokens, in {args.eval_dtype}:")
    say(f"  ring of {run.mesh.shape['seq']} devices  {ring.perplexity:.6f}  ({ring.nll:.6f} nats)")
    summary: dict[str, Any] = {"steps": args.steps, "ring": ring._asdict(), "one_device": None}
    if log.history:
        summary["loss"] = log.history[-1]["loss"]
    if is_main():
        # Before one device tries what may be too much for it.
        write_summary(args, summary)
        if log.history:
            plot_loss(log.history, args.out / "loss.png", ring.nll)
    difference = 0.0
    if jax.process_count() == 1:
        one = one_device(run.mesh)
        one_params = jax.device_put(params, NamedSharding(one, PartitionSpec()))
        single = held_out(args, run, one_params, one)
        difference = abs(ring.perplexity / single.perplexity - 1)
        say(f"  one device         {single.perplexity:.6f}  ({single.nll:.6f} nats)")
        say(f"  relative difference {difference:.1e}")
        if args.sample_tokens > 0:
            say(show_sample(args, run, one, one_params))
        write_summary(args, summary | {"one_device": single._asdict()})
    if not difference <= TOLERANCE:  # What is not a number is an error, too.
        print(f"error: the perplexities differ by more than {TOLERANCE}", file=sys.stderr)
        return 1
    return 0


def write_summary(args: argparse.Namespace, summary: dict[str, Any]) -> None:
    """Writes ``summary.json``."""
    replace_file(args.out / "summary.json", json.dumps(summary, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Trains, evaluates and samples.

    Returns:
      The exit code.
    """
    args, parser = parse_args(argv)
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", CPU_DEVICES)  # Has no effect on GPUs.
    try:
        processes = initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            heartbeat_timeout=args.heartbeat_timeout,
        )
    except ValueError as error:
        parser.error(str(error))
    with processes:
        set_compiler_options()
        return run_all(args, parser)


def run_all(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Everything after the processes have found each other."""
    start = time.perf_counter()
    with Interrupt(alone=jax.process_count() == 1) as interrupt:
        try:
            run = prepare(args)
            if is_main():
                check_out(args.out)
            rehearse(args, run)
            if not can_plot():
                say(
                    "matplotlib is not installed: there will be no loss.png; "
                    "pip install 'burst-jax[examples]' brings it"
                )
            sizes = {name: size for name, size in run.mesh.shape.items() if size > 1}
            say(f"{run.text.description}, {run.text.size / 1e6:.1f} MB to train on")
            say(
                f"{run.config.num_matmul_params / 1e6:.1f} M weights in {args.dtype}, {args.batch} "
                f"x {args.seq_len} tokens a step, {args.layout} over {sizes or 'one device'} of "
                f"{run.mesh.devices.flat[0].device_kind}"
            )
            if run.config.lora is not None:
                say(
                    f"{run.config.num_adapter_params / 1e6:.2f} M weights of adapters are trained, "
                    f"on {', '.join(run.config.lora.projections)}, and no others"
                )
            params, log = train(args, run, interrupt)
        except (
            ValueError,
            OSError,
            NotImplementedError,
            ImportError,
            NonFinite,
            CheckpointError,
        ) as error:
            parser.error(str(error))
    if interrupt.requested:
        reached = log.history[-1:] or [{"step": 0, "loss": math.nan}]
        print(f"interrupted after step {reached[0]['step']}, loss {reached[0]['loss']:.4f}")
        plot_loss(log.history, args.out / "loss.png")
        return 130
    try:
        code = finish(args, run, params, log)
    except OSError as error:
        parser.error(f"{error}; all steps are done: make room, and the same command does the rest")
    results = "curve and metrics" if can_plot() else "metrics"
    say(f"{time.perf_counter() - start:.0f} s in all; {results} in {args.out}")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
