"""What several model families have in common: keys, and names of the tensors of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burst_jax.models.hf.family import LAYER, NAMES, Names
from burst_jax.models.hf.ropes import FULL
from burst_jax.models.hf.views import OtherForm

COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}
# The keys of experts in most families, and those of training them.
EXPERTS = {"num_local_experts": "count", "num_experts_per_tok": "per_token"}
ROUTER_IGNORED = ("output_router_logits", "router_aux_loss_coef")
MLP = ("layers", "mlp")
EXPERTS_NAMES: Names = {
    **NAMES,
    (*MLP, "router", "kernel"): LAYER + "mlp.gate.weight",
    **{
        (*MLP, name, "kernel"): LAYER + f"mlp.experts.{{expert}}.{name}_proj.weight"
        for name in ("gate", "up", "down")
    },
}
# The experts of a layer as transformers 5 has them in memory, and some files, too.
EXPERTS_FORMS = (
    OtherForm(
        (LAYER + "mlp.experts.gate_up_proj",),
        tuple(EXPERTS_NAMES[*MLP, name, "kernel"] for name in ("gate", "up")),  # pyrefly: ignore
    ),
    OtherForm(
        (LAYER + "mlp.experts.down_proj",),
        (EXPERTS_NAMES[*MLP, "down", "kernel"],),  # pyrefly: ignore
    ),
)


def all_but_each(kind: str, pattern: int, values: Mapping[str, Any]) -> list[str]:
    """Layers of a type, but for each ``pattern``-th, which has full attention."""
    return [kind if (layer + 1) % pattern else FULL for layer in range(values["num_hidden_layers"])]
