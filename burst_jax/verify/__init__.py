"""Compares a loss on a mesh and layout with the same loss on one device, and names what differs.

:func:`compare` for a loss of your own, ``python -m burst_jax.verify --help`` for a Hugging Face
checkpoint.
"""

from burst_jax.verify.comparison import compare as compare
from burst_jax.verify.report import Cost as Cost
from burst_jax.verify.report import Difference as Difference
from burst_jax.verify.report import Report as Report
