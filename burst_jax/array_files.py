"""Arrays of the user's, in files of ``numpy.save``.

Whatever a file contains, reading it ends: with an array, or with a ValueError that names the file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from burst_jax.errors import printable
from burst_jax.json_files import check_regular


def map_array(file: Path) -> np.ndarray:
    """The array in a file of ``numpy.save``, memory-mapped.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is no regular file, or holds something else.
    """
    check_regular(file)
    try:
        return np.lib.format.open_memmap(file, mode="r")
    # The header is parsed as Python, and its shape may be anything.
    except Exception as error:
        raise ValueError(
            f"{printable(file)} is no array of numpy.save ({printable(error)[:200]}): write it "
            "with numpy.save"
        ) from None
