"""The short convolution, tap by tap, in float64."""

from __future__ import annotations

import numpy as np


def connected(ids, taps):
    """Which taps read a token of the same document, ``[taps, B, T]``; ids 0 are padding.

    A document is what has one id, whatever padding is in it; a later one may have the same id.
    """
    batch, length = ids.shape
    found = np.zeros((taps, batch, length), bool)
    for b in range(batch):
        number, before, document = 0, None, np.zeros(length, int)
        for t in range(length):
            if ids[b, t] > 0:
                number += before is not None and ids[b, t] != before
                before = ids[b, t]
            document[t] = number
        for t in range(length):
            for j in range(taps):
                s = t - (taps - 1) + j
                both = s >= 0 and ids[b, s] > 0 and ids[b, t] > 0
                found[j, b, t] = both and document[s] == document[t]
    return found


def truth(x, weight, ids, dy):
    """``(y, dx, dweight)`` in float64, by hand."""
    taps, length = len(weight), x.shape[1]
    reads = connected(np.ones(x.shape[:2], int) if ids is None else ids, taps)[..., None]
    x, weight, dy = (np.asarray(a, np.float64) for a in (x, weight, dy))
    y, dx, dweight = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weight)
    for j in range(taps):
        back = min(taps - 1 - j, length)  # Of a sequence shorter than that, no token.
        shifted = np.zeros_like(x)
        shifted[:, back:] = x[:, : length - back]
        y += np.where(reads[j], shifted, 0) * weight[j]
        given = np.where(reads[j], dy, 0)
        dweight[j] = (given * shifted).sum((0, 1))
        dx[:, : length - back] += (given * weight[j])[:, back:]
    return y, dx, dweight
