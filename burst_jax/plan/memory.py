"""Memory of a forward and a backward pass beside their arguments and results.

XLA lays buffers over each other, so no formula of live arrays gives it. These factors were read off
programs compiled for eight to twelve GPUs, one to sixteen query heads to a key head
(``compiled.memory_analysis()``, tests/test_plan.py holds them to others); the ring's size does not
matter. Unit: bytes of one ring's shard of Q, and of K and V together, with a device's own heads.
"""

from __future__ import annotations

# By kernels ("apart": dQ and dK, dV from two; "fused": from one) and rotation: (Q's, KV's).
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
    """Bytes per device.

    Args:
      kernels: "apart" or "fused".
      rotation: "rotate_kv" or "rotate_query".
      turns: of the route.
      stops: of the route.
      exchange: whether devices exchange heads.
      q: bytes of Q.
      kv: bytes of K and V.
    """
    if stops == 1:
        factors = _EXCHANGE_ALONE[kernels] if exchange else _ALONE
    elif exchange:
        factors = _EXCHANGE[kernels, rotation]
    else:
        factors = (_RING if turns == 1 else _TWO_LEVELS)[kernels, rotation]
    return factors[0] * q + factors[1] * kv
