"""Exact attention over sequences sharded across devices, for JAX.

:func:`burst_attention` takes global arrays, :func:`ring_attention` one device's arrays inside the
caller's own ``shard_map``, and :func:`local_attention` those of one device alone; :func:`merge`
makes one attention of partial ones; :func:`to_layout` and its kin put tokens into the order that
balances a causal ring.
"""

from importlib.metadata import version as _version

from burst_jax.api import burst_attention as burst_attention
from burst_jax.block_mask import block_mask_of as block_mask_of
from burst_jax.flax.adapters import linen_attention_fn as linen_attention_fn
from burst_jax.flax.adapters import nnx_attention_fn as nnx_attention_fn
from burst_jax.flax.layer import BurstAttention as BurstAttention
from burst_jax.flax.linen_layer import LinenBurstAttention as LinenBurstAttention
from burst_jax.layout import from_layout as from_layout
from burst_jax.layout import pad_to_layout as pad_to_layout
from burst_jax.layout import positions as positions
from burst_jax.layout import to_layout as to_layout
from burst_jax.merging import merge as merge
from burst_jax.plan import plan as plan
from burst_jax.plan import plan_training as plan_training
from burst_jax.platform import compiler_options as compiler_options
from burst_jax.platform import set_compiler_options as set_compiler_options
from burst_jax.ring.vjp import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from burst_jax.rules import ShardingRules as ShardingRules
from burst_jax.shard_api import local_attention as local_attention
from burst_jax.shard_api import ring_attention as ring_attention

__version__ = _version("burst-jax")
