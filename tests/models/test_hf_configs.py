"""``config.json``: published models, what is rejected, and what is written."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import hf_models
import jax
import jax.numpy as jnp
import pytest

from burst_jax.models import (
    BeyondTrainedLength,
    LayerKind,
    LinearRope,
    Llama3Rope,
    Rope,
    abstract_decoder,
    check_trained_length,
    trained_length,
)
from burst_jax.models.hf.config import config_json, read_config

GELU = "gelu_pytorch_tanh"


def sizes(layers, width, hidden, heads, kv_heads, vocab, **more):
    found = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": hidden}
    heads = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**found, **heads, "vocab_size": vocab, **more}


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
# Keys as in the models' own files; their authors' number of weights; the kinds of the first and of
# the sixth layer.
PUBLISHED = {
    "Llama-3.2-1B": (
        {"model_type": "llama", "head_dim": 64, "rope_theta": 500000.0, "tie_word_embeddings": True}
        | sizes(16, 2048, 8192, 32, 8, 128256, rope_scaling=LLAMA3),
        1_235_814_400,
        [LayerKind(None, Llama3Rope(5e5, factor=32.0))] * 2,
    ),
    "Qwen2.5-7B": (
        {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False}
        | {"use_mrope": False, "max_window_layers": 28, "rope_theta": 1000000.0}
        | sizes(28, 3584, 18944, 28, 4, 152064, attention_dropout=0.0),
        7_615_616_512,
        [LayerKind(None, Rope(1e6))] * 2,
    ),
    # Its text_config omits transformers' defaults.
    "gemma-3-4b": (
        {"model_type": "gemma3", "mm_tokens_per_image": 256, "vision_config": {"hidden_size": 1152}}
        | {
            "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "sliding_window": 1024}
            | {"model_type": "gemma3_text", "num_hidden_layers": 34}
            | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
        },
        3_880_263_168,
        [LayerKind(1024, Rope(1e4)), LayerKind(None, LinearRope(1e6, factor=8.0))],
    ),
}


@pytest.fixture
def read_file(tmp_path):
    """The config of a ``config.json``."""

    def read(written, **options):
        (tmp_path / "config.json").write_text(json.dumps(written))
        return read_config(tmp_path, **options)[0]

    return read


@pytest.fixture
def read(read_file):
    """The config of a ``config.json`` of this family, with sizes of four layers."""
    small = sizes(4, 8, 16, 2, 1, 32, head_dim=4)
    return lambda model_type, ignore=(), **options: read_file(
        {"model_type": model_type, **small, **options}, ignore=ignore
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(tmp_path, name):
    written, count, kinds = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    config, _, multimodal = read_config(tmp_path)
    assert [config.layer_kinds[0], config.layer_kinds[5]] == kinds
    assert (multimodal is not None) == (name == "gemma-3-4b")
    _, shapes = abstract_decoder(config)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == count


def per_type(full=None, sliding=None):
    """Gemma 3's ``rope_parameters``."""
    return {"full_attention": full or {}, "sliding_attention": sliding or {}}


LINEAR, SCALED = {"rope_type": "linear", "factor": 8.0}, LinearRope(1e6, factor=8.0)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
GEMMA3_ROPES = [
    ({}, Rope(1e4), Rope(1e6)),
    ({"rope_parameters": per_type(), "rope_theta": 5e5}, Rope(1e4), Rope(5e5)),
    ({"rope_parameters": per_type(), "rope_local_base_freq": 3e4}, Rope(3e4), Rope(1e6)),
    ({"rope_parameters": per_type(sliding={"rope_theta": 2e4})}, Rope(2e4), Rope(1e6)),
    ({"rope_scaling": LINEAR}, Rope(1e4), SCALED),
    ({"rope_scaling": LINEAR, "rope_parameters": per_type(LINEAR)}, Rope(1e4), SCALED),
]


