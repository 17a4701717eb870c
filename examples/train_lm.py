"""Trains a language model with context parallelism, on any mesh of devices.

    python examples/train_lm.py                              # Python's own source, all devices
    python examples/train_lm.py --data notes/ --seq-len 4096 --mesh fsdp=2,seq=4
    srun python examples/train_lm.py --data notes/           # on several hosts

Without GPUs it uses 8 CPU devices and takes some minutes on two cores. With GPUs it uses all of
them and a larger model. It ends with the held-out perplexity on the ring and on one device, which
must agree, and a sample. It writes metrics.jsonl, summary.json, loss.png and checkpoints into
``--out``; the same command resumes from the last checkpoint, on the same or another mesh. With
``--model`` it fine-tunes a Hugging Face checkpoint and exports the result to OUT/model; with
``--lora-rank`` it trains LoRA adapters and merges them, or exports them to OUT/adapter for peft.
Runs with the same seed and batch size see the same data on any mesh and number of processes, so
their metrics.jsonl can be compared step by step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import extras  # noqa: F401 - ends the script if libraries are missing
import jax
from flax import nnx
from hf_checkpoints import check_frozen, export, first_state, frozen_checksum
from jax.sharding import NamedSharding, PartitionSpec
from reporting import RESULTS, Interrupt, can_plot, check_out, plot_loss, report_interrupt
from run_batches import Placed, compiled_steps, layouts, make_loader, place
from run_evaluation import (
    counted,
    held_out,
    lacking_memory,
    rehearse,
    show_sample,
    with_dtype,
)
from run_log import CURVES, METRICS, NonFinite, RunLog, read_metrics, replace_file, set_aside
from run_mesh import ring_size, token_axes
from run_options import (
    OF_A_PROCESS,
    OF_A_START,
    RunConfig,
    attention_options,
    flag,
    parse_args,
    prepare,
)
from run_profile import Profile
from work_log import WorkLog

from burst_jax.command_line import in_flags, use_cpu_devices
from burst_jax.data import Corpus, gather_state
from burst_jax.models import abstract_decoder
from burst_jax.parallel.mesh_option import one_device
from burst_jax.parallel.peak import peak_flops
from burst_jax.parallel.processes import by_first_process
from burst_jax.parallel.xla_options import set_compiler_options
from burst_jax.training import (
    CheckpointError,
    Checkpoints,
    Evaluation,
    Restored,
    TrainStep,
    abstract_train_state,
    check_same,
    initialize,
    is_main,
    make_optimizer,
    make_train_step,
    split_trained,
)
from burst_jax.training.adam import global_norm

# Largest relative difference between the two held-out perplexities, by --eval-dtype.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-3}
# A run resumes only with the same data and schedule; array shapes are compared by restore. Learning
# rate and dtype may change.
MAY_CHANGE = ("lr", "dtype")
SAME = (
    "seq_len", "batch", "text_key", "packing", "steps", "seed", "model", "moment_dtype",
    "lora_rank", "lora_alpha", "lora_targets", "mixer", "full_attention_interval", "chat",
)  # fmt: skip
# Arguments that old checkpoints lack.
IMPLIED = {"moment_dtype": "float32", "text_key": "text", "mixer": "attention", "chat": False}
# Printed on one line.
ERRORS = (ValueError, OSError, NotImplementedError, ImportError, NonFinite, CheckpointError)
# What a run writes into --out, except checkpoints.
OUTPUTS = (*RESULTS, CURVES, "model", "adapter")


def say(text: str) -> None:
    """Prints a line, on process 0."""
    if is_main():
        print(text, flush=True)


def same_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments to save in a checkpoint, which a resumed run is compared with."""
    found = {name: getattr(args, name) for name in (*SAME, *MAY_CHANGE)}
    return found | {"model": None if args.model is None else str(args.model)}


def check_arguments(args: argparse.Namespace, extra: Any) -> None:
    """Raises ValueError if a checkpoint's run has other arguments."""
    if not isinstance(extra, dict) or not isinstance(extra.get("arguments"), dict):
        raise ValueError(
            f"the checkpoints in {args.checkpoint_dir} are of another program: record.json has no "
            "arguments in extra; use another --out and --checkpoint-dir"
        )
    for name in SAME:
        then = extra["arguments"].get(name, IMPLIED.get(name))
        now = same_arguments(args)[name]
        if then != now:
            raise ValueError(
                f"{flag(name)} is {now}: the run of the checkpoints in {args.checkpoint_dir} has "
                f"{then}; use the same, or another --out and --checkpoint-dir"
            )


