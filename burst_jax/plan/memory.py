"""Memory that a forward and a backward pass need beside their arguments and results.

XLA lets buffers share memory, so the sizes of the arrays do not tell how much a program needs.
The factors here were read off programs compiled for eight to twelve GPUs, with one to sixteen query
heads to a key head (``compiled.memory_analysis()``); tests/plan/test_plan.py compares them with
other
programs. The ring's size does not matter. A factor's unit is the bytes of a ring's shard of Q,
or of K and V together, with the heads that one device has.
"""

from __future__ import annotations

# ``(factor of Q, factor of K and V)`` by kernels and rotation. Kernels are "apart" if one computes
# dQ and another dK and dV, and "fused" if one computes all three.
_ALONE = (2.0, 2.0)
_RING = {
    ("apart", "rotate_kv"): (2.0, 7.6),
    ("apart", "rotate_query"): (10.6, 1.0),
    ("fused", "rotate_kv"): (2.0, 9.0),
    ("fused", "rotate_query"): (12.6, 1.0),
}
_TWO_LEVELS = {
    ("apart", "rotate_kv"): (2.0, 10.5),
    ("apart", "rotate_query"): (15.7, 1.0),
    ("fused", "rotate_kv"): (2.0, 14.2),
    ("fused", "rotate_query"): (16.8, 1.7),
}
_EXCHANGE_ALONE = {"apart": (2.7, 1.8), "fused": (3.0, 2.3)}
_EXCHANGE = {
    ("apart", "rotate_kv"): (3.7, 6.3),
    ("apart", "rotate_query"): (9.3, 1.9),
    ("fused", "rotate_kv"): (3.0, 9.0),
    ("fused", "rotate_query"): (11.2, 1.9),
}


def temp_bytes(
    kernels: str, rotation: str, *, turns: int, stops: int, exchange: bool, q: int, kv: int
) -> float:
    """Bytes that each device needs beside arguments and results.

    Args:
      kernels: "apart" or "fused".
      rotation: "rotate_kv" or "rotate_query".
      turns: number of turns of the route, 1 on a ring of one level.
      stops: number of stops of the route.
      exchange: whether devices exchange heads.
      q: bytes of a ring's shard of Q, with one device's heads.
      kv: bytes of a ring's shard of K and V together, with one device's heads.
    """
    if stops == 1:
        factors = _EXCHANGE_ALONE[kernels] if exchange else _ALONE
    elif exchange:
        factors = _EXCHANGE[kernels, rotation]
    else:
        factors = (_RING if turns == 1 else _TWO_LEVELS)[kernels, rotation]
    return factors[0] * q + factors[1] * kv