@pytest.mark.parametrize(("written", "sliding", "full"), GEMMA3_ROPES)
def test_ropes_of_gemma_3_are_those_of_transformers(read, written, sliding, full):
    """As in transformers 5.23's Gemma3TextConfig."""
    config = read("gemma3_text", sliding_window_pattern=2, **written)
    assert config.layer_ropes == (sliding, full, sliding, full)


VALUE, UNSUPPORTED = ValueError, NotImplementedError
TYPES = ["full_attention", "sliding_attention"] * 2
REJECTED = [
    ("mamba", {}, UNSUPPORTED, "model_type 'mamba': supported are llama"),
    ("llava", {"text_config": {}}, UNSUPPORTED, "save its language model with transformers"),
    ("llama", {"vocab_size": None}, VALUE, "lacks vocab_size"),
    ("llama", {"attention_dropout": 0.1}, UNSUPPORTED, "attention_dropout is 0.1 and"),
    ("llama", {"new_trick": 1, "a b": 1}, UNSUPPORTED,
     r"new_trick is 1, and unknown.*ignore=\('new_trick', 'a b'\), .* --ignore new_trick 'a b'"),
    ("llama", {"rope_interleaved": True}, UNSUPPORTED, "is True and must be False.*--ignore KEY"),
    ("mixtral", {"attention_bias": True}, UNSUPPORTED, "attention_bias is True and must be False"),
    ("llama", {"sliding_window": 8}, UNSUPPORTED, "sliding_window is 8 and must be None"),
    ("llama", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
     UNSUPPORTED, r"quant_method 'bitsandbytes': no other .*folder\).dequantize\(\).save_pretrain"),
    ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, UNSUPPORTED, "Mxfp4Config"),
    ("qwen3", {"compression_config": {"quant_method": "compressed-tensors"}}, UNSUPPORTED,
     r"quantization_config=CompressedTensorsConfig\(dequantize=True\)\).save_pretrained"),
    ("qwen3", {"quantization_config": {"quant_method": "awq"}}, UNSUPPORTED, "it was quantized fr"),
    ("llama", {"hidden_act": "relu"}, UNSUPPORTED, "hidden_act is 'relu': supported are silu"),
    ("llama", {"partial_rotary_factor": 0.5}, UNSUPPORTED, "partial_rotary_factor is 0.5: only 1"),
    ("llama", {"rope_scaling": {"type": "longrope"}}, UNSUPPORTED, "type 'longrope': supported"),
    ("llama", {"rope_scaling": LINEAR | {"offset": 1}}, UNSUPPORTED, "'linear' has offset"),
    ("llama", {"rope_scaling": {"type": "linear"}}, VALUE, "'linear' lacks factor"),
    ("llama", {"rope_scaling": LINEAR | {"factor": "2"}}, VALUE, "factor is '2': it must be pos"),
    ("llama", {"rope_scaling": "linear"}, VALUE, "'linear': it must be a JSON object"),
    ("llama", {"rope_parameters": [1]}, VALUE, r"\[1\]: it must be a JSON object"),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 5e5}}, VALUE,
     "rope_scaling .* and rope_parameters .* disagree.*remove one of them"),
    ("gemma3_text", {"rope_scaling": LINEAR, "rope_parameters": per_type()}, VALUE, "disagree"),
    ("gemma3_text", {"rope_scaling": per_type(LINEAR)}, VALUE, "must be in rope_parameters"),
    ("gemma3_text", {"rope_parameters": LINEAR}, VALUE, "a dictionary for each type of layer"),
    ("gemma3_text", {"rope_parameters": per_type("linear")}, VALUE, "must be a JSON object"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, UNSUPPORTED, "is 50.0 and must be None"),
    ("gemma3_text", {"layer_types": ["full_attention"]}, VALUE, "it needs 4 entries"),
    ("gemma3_text", {"sliding_window": None}, VALUE, "sliding_window is null"),
    ("gemma2", {"use_bidirectional_attention": True}, UNSUPPORTED, "must be False"),
    ("qwen2", {"layer_types": TYPES}, VALUE, "its use_sliding_window is false: make it true"),
    ("qwen3", {"dtype": "float8"}, UNSUPPORTED, "dtype 'float8': pass dtype="),
]  # fmt: skip