def restore(
    args: argparse.Namespace, checkpoints: Checkpoints, abstract: Any
) -> tuple[int, Any, Any]:
    """``(step, state, extra)`` of the newest intact checkpoint, or ``(0, None, {})``.

    Raises:
      ValueError: the checkpoint's run has other arguments.
    """
    if args.resume == "never" and checkpoints.latest() is not None:
        raise ValueError(
            f"--resume is never, and {checkpoints.folder} holds checkpoints: name another "
            "--checkpoint-dir, or remove them"
        )
    restored = checkpoints.restore(abstract, check=partial(check_arguments, args))
    if restored is None:
        return 0, None, {}
    by_first_process(partial(check_metrics, args, restored))
    say(f"resuming from step {restored.step}, {checkpoints.folder}")
    for name in MAY_CHANGE:
        then, now = restored.extra["arguments"].get(name), getattr(args, name)
        if then is not None and then != now:
            say(f"--{name} changed from {then} to {now}")
    return restored.step, restored.state, restored.extra


def check_metrics(args: argparse.Namespace, restored: Restored) -> None:
    """Raises ValueError if the metrics in ``--out`` belong to another run than the checkpoint.

    Resuming would truncate that run's metrics and append others.
    """
    line = read_metrics(args.out / METRICS).get(restored.step)
    # A resumed run has bitwise equal losses, and a step is logged before it is saved.
    if line is not None and line.get("loss") != restored.extra.get("loss", line.get("loss")):
        raise ValueError(
            f"--out is {args.out}, whose {METRICS} belongs to another run than the checkpoints in "
            f"{args.checkpoint_dir}: the losses at step {restored.step} are {line.get('loss')} "
            f"and {restored.extra['loss']}; use another --out, or the one of these checkpoints"
        )


def weights_norm(params: nnx.State) -> float:
    """The norm of the weights; not finite if one of them is not."""
    return float(jax.jit(global_norm)(params))


def check_weights(step: int, params: nnx.State, checkpoints: Checkpoints) -> None:
    """Raises NonFinite: the last step's loss does not see what it has made of the weights.

    Their norm is infinite, too, if they are so large that the next loss would be.
    """
    norm = weights_norm(split_trained(params)[0])
    if not math.isfinite(norm):
        raise NonFinite(step, {"the norm of the weights": norm}, checkpoints)


def train(
    args: argparse.Namespace, run: RunConfig, interrupt: Interrupt
) -> tuple[nnx.State, RunLog]:
    """Runs the steps, until the last one or Ctrl-C, and returns the weights and the log."""
    optimizer = make_optimizer(
        args.lr, args.steps, moment_dtype=args.moment_dtype, moments=args.moments
    )
    options = attention_options(args) | run.axes | {"microbatches": args.microbatches}
    _, shapes, opt_shapes = abstract_train_state(run.config, optimizer, run.mesh, **options)

    def train_step_of(layout: str) -> TrainStep:
        graphdef, _ = abstract_decoder(run.config, mesh=run.mesh, layout=layout, **options)
        return make_train_step(
            graphdef, optimizer, accumulate=args.accumulate, max_logits=args.max_logits
        )

    work_log = WorkLog(ring_size(run.mesh))
    peak, tokens = peak_flops(run.mesh.devices.flat[0].device_kind), args.batch * args.seq_len

    with ExitStack() as stack:
        loader = stack.enter_context(make_loader(args, run, run.text))
        # Paths may differ between hosts, but not what is read there.
        check_same({"--data": loader.get_state()["options"], "the model": repr(run.config)})
        checkpoints = stack.enter_context(Checkpoints(args.checkpoint_dir, args.keep))
        # Another run that writes to one of the folders ends this one at its start.
        stack.enter_context(Checkpoints(args.out)).lock()
        if args.checkpoint_every:
            checkpoints.lock()
        # Frozen weights are not in the checkpoint, but in the Hugging Face checkpoint.
        abstract = [split_trained(shapes)[0], opt_shapes]
        start, state, extra = restore(args, checkpoints, abstract)
        loaded = extra.get("loader")
        if state is not None:
            try:
                loader.set_state(loaded)
            except ValueError as error:
                record = checkpoints.folder / str(start) / "record.json"
                raise ValueError(f"{record}, extra.loader: {error}") from error
        elif is_main() and (moved := set_aside(args.out, OUTPUTS)):
            say(moved)
        params, opt_state = first_state(args, run, optimizer, options, state)
        frozen = frozen_checksum(params)
        check_frozen(args, extra.get("frozen"), frozen)
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
            check_weights(step, params, checkpoints)
            extra = {
                "loader": gather_state(loaded),
                "arguments": same_arguments(args),
                "loss": loss,
                "frozen": frozen,
            }
            checkpoints.save(step, [split_trained(params)[0], opt_state], extra)

        def batches() -> Iterator[tuple[Placed, Any]]:
            """Each batch with the loader's state after it."""
            for rows in loader:
                yield place(args, run.config, rows, run.mesh, work_log), loader.get_state()

        saved, ahead = start, batches()
        following = next(ahead) if start < args.steps else None
        steps = {}
        if following is not None:
            arrays = params, opt_state, following[0].batch
            say("compiling the training step")
            steps = compiled_steps(train_step_of, layouts(args, run.mesh), arrays, run.config)
        for step in range(start + 1, args.steps + 1):
            if interrupt.requested or following is None:
                break
            with profile.step(step):
                (batch, layout, work), loaded = following
                params, opt_state, metrics = steps[layout](params, opt_state, batch)
                # Prepared while the devices compute the step.
                following = next(ahead) if step < args.steps else None
                numbers = numbers_of(metrics)
            log.step(step, numbers | work)
            due = args.checkpoint_every and step % args.checkpoint_every == 0
            if due or (args.checkpoint_every and step == args.steps):
                with log.untimed():
                    save(step, numbers["loss"])
                saved = step
        reached = log.history[-1]["step"] if log.history else start
        if interrupt.requested and args.checkpoint_every and reached > saved:
            save(reached, log.history[-1]["loss"])
        elif reached > saved:
            check_weights(reached, params, checkpoints)
    return params, log


