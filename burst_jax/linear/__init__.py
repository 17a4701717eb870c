"""Linear attention over sequences sharded across devices: the gated delta rule."""

from burst_jax.linear.api import gated_delta_rule as gated_delta_rule
from burst_jax.linear.api import gated_delta_rule_step as gated_delta_rule_step
from burst_jax.linear.api import short_convolution as short_convolution
from burst_jax.linear.delta_rule import CHECKPOINT_NAMES as CHECKPOINT_NAMES