@pytest.mark.parametrize(("family", "written", "error", "message"), REJECTED)
def test_configs_that_are_rejected(read, family, written, error, message):
    with pytest.raises(error, match=message):
        read(family, **written)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"num_experts": 4},
            NotImplementedError,
            r"'gemma3': num_experts is 4, and unknown.*ignore=\('num_experts',\)",
        ),
        (
            {"text_config": {"model_type": "qwen3_5_text"}},
            ValueError,
            "model_type 'gemma3' and text_config.model_type 'qwen3_5_text': .* is a 'gemma3_text'",
        ),
        ({"text_config": {"model_type": 3}}, ValueError, "text_config.model_type 3: that model's"),
        (
            {"quantization_config": {"bits": 4}},
            NotImplementedError,
            "quantization_config {'bits': 4}: no other quant.*"
            "; load the checkpoint that it was quantized from",
        ),
        (
            {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
            NotImplementedError,
            "tie_word_embeddings is False and must be True",
        ),
    ],
)
def test_other_keys_of_a_model_with_images_are_rejected(read_file, change, error, message):
    with pytest.raises(error, match=message):
        read_file(PUBLISHED["gemma-3-4b"][0] | change)


@pytest.mark.parametrize(
    ("whole", "text", "dtype"),
    [
        ({"dtype": "bfloat16"}, {"dtype": None}, jnp.bfloat16),
        ({"dtype": "bfloat16"}, {"torch_dtype": "float16"}, jnp.float16),
        ({"torch_dtype": "bfloat16"}, {"dtype": "float16"}, jnp.float16),
        ({}, {}, jnp.float32),
    ],
)
def test_the_language_model_of_a_model_with_images_has_its_own_dtype(read_file, whole, text, dtype):
    text = {"model_type": "gemma3_text", "tie_word_embeddings": None, **text}
    written = {"model_type": "gemma3", "tie_word_embeddings": False, **whole, "text_config": text}
    config = read_file(written)
    assert (config.dtype, config.tie_embeddings) == (dtype, False)


# Of published models, among others SmolLM2's, unsloth's and those of transformers before 4.30.
HARMLESS: dict[str, Any] = {
    "rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {"dtype": "q4"},
    "unsloth_fixed": True, "unsloth_version": "2026.1", "quantization_config": None,
    "attention_bias": False, "mlp_bias": False, "temperature": 0.7, "max_length": 20,
    "forced_eos_token_id": None, "bad_words_ids": None,
}  # fmt: skip
OF_LLAMA = {"use_sliding_window": False, "sliding_window": None}


def test_a_null_boolean_is_false_and_stays_null(read):
    config = read("llama", mlp_bias=None, tie_word_embeddings=None)
    assert (config.mlp_bias, config.tie_embeddings) == (False, False)
    written, _ = config_json(config, "float32", None)
    assert (written["mlp_bias"], written["tie_word_embeddings"]) == (None, None)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3_text", "mixtral"])
def test_keys_that_change_nothing_are_known(read, family):
    plain, keys = read(family), HARMLESS | (OF_LLAMA if family == "llama" else {})
    config = read(family, **keys)
    assert dataclasses.replace(config, hf_config=plain.hf_config) == plain
    kept = config_json(config, "float32", None)[0]
    assert kept.keys() >= keys.keys() - {"quantization_config"}


