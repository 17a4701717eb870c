"""The GPU that the code being traced will run on."""

from __future__ import annotations

import jax

_H100_SMS = 132


def num_sms() -> int:
    """Number of SMs of the GPU that the traced code will run on; an H100's if it is unknown."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.num_cores or _H100_SMS
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or _H100_SMS
