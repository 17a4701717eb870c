"""Evaluation and sampling of ``train_lm.py``, after its last step."""

from __future__ import annotations

import argparse
import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from run_batches import make_loader, place, shapes
from run_options import SAMPLE_CONTEXT, RunConfig, attention_options

from burst_jax.data import ChatTokens, TokenizerFile, check_chats
from burst_jax.models import Decoder, abstract_decoder
from burst_jax.parallel.mesh_option import one_device
from burst_jax.training import Evaluation, evaluate, evaluation_memory, make_eval_step
from burst_jax.training.evaluation import EvalStep


def held_out(args: argparse.Namespace, run: RunConfig, params: nnx.State, mesh: Mesh) -> Evaluation:
    """Evaluates the weights on held-out sequences, on the run's mesh or on one device."""
    options: Any = attention_options(args) | (run.axes if mesh is run.mesh else {})

    @cache
    def eval_step_of(layout: str) -> EvalStep:
        return make_eval_step(abstract_decoder(run.config, mesh=mesh, layout=layout, **options)[0])

    def eval_step(params: nnx.State, placed: Any) -> tuple[jax.Array, jax.Array]:
        return eval_step_of(placed.layout)(params, placed.batch)

    with make_loader(args, run, run.held_out) as loader:
        batches: Any = (
            place(args, run.config, next(loader), mesh) for _ in range(args.eval_batches)
        )
        return evaluate(eval_step, params, batches)


def lacking_memory(args: argparse.Namespace, run: RunConfig, params: nnx.State) -> tuple[str, str]:
    """Why one device can hold neither the weights, nor evaluate a batch; "" where it can.

    Devices that do not report their memory, like CPUs, have enough. A mesh of one device is that
    device, which has the weights already.
    """
    stats = run.mesh.devices.flat[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return "", ""
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    weights = 0 if run.mesh.size == 1 else sum(x.nbytes for x in jax.tree.leaves(params))
    batch = evaluation_memory(run.config, args.batch * args.seq_len)

    def reason(needed: int) -> str:
        found = f"it needs about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        return found if needed > free else ""

    return reason(weights), reason(weights + batch)


@partial(jax.jit, static_argnums=(0, 3))
def sample(
    graphdef: nnx.GraphDef, params: nnx.State, prompt: jax.Array, length: int, key: jax.Array
) -> jax.Array:
    """Samples ``length`` tokens at temperature 0.8, each from the last ``len(prompt)`` tokens.

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


def sampler(args: argparse.Namespace, run: RunConfig, mesh: Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph definition and abstract weights of the decoder for :func:`sample`.

    Tokens are in natural order.
    """
    # --mlp-chunks need not divide the short context.
    config = dataclasses.replace(run.config, mlp_chunks=1)
    return abstract_decoder(config, mesh=mesh, implementation=args.implementation)


def context(args: argparse.Namespace) -> int:
    """Length of the prompt of :func:`sample`."""
    return min(SAMPLE_CONTEXT, args.seq_len)


def show_sample(args: argparse.Namespace, run: RunConfig, mesh: Mesh, params: nnx.State) -> str:
    """Samples a continuation of the held-out text's beginning, on one device."""
    with make_loader(args, run, run.held_out) as loader:
        prompt = next(loader)["rows"][0, : context(args)]
    drawn = sample(
        sampler(args, run, mesh)[0],
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


def rehearse(args: argparse.Namespace, run: RunConfig) -> None:
    """Traces evaluation and sampling before the training, to find unsupported cases early.

    An explicit implementation may support the dtype and lengths of the training, but not those of
    evaluation and sample.

    Raises:
      NotImplementedError: the implementation cannot evaluate or sample.
    """
    if args.implementation is None:
        return
    run = with_dtype(run, args.eval_dtype)
    one, alone = one_device(run.mesh), jax.process_count() == 1
    meshes = [(run.mesh, run.axes)] * (args.eval_batches > 0)
    if alone and meshes and args.one_device != "never":
        meshes.append((one, {}))
    try:
        for each, axes in meshes:
            batch, layout = shapes(args, each)
            options: Any = axes | attention_options(args) | {"layout": layout}
            graphdef, params = abstract_decoder(run.config, mesh=each, **options)
            jax.eval_shape(make_eval_step(graphdef), params, batch)
        if alone and args.sample_tokens > 0:
            graphdef, params = sampler(args, run, one)
            prompt, key = np.zeros(context(args), np.int32), jax.random.key(0)
            jax.eval_shape(lambda *given: sample(graphdef, *given, 1, key), params, prompt)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{error}; so evaluation and sampling after the last step would fail: see "
            f"--implementation, --eval-dtype ({args.eval_dtype}) and --sample-tokens"
        ) from error


def with_dtype(run: RunConfig, dtype: str) -> RunConfig:
    """The run with another compute dtype."""
    return dataclasses.replace(run, config=dataclasses.replace(run.config, dtype=jnp.dtype(dtype)))


def counted(run: RunConfig, tokens: int, seq_len: int) -> str:
    """What a number of held-out tokens means if the text has fewer; empty if it has more."""
    if isinstance(run.tokens, ChatTokens):
        chats = check_chats(run.held_out, run.tokens, seq_len=seq_len)
        found = f"{chats.conversations:,} held-out conversations"
        if tokens > chats.counted:
            return f" that the assistant writes ({found}, read {tokens / chats.counted:.1f} times)"
        return f" that the assistant writes ({found} have {chats.counted:,})"
    size, unit = run.held_out.size, "tokens" if run.tokens is None else "bytes"
    if tokens > size:
        return f" (the held-out {size:,} {unit}, {tokens / size:.1f} times)"
    if isinstance(run.tokens, TokenizerFile):
        return f" (of {size:,} held-out bytes, again from the start if they have fewer tokens)"
    return ""