def size_text(corpus: Corpus) -> str:
    """The size of all documents, with its unit."""
    size = corpus.size
    if not corpus.reader.is_text:
        return f"{size:,} tokens"
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} KB"


def numbers_of(metrics: dict[str, Any]) -> dict[str, float]:
    """A step's metrics as numbers: of the largest logits, those of all layers and heads."""
    logits = metrics.pop("max_logits", None)
    numbers = {name: float(value) for name, value in metrics.items()}
    if logits is not None:
        numbers["max_logit"], numbers["max_logit_bound"] = (float(x.max()) for x in logits)
    return numbers


def finish(args: argparse.Namespace, run: RunConfig, params: nnx.State, log: RunLog) -> int:
    """Exports, evaluates on the ring and on one device, samples, writes summary and curve.

    With several processes no single device can hold all weights, so only the ring evaluates.

    Returns:
      The exit code: 1 if a loss is not finite, or the two perplexities differ by more than
      ``TOLERANCE``.
    """
    if args.model is not None:
        export(args, run, attention_options(args), params)
    run = with_dtype(run, args.eval_dtype)
    ring = single = None
    if args.eval_batches:
        ring = held_out(args, run, params, run.mesh)
        repeated = counted(run, ring.tokens, args.seq_len)
        say(f"held-out perplexity of {ring.tokens:,} tokens{repeated}, in {args.eval_dtype}:")
        devices = math.prod(run.mesh.shape[axis] for axis in token_axes(run.mesh))
        say(f"  ring of {devices} devices  {ring.perplexity:.6f}  ({ring.nll:.6f} nats)")
    summary: dict[str, Any] = {
        "steps": args.steps,
        "ring": None if ring is None else ring._asdict(),
    }
    if log.history:
        summary["loss"] = log.history[-1]["loss"]
    if is_main():
        # Before one device, which may run out of memory.
        write_summary(args, summary | {"one_device": None})
        if log.history:
            plot_loss(log.history, args.out / "loss.png", None if ring is None else ring.nll)
    if jax.process_count() == 1:
        single = on_one_device(args, run, params, ring)
        write_summary(args, summary | {"one_device": None if single is None else single._asdict()})
    if ring is not None and not math.isfinite(ring.nll):
        # All processes compute the norm.
        message = not_finite(ring.nll, args.eval_dtype, weights_norm(params))
        print(f"error: {message}", file=sys.stderr)
        return 1
    tolerance = TOLERANCE[args.eval_dtype]
    if ring is not None and single is not None and not difference(ring, single) <= tolerance:
        print(f"error: the perplexities differ by more than {tolerance}", file=sys.stderr)
        return 1
    return 0


