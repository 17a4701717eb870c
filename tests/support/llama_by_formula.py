"""A Llama checkpoint by its formulas, in NumPy: what tests/gpu/peer.py has of transformers."""

from __future__ import annotations

from pathlib import Path

import hf_models
import ml_dtypes
import numpy as np


class LlamaByFormula:
    """As :class:`peer.Peer`. In "bfloat16" the results of all matrix products are rounded."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        tensors, self.config = hf_models.read_folder(folder)
        self._bits = dtype == "bfloat16"
        self.weights = {name: x.astype(np.float64) for name, x in tensors.items()}

    def _low(self, x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(np.float64) if self._bits else x

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return self._low(x / size * self.weights[f"{name}.weight"])

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return self._low(x @ self._low(self.weights[f"{name}.weight"]).T)

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """RoPE of ``[T, N, H]``: feature i and feature H / 2 + i are one complex number."""
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
        pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([pairs.real, pairs.imag], -1)

    def _attend(self, x: np.ndarray, name: str) -> np.ndarray:
        heads, kv_heads = (self.config[f"num_{k}_heads"] for k in ("attention", "key_value"))
        q, k, v = (
            self._linear(x, f"{name}.{letter}_proj").reshape(len(x), -1, self.config["head_dim"])
            for letter in "qkv"
        )
        q, k = self._rotate(q), np.repeat(self._rotate(k), heads // kv_heads, 1)
        v = np.repeat(v, heads // kv_heads, 1)
        logits = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
        logits = np.where(np.tri(len(x), dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)
        return self._linear(self._low(out).reshape(len(x), -1), f"{name}.o_proj")

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """float32 ``[T, V]`` of one sequence ``[T]``."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for number in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            x = x + self._attend(self._norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            normed = self._norm(x, f"{layer}.post_attention_layernorm")
            gate, up = (self._linear(normed, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(
                self._low(gate / (1 + np.exp(-gate)) * up), f"{layer}.mlp.down_proj"
            )
        return self._linear(self._norm(x, "model.norm"), "lm_head").astype(np.float32)

    def greedy(self, ids: np.ndarray, count: int) -> tuple[np.ndarray, float]:
        """The most probable next tokens, and the least lead of one over the second."""
        tokens, leads = list(ids), []
        for _ in range(count):
            last = self.logits(np.array(tokens))[-1]
            second, first = np.sort(last)[-2:]
            leads.append((first - second) / np.abs(last).max())
            tokens.append(int(last.argmax()))
        return np.array(tokens[len(ids) :], np.int32), float(min(leads))
