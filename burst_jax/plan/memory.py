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
    ("apart", "rotate_kv"): (2.0, 6.0),
    ("apart", "rotate_query"): (6.7, 2.7),
    ("fused", "rotate_kv"): (2.0, 8.0),
    ("fused", "rotate_query"): (10.7, 2.6),
}
_TWO_LEVELS = {
    ("apart", "rotate_kv"): (2.1, 10.4),
    ("apart", "rotate_query"): (12.4, 1.8),
    ("fused", "rotate_kv"): (2.3, 12.1),
    ("fused", "rotate_query"): (17.1, 1.2),
}
_EXCHANGE = {
    ("apart", "rotate_kv"): (3.4, 4.5),
    ("apart", "rotate_query"): (4.7, 3.8),
    ("fused", "rotate_kv"): (3.3, 6.4),
    ("fused", "rotate_query"): (6.8, 3.7),
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
    if exchange:
        factors = _EXCHANGE[kernels, rotation]
    elif stops == 1:
        factors = _ALONE
    else:
        factors = (_RING if turns == 1 else _TWO_LEVELS)[kernels, rotation]
    return factors[0] * q + factors[1] * kv
