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
    ("apart", "rotate_query"): (7.4, 2.1),
    ("fused", "rotate_kv"): (2.0, 8.0),
    ("fused", "rotate_query"): (11.4, 2.1),
}
_TWO_LEVELS = {
    ("apart", "rotate_kv"): (2.1, 9.9),
    ("apart", "rotate_query"): (13.1, 1.3),
    ("fused", "rotate_kv"): (2.0, 12.1),
    ("fused", "rotate_query"): (16.4, 1.2),
}
_EXCHANGE_ALONE = {"apart": (3.5, 1.3), "fused": (3.3, 2.4)}
_EXCHANGE = {
    ("apart", "rotate_kv"): (3.2, 5.6),
    ("apart", "rotate_query"): (7.5, 3.3),
    ("fused", "rotate_kv"): (3.2, 7.6),
    ("fused", "rotate_query"): (12.0, 3.0),
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