def test_options_that_are_absent_or_ignored(read):
    kinds = read("qwen3", layer_types=TYPES, sliding_window=8, use_sliding_window=True).layer_kinds
    assert [kind.window for kind in kinds] == [None, 8, None, 8]
    last = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert [kind.window for kind in read("qwen2", **last).layer_kinds] == [None, None, None, 8]
    short = {key: value for key, value in YARN.items() if key != "factor"}
    rope = read("llama", rope_scaling=short, max_position_embeddings=512).layer_ropes[0]
    assert (rope.factor, rope.old_positions) == (2.0, 256)
    plain = read("llama", rope_scaling=YARN)
    zeros = read("llama", rope_scaling=YARN | {"mscale": 0, "mscale_all_dim": 0.0})
    assert zeros.layer_ropes == plain.layer_ropes
    scaling = YARN | {"finetuned": True}
    with pytest.raises(NotImplementedError, match=r"has finetuned.*ignore=\('finetuned',\)"):
        read("llama", rope_scaling=scaling)
    ignored = read("llama", ignore=("finetuned",), rope_scaling=scaling)
    assert ignored == plain
    assert config_json(ignored, "float32", None)[0]["rope_scaling"] == YARN
    # transformers reads this key for Gemma 2 only.
    cap = {"attn_logit_softcapping": 50.0}
    ignored = read("gemma3_text", ignore=tuple(cap), **cap)
    assert ignored.logits_soft_cap is None
    assert config_json(ignored, "float32", None)[0]["attn_logit_softcapping"] == 50.0
    assert read("gemma2", **cap).logits_soft_cap == 50.0


def test_execution_does_not_change_what_is_written(read_file):
    golden = hf_models.golden("llama3")["config"]
    config = read_file(golden)
    running = {"remat": "selective", "remat_layers": 1, "mlp_chunks": 2, "dtype": jnp.bfloat16}
    other = dataclasses.replace(config, param_dtype=jnp.float16, **running)
    for each in (config, other):
        assert config_json(each, jnp.float32, None)[0] == golden
    written, _ = config_json(config, jnp.float32, 4096)
    assert written == golden | {"max_position_embeddings": 4096}
    both = read_file(golden | {"dtype": "float32", "torch_dtype": "float32"})
    written, _ = config_json(both, jnp.bfloat16, None)
    assert (written["dtype"], written["torch_dtype"]) == ("bfloat16",) * 2
    wider = dataclasses.replace(config, qk_norm=True, mlp_bias=True)
    message = "hf_config has model_type 'llama', from which qk_norm, mlp_bias differ: restore th"
    with pytest.raises(NotImplementedError, match=message):
        config_json(wider, jnp.float32, None)
    dynamic = read_file(hf_models.golden("llama_dynamic")["config"])
    assert config_json(dynamic, jnp.float32, 256)[0]["max_position_embeddings"] == 256
    for config in (dynamic, dataclasses.replace(dynamic, hf_config=None)):
        with pytest.raises(ValueError, match=r"max_length is 4096.*max_positions=256"):
            config_json(config, jnp.float32, 4096)


# All but Kimi Linear, which has no RoPE.
WITH_ROPE = [name for name in hf_models.names() if "images" not in name and "kimi" not in name]


@pytest.mark.parametrize("name", WITH_ROPE)
def test_a_new_file_has_the_format_of_each_version_of_transformers(read_file, name):
    config = dataclasses.replace(read_file(hf_models.golden(name)["config"]), hf_config=None)
    written, _ = config_json(config, jnp.float32, None if "dynamic" in name else 1024)
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    before_5 = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    new = {key: value for key, value in written.items() if key not in before_5}
    assert len(old) < len(written) > len(new)
    for each in (written, old, new):
        assert read_file(each).layer_kinds == config.layer_kinds


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"max_position_embeddings": 256}, 256),
        ({"rope_scaling": YARN, "max_position_embeddings": 256}, 1024),
        ({"rope_scaling": YARN, "max_position_embeddings": 2048}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 512}, 512),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, None),
    ],
)
def test_longer_sequences_than_the_checkpoint_was_trained_on_warn(read, options, length):
    config = read("llama", **options)
    assert trained_length(config) == length
    check_trained_length(config, "--seq-len", length or 2**29)
    if length is not None:
        beyond = f"--seq-len is {length + 1}: the checkpoint was trained on {length} positions"
        with pytest.warns(BeyondTrainedLength, match=beyond):
            check_trained_length(config, "--seq-len", length + 1)
    assert trained_length(dataclasses.replace(config, hf_config=None)) is None
