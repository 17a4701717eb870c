"""Models built on sequence-parallel attention."""

from burst_jax.models.decoder import Decoder as Decoder
from burst_jax.models.decoder import DecoderConfig as DecoderConfig
from burst_jax.models.decoder import abstract_decoder as abstract_decoder
