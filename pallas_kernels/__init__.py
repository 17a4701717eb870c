"""Local attention on one device: a reference, a plain-JAX and a Pallas GPU implementation.

One interface (:class:`Implementation`) for all; no mesh, no ring, no layout names. Positions and
segment ids say what may attend to what, tile bounds say which tiles to visit.
"""

from pallas_kernels.arrays import Pair as Pair
from pallas_kernels.arrays import vary as vary
from pallas_kernels.arrays import varying_axes as varying_axes
from pallas_kernels.bounds import key_bounds as key_bounds
from pallas_kernels.bounds import query_bounds as query_bounds
from pallas_kernels.local_attention import MOSAIC_GPU as MOSAIC_GPU
from pallas_kernels.local_attention import NAMES as NAMES
from pallas_kernels.local_attention import REFERENCE as REFERENCE
from pallas_kernels.local_attention import TRITON as TRITON
from pallas_kernels.local_attention import XLA as XLA
from pallas_kernels.local_attention import Implementation as Implementation
from pallas_kernels.local_attention import SlowerKernelsWarning as SlowerKernelsWarning
from pallas_kernels.local_attention import find as find
from pallas_kernels.local_attention import mosaic_gpu as mosaic_gpu
from pallas_kernels.local_attention import resolve as resolve
from pallas_kernels.local_attention import triton as triton
from pallas_kernels.merge import merge as merge
from pallas_kernels.spec import AttentionSpec as AttentionSpec
from pallas_kernels.spec import Tiles as Tiles
from pallas_kernels.spec import Tokens as Tokens
