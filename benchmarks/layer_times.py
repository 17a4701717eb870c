"""The layers of a training step by themselves: how much of the step those of each mixer take.

A program is forward and backward pass of the layers of one mixer alone, as many as the model has,
from token ids to hidden states and back to the gradients of all weights, with the step's remat:
without head, loss and optimizer. With a feed-forward of few features the rest is the mixers, with
their projections and norms.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.layouts.parse import parse_layout
from burst_jax.models import Decoder, DecoderConfig, LayerKind, abstract_decoder
from burst_jax.models.config import Mixer
from burst_jax.models.delta_net import OF_ATTENTION
from burst_jax.models.feed_forward import GatedMLP
from burst_jax.parallel.xla_options import compiler_options
from burst_jax.training import make_batch

# Hidden features of the feed-forward where mixers are timed.
_FEW = 16
TITLES: dict[Mixer, str] = {"attention": "softmax attention", "delta_net": "linear attention"}


class Part(NamedTuple):
    """Some of a model's layers.

    Attributes:
      mixer: theirs.
      count: how many the model has.
      whole: whether with their feed-forward.
    """

    mixer: Mixer
    count: int
    whole: bool

    @property
    def name(self) -> str:
        """In the table."""
        return f"{self.count} x {TITLES[self.mixer]}{'' if self.whole else ', mixers alone'}"

    def config(self, config: DecoderConfig) -> DecoderConfig:
        """A model of these layers alone."""
        fields: dict[str, Any] = {"num_layers": self.count, "remat_layers": None}
        fields["layer_pattern"] = (LayerKind(mixer=self.mixer),)
        if self.mixer == "attention":
            fields["delta_net"] = None
        else:
            defaults = {field.name: field.default for field in dataclasses.fields(config)}
            fields |= {name: defaults[name] for name in OF_ATTENTION}
        if not self.whole:
            fields |= {"feed_forward": GatedMLP, "experts": None, "mlp_dim": _FEW}
        return dataclasses.replace(config, **fields)


def parts_of(config: DecoderConfig) -> list[Part]:
    """The layers of each mixer, with their feed-forward and without."""
    counts = config.mixers.items()
    return [Part(mixer, count, whole) for mixer, count in counts for whole in (True, False)]


class LayersAlone:
    """Forward and backward pass of a model's layers; calling it runs and waits for both.

    Args:
      config: of the layers alone.
      layout: of the tokens.
      length: sequence length.
      n: number of devices.
    """

    def __init__(self, config: DecoderConfig, layout: str, length: int, n: int) -> None:
        parse_layout(layout).check_length(length, n)
        kinds = (AxisType.Auto,)
        mesh = jax.make_mesh((n,), ("seq",), axis_types=kinds, devices=jax.devices()[:n])
        options: Any = {"mesh": mesh, "layout": layout}
        graphdef, _ = abstract_decoder(config, **options)
        replicated, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "seq"))

        def weights() -> nnx.State:
            return nnx.state(Decoder(config, rngs=nnx.Rngs(0), **options))

        rows = np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1))
        batch = make_batch(rows, layout=layout, num_shards=n)
        tokens, positions = (jax.device_put(batch[x], sharded) for x in ("inputs", "positions"))
        shape = 1, length, config.embed_dim
        cotangent = jax.jit(
            lambda: jax.random.normal(jax.random.key(1), shape, config.dtype), out_shardings=sharded
        )()

        def both(
            params: nnx.State, tokens: jax.Array, positions: jax.Array, cotangent: jax.Array
        ) -> tuple[jax.Array, Any]:
            def hidden(params: nnx.State) -> jax.Array:
                return nnx.merge(graphdef, params).with_auxiliary(tokens, positions)[0]

            out, vjp = jax.vjp(hidden, params)
            return out, vjp(cotangent)[0]

        self._arguments = (
            jax.jit(weights, out_shardings=replicated)(), tokens, positions, cotangent
        )  # fmt: skip
        self._lowered = jax.jit(both, compiler_options=compiler_options()).lower(*self._arguments)
        self._program: Any = None

    def compile(self) -> None:
        """Compiles the program, in a thread of its own if wanted."""
        self._program = self._lowered.compile()

    def __call__(self) -> Any:
        """Hidden states, and the gradients of the weights."""
        return jax.block_until_ready(self._program(*self._arguments))


def measure(
    config: DecoderConfig, layout: str, length: int, n: int, *, calls: int
) -> Iterator[dict[str, Any]]:
    """Times the layers of each mixer by themselves.

    Args:
      config: of the model.
      layout: of the tokens.
      length: sequence length.
      n: number of devices.
      calls: number of timed calls, after a first one.

    Yields:
      A row of each part: "part", "mixer", "layers", "whole" and the "seconds" of the median call.
    """
    parts = parts_of(config)
    with ThreadPoolExecutor(len(parts)) as pool:
        alone = [LayersAlone(part.config(config), layout, length, n) for part in parts]
        list(pool.map(LayersAlone.compile, alone))
    while parts:
        part, layers = parts.pop(0), alone.pop(0)
        layers()
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            layers()
            seconds.append(time.perf_counter() - start)
        yield {
            "part": part.name, "mixer": part.mixer, "layers": part.count, "whole": part.whole,
            "seconds": statistics.median(seconds),
        }  # fmt: skip
