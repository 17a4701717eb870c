"""What transformers computes of a checkpoint, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

NEEDS = ("torch", "transformers", "safetensors")
_THREADS = 8


class Peer:
    """A checkpoint, loaded by transformers in a dtype."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        import torch  # pyrefly: ignore (not one of the project's dependencies)
        import transformers  # pyrefly: ignore

        torch.set_num_threads(min(_THREADS, torch.get_num_threads()))
        self._torch, self._config = torch, transformers.GenerationConfig
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """float32 ``[T, V]`` of one sequence ``[T]``."""
        with self._torch.no_grad():
            given = self._torch.tensor(np.asarray(ids)[None], dtype=self._torch.long)
            return self._model(given).logits[0].float().numpy()

    def greedy(self, ids: np.ndarray, count: int) -> tuple[np.ndarray, float]:
        """The ``count`` most probable next tokens, one after the other.

        Returns:
          The tokens, and the least lead of one of them over the second most probable token,
          relative to the largest logit.
        """
        given = self._torch.tensor(np.asarray(ids)[None], dtype=self._torch.long)
        # Not the folder's, which samples, and ends at tokens that random weights do not mean.
        self._model.generation_config = self._config(
            max_new_tokens=count, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
        found = self._model.generate(given, attention_mask=self._torch.ones_like(given))
        logits = self._torch.stack(found.logits, 1)[0].float().numpy()
        ordered = np.sort(logits, -1)
        lead = (ordered[:, -1] - ordered[:, -2]) / np.abs(logits).max(-1)
        return found.sequences[0, len(ids) :].numpy().astype(np.int32), float(lead.min())


def stop_settings(folder: Path) -> dict[str, Any]:
    """How transformers generates with a folder, and how it formats a chat."""
    import transformers  # pyrefly: ignore

    settings = transformers.GenerationConfig.from_pretrained(folder).to_dict()
    settings.pop("transformers_version", None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return settings | {"chat": tokenizer.apply_chat_template(chat, tokenize=False)}
