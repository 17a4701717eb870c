"""Small decoders for the tests of serving."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import decoders
import jax.numpy as jnp
import numpy as np
from device_threads import evaluated
from meshes import mesh_of

from burst_jax import ShardingRules
from burst_jax.models import DecoderConfig, Experts, LayerKind, MixtureOfExperts, Rope
from burst_jax.serving import Generator

VOCAB = 48
CONFIG = DecoderConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=48, num_heads=4, num_kv_heads=2, head_dim=8,
    mlp_dim=48, param_dtype=jnp.float32,
)  # fmt: skip
WINDOWS = (LayerKind(window=20), LayerKind())
NORMS_AFTER_BIASES = {"layer_pattern": WINDOWS, "qkv_bias": True, "qk_norm": True}
LIKE_GEMMA = {
    "layer_pattern": WINDOWS, "logits_soft_cap": 5.0, "final_soft_cap": 3.0, "post_norms": True,
    "tie_embeddings": True, "scale_embeddings": True, "norm_offset": 1.0, "qk_norm": False,
}  # fmt: skip
LIKE_GPT = {
    "layer_pattern": WINDOWS, "attention_sinks": True, "num_kv_heads": 1, "out_bias": True,
    "rope": Rope(fraction=0.5),
}  # fmt: skip

WITH_EXPERTS = {
    "feed_forward": MixtureOfExperts, "experts": Experts(8, 2, shared_dim=8, shared_gate=True),
    "mlp_bias": True,
    "mlp_dim": 50, "num_layers": 1,
}  # fmt: skip
WITH_BIASES = {
    "layer_pattern": (LayerKind(window=20, norms="after"),), "qkv_bias": True, "out_bias": True,
    "mlp_bias": True, "qk_norm": "joint", "attention_gate": True,
}  # fmt: skip


def models(config, sizes, layout, expert=None):
    """The same weights on one device and on a mesh, of which ``expert`` shards experts."""
    one = decoders.with_drawn_weights(config, mesh=mesh_of(seq=1), implementation="xla")
    mesh = mesh_of(**sizes)
    rules = dataclasses.replace(ShardingRules.of(mesh), expert=expert)
    options: Any = {"mesh": mesh, "rules": rules, "layout": layout, "implementation": "xla"}
    return one, one.with_attention(**options)


class Watched(Generator):
    """Records the logits of each step; ``program`` evaluates its programs."""

    def __init__(self, *args, program=None, **options):
        super().__init__(*args, **options)
        self.logits = []
        steps: Any = self._steps
        if program is evaluated:
            of_reach = functools.cache(lambda reach: program(partial(steps._prefill, reach)))
            steps.prefill = lambda reach, *rest: of_reach(reach)(*rest)
            steps.decode = program(steps._decode)

    def _choose(self, sampling, logits, key):
        self.logits.append(np.asarray(logits))
        return super()._choose(sampling, logits, key)


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length) for length in lengths]
