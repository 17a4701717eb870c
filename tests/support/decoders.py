"""Decoders on meshes and by their formulas: hidden states, and gradients for a cotangent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
from flax import nnx
from implementations import quick_jit
from meshes import random_like

from burst_jax.layouts import document_tables
from burst_jax.layouts.parse import parse_layout
from burst_jax.models import abstract_decoder
from burst_jax.parallel.mesh import axes_size


def drawn(shapes):
    """Weights from NumPy: initialization would be the compilation of another program.

    About as large as when initialized, but biases are not 0, nor norms' scales 1.
    """
    rng = np.random.default_rng(0)

    def weight(path, x):
        name, normal = jax.tree_util.keystr(path), rng.normal(size=x.shape)
        size = 0.3 if "bias" in name or "norm" in name else 0.15
        # JAX 0.12 compiles a program for each shape of jnp.asarray.
        return jax.device_put(np.asarray(("norm" in name) + size * normal).astype(x.dtype))

    return jax.tree_util.tree_map_with_path(weight, shapes)


def with_drawn_weights(config, **options):
    """A decoder with weights that are :func:`drawn`."""
    graphdef, shapes = abstract_decoder(config, **options)
    return nnx.merge(graphdef, drawn(shapes))


def on_its_mesh(model, tokens, segments, cotangent, program=quick_jit, **masks):
    """Hidden states in natural order, and the gradients of the weights that are trained.

    ``program`` compiles or evaluates it. ``masks``: further arguments of the decoder's call.
    """
    options = dict(model.options)
    mesh, layout = options["mesh"], options["layout"]
    shards = axes_size(mesh, options.get("seq_axis", "seq"))
    found = parse_layout(layout).order_of(np.asarray(segments), shards)
    positions, rows = np.maximum(found.order, 0), np.arange(len(tokens))[:, None]
    tokens, cotangent = tokens[rows, positions], cotangent[rows, positions]
    is_token, segments = found.order >= 0, found.segment_ids
    if not found.layout.is_fixed:
        cotangent = cotangent * is_token[..., None]
        masks["document_tables"] = document_tables(
            layout, segments, positions, shards, linear_attention=True
        )
    trained = nnx.Param if model.config.lora is None else nnx.LoRAParam
    graphdef, weights, others = nnx.split(model, trained, ...)

    @program
    def run(weights, others, cotangent):
        def hidden(weights):
            return nnx.merge(graphdef, weights, others)(tokens, positions, segments, **masks)

        out, vjp = jax.vjp(hidden, weights)
        if mesh.explicit_axes:
            cotangent = jax.reshard(cotangent, jax.typeof(out).sharding)
        return out, vjp(cotangent)[0]

    out, gradients = jax.device_get(run(weights, others, cotangent))
    natural = np.zeros_like(out)
    batch, place = np.nonzero(is_token)
    natural[batch, positions[batch, place]] = out[batch, place]
    return natural, without_head(nnx.to_pure_dict(gradients))


def by_formulas(model, tokens, segments, cotangent):
    """The same in float64 on one device: W with an adapter is ``W + (alpha / r) A B``."""
    config = model.config
    keep = plain_model.causal(segments)
    positions = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))

    def merged(part):
        if not isinstance(part, dict):
            return part
        if "kernel_lora_a" in part:
            product = jnp.einsum("lir,lro->lio", part["kernel_lora_a"], part["kernel_lora_b"])
            kernel = part["kernel"]
            return {"kernel": kernel + config.lora.scale * product.reshape(kernel.shape)}
        return {name: merged(each) for name, each in part.items()}

    def hidden(weights):
        rope = config.layer_ropes[0] if config.layer_ropes else None
        theta, fraction = (None, 1.0) if rope is None else (rope.theta, rope.fraction)
        sizes = config.delta_net
        of_delta_net = () if sizes is None else (
            2.0 if sizes.negative_eigenvalues else 1.0, sizes.norm_epsilon or config.norm_epsilon
        )  # fmt: skip
        options = (
            *(theta, config.logits_soft_cap, segments, stacks_of(config)),
            *(fraction, of_delta_net),
        )
        return plain_model.decoder(merged(weights), tokens, positions, keep, *options)

    weights = nnx.to_pure_dict(nnx.state(model))
    out, (gradients,) = plain_model.gradients(hidden, cotangent, weights)
    return out, without_head(gradients if config.lora is None else adapters_of(gradients))


# Where the weights of layers are, by their mixers.
STACKS = {"attention": "layers", "delta_net": "delta_net_layers"}


def stacks_of(config):
    """Of each layer the weights that it is in, for :func:`plain_model.decoder`."""
    return [STACKS[kind.mixer] for kind in config.layer_kinds]


def adapters_of(part):
    """The adapters in a tree of weights."""
    adapters = {name: x for name, x in part.items() if name.startswith("kernel_lora")}
    inner = {name: adapters_of(x) for name, x in part.items() if isinstance(x, dict)}
    return adapters | {name: x for name, x in inner.items() if x}


def without_head(gradients):
    """Hidden states do not depend on the output projection."""
    return {name: gradient for name, gradient in gradients.items() if name != "head"}


def traced_gradient(config, mesh, batch, length, **options):
    """The jaxpr of the gradient of a decoder's weights, in the zigzag layout."""
    graphdef, shapes = abstract_decoder(config, mesh=mesh, layout="zigzag", **options)

    def gradient(params, tokens, positions):
        return jax.grad(lambda params: nnx.merge(graphdef, params)(tokens, positions).sum())(params)

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return jax.make_jaxpr(gradient)(shapes, tokens, tokens).jaxpr


def with_drawn_adapters(adapted):
    """A decoder with adapters whose B is not zero."""
    graphdef, adapters, others = nnx.split(adapted, nnx.LoRAParam, ...)
    drawn = jax.tree.map(lambda x: 0.2 * x, random_like(adapters, 1))
    placed = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), drawn, adapters)
    return nnx.merge(graphdef, placed, others)
