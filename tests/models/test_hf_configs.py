"""``config.json`` of published models: their options, and as many weights as they have."""

from __future__ import annotations

import json
import math

import jax
import pytest

from burst_jax.models import LayerKind, LinearRope, Llama3Rope, Rope, abstract_decoder
from burst_jax.models.hf.config import config_json, read_config

GELU = "gelu_pytorch_tanh"


def sizes(layers, width, hidden, heads, kv_heads, vocab, **more):
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# The keys that tell, as the models' own files have them; the weights that their authors count, and
# the kind of the first layer and of the sixth.
PUBLISHED = {
    "Llama-2-7B": (
        {"model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None}
        | sizes(32, 4096, 11008, 32, 32, 32000, torch_dtype="float16"),
        6_738_415_616,
        [LayerKind(None, Rope(1e4))] * 2,
    ),
    "Llama-3.1-8B": (
        {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
        | sizes(32, 4096, 14336, 32, 8, 128256, rope_scaling=LLAMA3, mlp_bias=False),
        8_030_261_248,
        [LayerKind(None, Llama3Rope(5e5))] * 2,
    ),
    "Llama-3.2-1B": (
        {"model_type": "llama", "head_dim": 64, "rope_theta": 500000.0, "tie_word_embeddings": True}
        | sizes(16, 2048, 8192, 32, 8, 128256, rope_scaling=LLAMA3 | {"factor": 32.0}),
        1_235_814_400,
        [LayerKind(None, Llama3Rope(5e5, factor=32.0))] * 2,
    ),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": 4096}
        | sizes(32, 4096, 14336, 32, 8, 32000, rope_theta=10000.0),
        7_241_732_096,
        [LayerKind(4096, Rope(1e4))] * 2,
    ),
    "Qwen2.5-7B": (
        {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False}
        | {"use_mrope": False, "max_window_layers": 28, "rope_theta": 1000000.0}
        | sizes(28, 3584, 18944, 28, 4, 152064, attention_dropout=0.0),
        7_615_616_512,
        [LayerKind(None, Rope(1e6))] * 2,
    ),
    "Qwen3-8B": (
        {"model_type": "qwen3", "sliding_window": None, "use_sliding_window": False}
        | sizes(36, 4096, 12288, 32, 8, 151936, head_dim=128, rope_theta=1000000),
        8_190_735_360,
        [LayerKind(None, Rope(1e6))] * 2,
    ),
    "gemma-2-2b": (
        {"model_type": "gemma2", "cache_implementation": "hybrid", "hidden_activation": GELU}
        | sizes(26, 2304, 9216, 8, 4, 256000, hidden_act=GELU, sliding_window=4096),
        2_614_341_888,
        [LayerKind(4096, Rope(1e4)), LayerKind(None, Rope(1e4))],
    ),
    "gemma-3-1b": (
        {"model_type": "gemma3_text", "rope_local_base_freq": 10000, "rope_theta": 1000000}
        | {"sliding_window": 512, "sliding_window_pattern": 6}
        | sizes(26, 1152, 6912, 4, 1, 262144),
        999_885_952,
        [LayerKind(512, Rope(1e4)), LayerKind(None, Rope(1e6))],
    ),
    # Of a model with images; what its text_config leaves out are transformers' defaults.
    "gemma-3-4b": (
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
        },
        3_880_263_168,
        [LayerKind(1024, Rope(1e4)), LayerKind(None, LinearRope(1e6, factor=8.0))],
    ),
}


@pytest.fixture
def read(tmp_path):
    """The config that a ``config.json`` of this family, with sizes of four layers, is read as."""

    def read(model_type, ignore=(), **options):
        written = {"model_type": model_type, **sizes(4, 8, 16, 2, 1, 32), "head_dim": 4, **options}
        (tmp_path / "config.json").write_text(json.dumps(written))
        return read_config(tmp_path, ignore=ignore)[0]

    return read


def apart(full=None, sliding=None):
    """Gemma 3's ``rope_parameters``."""
    return {"full_attention": full or {}, "sliding_attention": sliding or {}}


LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("written", "sliding", "full"),
    [
        ({}, Rope(1e4), Rope(1e6)),
        ({"rope_theta": 5e5}, Rope(1e4), Rope(5e5)),
        ({"rope_parameters": apart(), "rope_theta": 5e5}, Rope(1e4), Rope(5e5)),
        ({"rope_parameters": apart(), "rope_local_base_freq": 3e4}, Rope(3e4), Rope(1e6)),
        ({"rope_parameters": apart(sliding={"rope_theta": 2e4})}, Rope(2e4), Rope(1e6)),
        ({"rope_scaling": LINEAR}, Rope(1e4), LinearRope(1e6, factor=8.0)),
        (
            {"rope_scaling": LINEAR, "rope_parameters": apart(LINEAR)},
            Rope(1e4),
            LinearRope(1e6, factor=8.0),
        ),
    ],
)
def test_ropes_of_gemma_3_are_those_of_transformers(read, written, sliding, full):
    """What transformers 5.23's Gemma3TextConfig makes of these."""
    config = read("gemma3_text", sliding_window_pattern=2, **written)
    assert config.layer_ropes == (sliding, full, sliding, full)


@pytest.mark.parametrize(
    ("family", "written", "message"),
    [
        (
            "gemma3_text",
            {"rope_scaling": LINEAR, "rope_parameters": apart()},
            "has rope_scaling .* and rope_parameters .* do not say the same",
        ),
        (
            "llama",
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 5e5}},
            "do not say the same.*remove one of them",
        ),
        ("gemma3_text", {"rope_scaling": apart(LINEAR)}, "must be in rope_parameters"),
        ("gemma3_text", {"rope_parameters": LINEAR}, "a dictionary for each type of layer"),
        ("llama", {"rope_scaling": "linear"}, "'linear': it must be a JSON object"),
        ("llama", {"rope_parameters": [1]}, r"\[1\]: it must be a JSON object"),
        ("gemma3_text", {"rope_parameters": apart("linear")}, "it must be a JSON object"),
    ],
)
def test_ropes_that_say_two_things_or_nothing_are_refused(read, family, written, message):
    with pytest.raises(ValueError, match=message):
        read(family, **written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 4}, r"'gemma3': num_experts is 4, and unknown.*ignore=\('num_experts',\)"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config is .* and must be None"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False and must be True"),
    ],
)
def test_keys_beside_the_language_model_are_refused(tmp_path, change, message):
    written = PUBLISHED["gemma-3-4b"][0] | change
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(NotImplementedError, match=message):
        read_config(tmp_path)


def test_layers_that_slide_without_a_window_are_refused(read):
    types = ["full_attention", "sliding_attention"] * 2
    for family in ("qwen2", "qwen3"):
        with pytest.raises(ValueError, match="and its use_sliding_window is false: make it true"):
            read(family, layer_types=types, sliding_window=8)
        kinds = read(family, layer_types=types, sliding_window=8, use_sliding_window=True)
        assert [kind.window for kind in kinds.layer_kinds] == [None, 8, None, 8]


def test_gemma_3_has_no_cap_of_the_attention_logits(read):
    """transformers has the key, and computes the same whatever it says."""
    cap = {"attn_logit_softcapping": 50.0}
    with pytest.raises(NotImplementedError, match=r"attn_logit_softcapping is 50.0 and must be N"):
        read("gemma3_text", **cap)
    ignored = read("gemma3_text", ignore=tuple(cap), **cap)
    assert ignored.logits_soft_cap is None
    assert config_json(ignored, "float32", None)[0]["attn_logit_softcapping"] == 50.0
    assert read("gemma2", **cap).logits_soft_cap == 50.0


def test_options_of_rope_that_are_absent_or_ignored(read):
    plain = read("llama", rope_scaling=YARN)
    zeros = read("llama", rope_scaling=YARN | {"mscale": 0, "mscale_all_dim": 0.0})
    assert zeros.layer_ropes == plain.layer_ropes
    scaling = YARN | {"finetuned": True}
    with pytest.raises(NotImplementedError, match=r"has finetuned.*ignore=\('finetuned',\)"):
        read("llama", rope_scaling=scaling)
    ignored = read("llama", ignore=("finetuned",), rope_scaling=scaling)
    assert ignored == plain
    assert config_json(ignored, "float32", None)[0]["rope_scaling"] == YARN


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(tmp_path, name):
    written, count, kinds = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    config, _, part = read_config(tmp_path)
    assert [config.layer_kinds[0], config.layer_kinds[5]] == kinds
    assert (part is not None) == (name == "gemma-3-4b")
    _, shapes = abstract_decoder(config)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == count
