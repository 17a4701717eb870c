"""Exact attention over sequences sharded across devices, for JAX.

:func:`burst_attention` takes global arrays, :func:`ring_attention` one device's arrays inside the
caller's own ``shard_map``, and :func:`local_attention` the arrays of a single device. :func:`merge`
combines partial results exactly. :func:`to_layout` and related functions permute tokens into an
order that balances a causal ring.
"""

import importlib as _importlib
import importlib.metadata as _metadata
from typing import TYPE_CHECKING as _TYPE_CHECKING

from burst_jax.attention.api import burst_attention as burst_attention
from burst_jax.attention.api import local_attention as local_attention
from burst_jax.attention.api import ring_attention as ring_attention
from burst_jax.attention.block_mask import block_mask_of as block_mask_of
from burst_jax.attention.max_logits import max_logits as max_logits
from burst_jax.attention.max_logits import ring_max_logits as ring_max_logits
from burst_jax.attention.merging import merge as merge
from burst_jax.attention.order import check_positions as check_positions
from burst_jax.layers.attention_fn import linen_attention_fn as linen_attention_fn
from burst_jax.layers.attention_fn import nnx_attention_fn as nnx_attention_fn
from burst_jax.layers.linen_layer import LinenBurstAttention as LinenBurstAttention
from burst_jax.layers.nnx_layer import BurstAttention as BurstAttention
from burst_jax.layouts.body import in_layout as in_layout
from burst_jax.layouts.permutation import from_layout as from_layout
from burst_jax.layouts.permutation import pad_to_layout as pad_to_layout
from burst_jax.layouts.permutation import positions as positions
from burst_jax.layouts.permutation import to_layout as to_layout
from burst_jax.parallel.mesh import axes_of as axes_of
from burst_jax.parallel.rules import ShardingRules as ShardingRules
from burst_jax.parallel.xla_options import compiler_options as compiler_options
from burst_jax.parallel.xla_options import set_compiler_options as set_compiler_options
from burst_jax.ring.max_logits import MaxLogits as MaxLogits
from burst_jax.ring.vjp import CHECKPOINT_NAMES as CHECKPOINT_NAMES

try:
    __version__ = _metadata.version("burst-jax")
except _metadata.PackageNotFoundError:  # A checkout on the path, which is not installed.
    __version__ = "0+unknown"

# Reachable as attributes, ``burst_jax.plan.attention(...)``, and imported when they are first used.
_PACKAGES = ("data", "linear", "models", "plan", "serving", "training", "verify")
# The same for classes that import such packages.
_MODULES = {
    "GatedDeltaNet": "burst_jax.layers.gated_delta_net",
    "KimiDeltaAttention": "burst_jax.layers.kimi_delta_attention",
    "LatentAttention": "burst_jax.layers.latent_attention",
}

if _TYPE_CHECKING:
    from burst_jax import data as data
    from burst_jax import linear as linear
    from burst_jax import models as models
    from burst_jax import plan as plan
    from burst_jax import serving as serving
    from burst_jax import training as training
    from burst_jax import verify as verify
    from burst_jax.layers.gated_delta_net import GatedDeltaNet as GatedDeltaNet
    from burst_jax.layers.kimi_delta_attention import KimiDeltaAttention as KimiDeltaAttention
    from burst_jax.layers.latent_attention import LatentAttention as LatentAttention


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return _importlib.import_module(f"burst_jax.{name}")
    if name in _MODULES:
        return getattr(_importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'burst_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_MODULES})
