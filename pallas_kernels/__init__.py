"""Local attention on one device: Pallas Mosaic GPU kernels and plain JAX.

All implementations have one interface (:class:`Implementation`), independent of meshes, rings and
layouts. Positions and segment ids define which keys a query attends to, tile bounds which tiles a
kernel visits. A dense reference is for tests.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from pallas_kernels.arrays import vary as vary
from pallas_kernels.arrays import varying_axes as varying_axes
from pallas_kernels.backend import Implementation as Implementation
from pallas_kernels.block_mask import BlockMask as BlockMask
from pallas_kernels.bounds import key_bounds as key_bounds
from pallas_kernels.bounds import query_bounds as query_bounds
from pallas_kernels.choice import NAMES as NAMES
from pallas_kernels.choice import SlowerKernelsWarning as SlowerKernelsWarning
from pallas_kernels.choice import find as find
from pallas_kernels.choice import resolve as resolve
from pallas_kernels.dropout import Dropout as Dropout
from pallas_kernels.inputs import AttentionInputs as AttentionInputs
from pallas_kernels.inputs import GlobalIndices as GlobalIndices
from pallas_kernels.inputs import KVSide as KVSide
from pallas_kernels.inputs import QuerySide as QuerySide
from pallas_kernels.inputs import SharedInputs as SharedInputs
from pallas_kernels.mask import Mask as Mask
from pallas_kernels.merge import merge as merge
from pallas_kernels.reference import REFERENCE as REFERENCE
from pallas_kernels.score import Score as Score
from pallas_kernels.spec import AttentionSpec as AttentionSpec
from pallas_kernels.spec import Tiles as Tiles
from pallas_kernels.xla import XLA as XLA

if _TYPE_CHECKING:
    from pallas_kernels.mosaic.sm80.decode import DecodeConfig as DecodeConfig
    from pallas_kernels.mosaic.sm80.decode import decode_config as decode_config
    from pallas_kernels.mosaic.sm80.implementation import MOSAIC_SM80 as MOSAIC_SM80
    from pallas_kernels.mosaic.sm80.implementation import mosaic_sm80 as mosaic_sm80
    from pallas_kernels.mosaic.sm90.implementation import MOSAIC_SM90 as MOSAIC_SM90
    from pallas_kernels.mosaic.sm90.implementation import mosaic_sm90 as mosaic_sm90

# Imported when they are first used: the kernels take most of a second to import.
_KERNELS = {
    "MOSAIC_SM80": "mosaic.sm80.implementation",
    "mosaic_sm80": "mosaic.sm80.implementation",
    "MOSAIC_SM90": "mosaic.sm90.implementation",
    "mosaic_sm90": "mosaic.sm90.implementation",
    "DecodeConfig": "mosaic.sm80.decode",
    "decode_config": "mosaic.sm80.decode",
}


def __getattr__(name: str) -> object:
    if name in _KERNELS:
        module = _importlib.import_module(f"pallas_kernels.{_KERNELS[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_KERNELS})
