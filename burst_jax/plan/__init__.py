"""Compares strategies to shard a sequence: bytes, seconds and memory of each, without a GPU.

:func:`attention` for one attention, :func:`training` for a decoder's whole training step,
:func:`documents` for the layout of packed documents, or ``python -m burst_jax.plan --help``.
"""

from burst_jax.plan.attention_plan import AttentionPlan as AttentionPlan
from burst_jax.plan.attention_plan import attention as attention
from burst_jax.plan.cost_model import Estimate as Estimate
from burst_jax.plan.documents_plan import DocumentsPlan as DocumentsPlan
from burst_jax.plan.documents_plan import LayoutWork as LayoutWork
from burst_jax.plan.documents_plan import documents as documents
from burst_jax.plan.hardware import GPUS as GPUS
from burst_jax.plan.hardware import Gpu as Gpu
from burst_jax.plan.training_plan import StepEstimate as StepEstimate
from burst_jax.plan.training_plan import TrainingPlan as TrainingPlan
from burst_jax.plan.training_search import training as training
