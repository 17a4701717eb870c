"""Every test runs on eight CPU devices, whatever else the machine has."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# An implicit bfloat16 + float32 is a precision bug here, never a convenience.
jax.config.update("jax_numpy_dtype_promotion", "strict")
