"""The output projection of checkpoints whose ``config.json`` ties it to the embedding.

Some files have the projection nevertheless. It may be a copy of the embedding, or another matrix,
which then is the model's, whatever ``config.json`` has; and some files have the projection alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection

import numpy as np

from burst_jax.models.config import DecoderConfig
from burst_jax.models.hf.config import loaded_from
from burst_jax.models.hf.family import Family
from burst_jax.models.hf.files import FLOATING, TensorFiles

# Bytes of a tensor that are compared at a time.
_BLOCK = 1 << 26


class UntiedHead(UserWarning):
    """``config.json`` ties an output projection to an embedding, and the two differ."""


def head_name(family: Family) -> str:
    """The name of the output projection's tensor."""
    return str(family.names["head", "kernel"])


def resolve_head(
    config: DecoderConfig, family: Family, files: TensorFiles, ignore: Collection[str]
) -> DecoderConfig:
    """The config that the tensors are loaded with, as in transformers 5.

    A decoder with tied embeddings remains tied if the projection is missing, in ``ignore``, or a
    copy of the embedding. If the embedding is missing, the projection becomes the embedding.
    """
    head, embedding = head_name(family), str(family.names["embedding",])
    if not config.tie_embeddings or head not in files.names or head in ignore:
        return config
    if embedding not in files.names:
        files.rename(head, embedding)
        return config
    if _are_equal(files, head, embedding, np.dtype(config.param_dtype)):
        return config
    given, _ = loaded_from(str(config.hf_config))
    given["tie_word_embeddings"] = False
    return dataclasses.replace(
        config, tie_embeddings=False, hf_config=json.dumps(given, sort_keys=True)
    )


def _are_equal(files: TensorFiles, one: str, other: str, dtype: np.dtype) -> bool:
    """Whether two matrices are equal in the dtype in which they are loaded, bit by bit."""
    shape = files.shape(one)
    floating = files.dtype(one) in FLOATING and files.dtype(other) in FLOATING
    if not floating or len(shape) != 2 or files.shape(other) != shape:
        return False
    rows = max(1, _BLOCK // max(1, shape[1] * dtype.itemsize))
    for start in range(0, shape[0], rows):
        index = (slice(start, min(start + rows, shape[0])), slice(0, shape[1]))
        parts = (np.asarray(files.read(name, index)).astype(dtype) for name in (one, other))
        if len({part.tobytes() for part in parts}) != 1:
            return False
    return True
