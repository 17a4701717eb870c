"""Which sequences a checkpoint was trained on, and a warning about longer ones."""

from __future__ import annotations

import warnings

from burst_jax.layers.rope import DynamicRope, Llama3Rope, YarnRope
from burst_jax.models.config import DecoderConfig
from burst_jax.models.hf.config import loaded_from


class BeyondTrainedLength(UserWarning):
    """Sequences have more tokens than the checkpoint was trained on."""


def trained_length(config: DecoderConfig) -> int | None:
    """The largest number of tokens from a document's start that a checkpoint supports.

    It is ``max_position_embeddings`` of ``config.json``, or what its Llama 3 or YaRN RoPE extends
    the old context to, if that is more. None if there is no limit: for decoders that were not
    loaded from a checkpoint, and with a RoPE that scales with the length.
    """
    if config.hf_config is None:
        return None
    given, family = loaded_from(config.hf_config)
    length = {**family.defaults, **given}.get(family.length_key)
    if length is None:
        return None
    for rope in config.layer_ropes:
        if isinstance(rope, DynamicRope):
            return None
        if isinstance(rope, (Llama3Rope, YarnRope)):
            length = max(length, int(rope.old_positions * rope.factor))
    return int(length)


def check_trained_length(config: DecoderConfig, name: str, tokens: int) -> None:
    """Warns with :class:`BeyondTrainedLength` if ``tokens`` exceed :func:`trained_length`.

    Documents of a packed sequence may be shorter than the sequence: this is no error.

    Args:
      config: of a decoder.
      name: what has this many tokens, for the message.
      tokens: of a sequence.
    """
    warn_beyond(trained_length(config), name, tokens)


def warn_beyond(length: int | None, name: str, tokens: int) -> None:
    """:func:`check_trained_length` of a checkpoint that supports ``length`` tokens."""
    if length is not None and tokens > length:
        warnings.warn(
            f"{name} is {tokens}: the checkpoint was trained on {length} positions, and its "
            f"results for tokens after them are poor; use at most {length}, shorter documents, or "
            "rope_scaling and a larger max_position_embeddings in its config.json",
            BeyondTrainedLength,
            stacklevel=4,
        )
