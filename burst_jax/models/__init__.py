"""Models built on sequence-parallel attention."""

from burst_jax.layers.lora import Lora as Lora
from burst_jax.layers.rope import DynamicRope as DynamicRope
from burst_jax.layers.rope import LinearRope as LinearRope
from burst_jax.layers.rope import Llama3Rope as Llama3Rope
from burst_jax.layers.rope import Rope as Rope
from burst_jax.layers.rope import YarnRope as YarnRope
from burst_jax.models.config import LayerKind as LayerKind
from burst_jax.models.decoder import Decoder as Decoder
from burst_jax.models.decoder import DecoderConfig as DecoderConfig
from burst_jax.models.decoder import abstract_decoder as abstract_decoder
from burst_jax.models.experts import Experts as Experts
from burst_jax.models.experts import MixtureOfExperts as MixtureOfExperts
from burst_jax.models.feed_forward import Auxiliary as Auxiliary
from burst_jax.models.feed_forward import FeedForward as FeedForward
from burst_jax.models.hf.load import load as load
from burst_jax.models.hf.load import load_config as load_config
from burst_jax.models.hf.peft import load_adapter as load_adapter
from burst_jax.models.hf.peft import save_adapter as save_adapter
from burst_jax.models.hf.save import check_save_folder as check_save_folder
from burst_jax.models.hf.save import save as save
from burst_jax.models.hf.tied import UntiedHead as UntiedHead
from burst_jax.models.hf.trained_length import BeyondTrainedLength as BeyondTrainedLength
from burst_jax.models.hf.trained_length import check_trained_length as check_trained_length
from burst_jax.models.hf.trained_length import trained_length as trained_length
from burst_jax.models.lora import add_lora as add_lora
from burst_jax.models.lora import merge_lora as merge_lora
