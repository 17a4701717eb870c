"""A jitted training step for language models whose sequences are sharded over a mesh."""

from burst_jax.training.batches import make_batch as make_batch
from burst_jax.training.batches import place_batch as place_batch
from burst_jax.training.loss import chunked_cross_entropy as chunked_cross_entropy
from burst_jax.training.loss import next_token_loss as next_token_loss
from burst_jax.training.step import evaluate as evaluate
from burst_jax.training.step import init_train_state as init_train_state
from burst_jax.training.step import make_eval_step as make_eval_step
from burst_jax.training.step import make_optimizer as make_optimizer
from burst_jax.training.step import make_train_step as make_train_step
