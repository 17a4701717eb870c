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


def continued(x, weight, ids, tail, dy, dtail):
    """Of sequences after a tail: ``(y, next tail, dx, dweight, gradient of the tail)``.

    The tail stands where each sequence's first token that is no padding begins, in its document.
    """
    halo, (batch, length, _) = len(weight) - 1, x.shape
    x, tail, dtail = (np.asarray(a, np.float64) for a in (x, tail, dtail))
    y, dx, dweight = np.zeros_like(x), np.zeros_like(x), np.zeros(weight.shape)
    after, dbefore = np.zeros_like(tail), np.zeros_like(tail)
    for b in range(batch):
        tokens = np.flatnonzero(ids[b])
        first, last = (tokens[0], tokens[-1]) if len(tokens) else (length, length - 1)
        here = ids[b, first : last + 1]
        # One more token of the last document: what it reads is the next tail.
        own = np.concatenate([np.full(halo, here[0] if len(here) else 1), here])
        own = np.append(own, own[-1] if len(own) else 1)[None]
        every = np.concatenate([tail[b], x[b, first : last + 1], np.zeros((1, x.shape[2]))])
        every = np.where(own[0, :, None] > 0, every, 0)
        given = np.zeros_like(every)
        given[halo:-1] = dy[b, first : last + 1]
        out, d_every, d_weight = truth(every[None], weight, own, given[None])
        y[b, first : last + 1] = out[0, halo:-1]
        reads = connected(own, halo + 1)[:halo, 0, -1]
        after[b] = np.where(reads[:, None], every[-1 - halo : -1], 0)
        d_every = d_every[0]
        d_every[-1 - halo : -1] += np.where(reads[:, None], dtail[b], 0)
        dx[b, first : last + 1], dbefore[b] = d_every[halo:-1], d_every[:halo]
        dweight += d_weight
    return y, after, dx, dweight, dbefore