def not_finite(loss: float, dtype: str, norm: float) -> str:
    """What is wrong if the held-out loss is not finite, by the norm of the weights."""
    found, remedy = f"the held-out loss is {loss}", "train with a lower --lr"
    if not math.isfinite(norm):
        return f"{found}, and the norm of the weights {norm}: {remedy}"
    if dtype != "float32":
        remedy = f"--eval-dtype is {dtype}, try float32, or {remedy}"
    return f"{found}, though the weights are finite: {remedy}"


def on_one_device(
    args: argparse.Namespace, run: RunConfig, params: nnx.State, ring: Evaluation | None
) -> Evaluation | None:
    """Evaluates and samples on one device, as far as it has the memory; the evaluation, if any."""
    one, single = one_device(run.mesh), None
    no_weights, no_batch = lacking_memory(args, run, params)
    evaluates = ring is not None and args.one_device != "never"
    if evaluates and no_batch:
        say(f"  one device         left out: {no_batch}")
    samples = args.sample_tokens > 0
    if samples and no_weights:
        say(f"  sample             left out: {no_weights}")
    evaluates, samples = evaluates and not no_batch, samples and not no_weights
    if not (evaluates or samples):
        return None
    params = jax.device_put(params, NamedSharding(one, PartitionSpec()))
    if ring is not None and evaluates:
        single = held_out(args, run, params, one)
        say(f"  one device         {single.perplexity:.6f}  ({single.nll:.6f} nats)")
        say(f"  relative difference {difference(ring, single):.1e}")
    if samples:
        say(show_sample(args, run, one, params))
    return single


def difference(a: Evaluation, b: Evaluation) -> float:
    """The relative difference of two perplexities, which may be infinite; NaN if a loss is."""
    # expm1 raises beyond the largest float.
    return abs(math.expm1(min(a.nll - b.nll, 700.0)))


def write_summary(args: argparse.Namespace, summary: dict[str, Any]) -> None:
    """Writes ``summary.json``; null is a number that is not finite, which JSON lacks."""

    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: known(each) for name, each in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    text = json.dumps(known(summary), indent=1, allow_nan=False)
    replace_file(args.out / "summary.json", text + "\n")


def main(argv: list[str] | None = None) -> int:
    """Trains, evaluates and samples.

    Returns:
      The exit code.
    """
    args, parser = parse_args(argv)
    use_cpu_devices()
    try:
        processes = initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            heartbeat_timeout=args.heartbeat_timeout,
        )
    except (ValueError, TimeoutError) as error:
        parser.error(in_flags(error, **{name: flag(name) for name in OF_A_START}))
    with processes:
        set_compiler_options()
        return run_all(args, parser)


def run_all(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """The program after process start-up."""
    start = time.perf_counter()
    with Interrupt(alone=jax.process_count() == 1) as interrupt:
        try:
            given = vars(args).items()
            check_same({flag(name): value for name, value in given if name not in OF_A_PROCESS})
            run = prepare(args)
            if is_main():
                check_out(args.out)
            rehearse(args, run)
            if not can_plot():
                say(
                    "matplotlib is not installed, so loss.png is not written: "
                    "pip install 'burst-jax[examples]'"
                )
            sizes = {name: size for name, size in run.mesh.shape.items() if size > 1}
            say(f"{run.text.description}, {size_text(run.text)}")
            if run.about:
                say(run.about)
            say(
                f"{run.config.num_matmul_params / 1e6:.1f} M weights in {args.dtype}, {args.batch} "
                f"x {args.seq_len} tokens per step, {args.layout} over {sizes or 'one device'} of "
                f"{run.mesh.devices.flat[0].device_kind}"
            )
            if run.config.lora is not None:
                say(
                    f"training only {run.config.num_adapter_params / 1e6:.2f} M adapter weights, "
                    f"on {', '.join(run.config.adapted)}"
                )
            params, log = train(args, run, interrupt)
        except ERRORS as error:
            parser.error(str(error))
    if interrupt.requested:
        report_interrupt(log.history, args.out)
        return 130
    try:
        code = finish(args, run, params, log)
    except OSError as error:
        parser.error(f"{error}; all steps are done: free disk space and run the same command again")
    results = "curve and metrics" if can_plot() else "metrics"
    say(f"{time.perf_counter() - start:.0f} s in all; {results} in {args.out}")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
