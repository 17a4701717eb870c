"""Checkpoints with layers of linear attention: training, adapters, and the forms of their files."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import decoders
import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import assert_close, mesh_of
from safetensors.numpy import load_file, save_file

from burst_jax.models import (
    DeltaNet,
    KimiDelta,
    LayerKind,
    Lora,
    Rope,
    YarnRope,
    abstract_decoder,
    add_lora,
    load,
    load_adapter,
    load_config,
    save,
    save_adapter,
    trained_length,
)
from burst_jax.models.hf.config import config_json, read_config
from burst_jax.models.weights import flat_weights

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
LINEAR, FULL = "linear_attention", "full_attention"


@pytest.fixture
def written(tmp_path):
    """Writes a model's folder with other tensors or another config, and loads it on one device."""

    def write(name, tensors=None, config=None):
        folder = hf_models.write_folder(name, tmp_path / "model")
        if tensors is not None:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def weights_of(folder, **options):
    """All weights of a folder, loaded on one device."""
    model = load(folder, mesh=mesh_of(seq=1), dtype=jnp.float32, **options)
    return jax.device_get(nnx.to_pure_dict(nnx.state(model)))


def assert_same(found, want):
    jax.tree.map(np.testing.assert_array_equal, found, want)


def with_joined_experts(tensors):
    """As transformers 5 has them in memory, and the published Qwen3.5 models in their files."""
    joined = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts."
        of = {
            part: np.stack([tensors[f"{stem}{e}.{part}_proj.weight"] for e in range(8)])
            for part in ("gate", "up", "down")
        }
        joined[stem + "gate_up_proj"] = np.concatenate([of["gate"], of["up"]], 1)
        joined[stem + "down_proj"] = of["down"]
    return joined


def test_a_model_of_text_and_images_has_the_language_model(written, tmp_path):
    """Its experts are joined; vision layers and those that predict further tokens are skipped."""
    want = weights_of(written("qwen3_5_moe"))
    text = hf_models.golden("qwen3_5_moe")["config"]
    tensors = {
        name.replace("model.", "model.language_model.", 1): x
        for name, x in with_joined_experts(hf_models.tensors("qwen3_5_moe")).items()
    }
    other = np.ones(3, np.float32)
    tensors |= {"model.visual.patch_embed.proj.bias": other, "mtp.fc.weight": other}
    config = {
        "model_type": "qwen3_5_moe", "vision_config": {"depth": 2}, "image_token_id": 3,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {key: x for key, x in text.items() if key != "tie_word_embeddings"},
    }  # fmt: skip
    folder = written("qwen3_5_moe", tensors, config)
    assert_same(weights_of(folder), want)
    model = load(folder, mesh=mesh_of(seq=1), dtype=jnp.float32)
    save(model, tmp_path / "saved")
    found, saved = hf_models.read_folder(tmp_path / "saved")
    assert saved["model_type"] == "qwen3_5_moe_text"
    assert_same(found, hf_models.tensors("qwen3_5_moe"))
    # The output projection is that of the whole model.
    tied = written("qwen3_5_moe", config=config | {"tie_word_embeddings": True})
    assert read_config(tied)[0].tie_embeddings


def test_other_forms_of_the_tensors_of_olmo_hybrid(written):
    """Convolutions in three equal parts, as transformers saves them, or in one; other norms."""
    want, tensors = weights_of(written("olmo_hybrid")), hf_models.tensors("olmo_hybrid")
    equal, whole = dict(tensors), dict(tensors)
    for layer in (0, 2):
        names = [f"model.layers.{layer}.linear_attn.{n}_conv1d.weight" for n in "qkv"]
        joined = np.concatenate([whole.pop(name) for name in names])
        equal |= dict(zip(names, np.split(joined, 3), strict=True))
        whole[names[0].replace("q_conv1d", "conv1d")] = joined
    assert equal[names[0]].shape != tensors[names[0]].shape
    for norm, theirs in (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ):
        whole = {name.replace(norm, theirs): x for name, x in whole.items()}
    for other in (equal, whole):
        assert_same(weights_of(written("olmo_hybrid", other)), want)
    del equal[names[1]]
    with pytest.raises(ValueError, match=r"missing: .*k_conv1d.weight; of another shape: .*q_conv"):
        weights_of(written("olmo_hybrid", equal))


def test_float32_weights_are_not_rounded_to_the_dtype_of_others(written, tmp_path):
    model = load(written("qwen3_5"), mesh=mesh_of(seq=1), dtype=jnp.bfloat16)
    found = flat_weights(nnx.state(model))
    rate = found["delta_net_layers", "attention", "A_log"]
    layers = [
        hf_models.tensors("qwen3_5")[f"model.layers.{i}.linear_attn.A_log"] for i in (0, 2, 3)
    ]
    np.testing.assert_array_equal(rate, np.stack(layers))
    assert found["layers", "attention", "output_gate", "kernel"].dtype == jnp.bfloat16
    save(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    np.testing.assert_array_equal(saved["model.layers.0.linear_attn.A_log"], layers[0])


def test_experts_that_do_not_fit_are_no_experts(written):
    """Of another number than the config's, and of both forms at once."""
    tensors = hf_models.tensors("qwen3_next")
    experts = hf_models.golden("qwen3_next")["config"]["num_experts"]
    name = "model.layers.{}.mlp.experts."
    more, both = dict(tensors), dict(tensors)
    for layer in range(4):
        own = {x: more.pop(x) for x in list(more) if x.startswith(name.format(layer))}
        parts: Any = [
            np.stack([own[f"{name.format(layer)}{e}.{part}_proj.weight"] for e in range(experts)])
            for part in ("gate", "up", "down")
        ]
        gate, up, down = (np.concatenate([x, x[:1]]) for x in parts)
        more[name.format(layer) + "gate_up_proj"] = np.concatenate([gate, up], 1)
        more[name.format(layer) + "down_proj"] = down
        both[name.format(layer) + "gate_up_proj"] = np.concatenate(parts[:2], 1)
    with pytest.raises(ValueError, match=r"missing: .*experts\.0\.down_proj\.weight"):
        weights_of(written("qwen3_next", more))
    with pytest.raises(ValueError, match=r"gate_up_proj.* and .*experts\.0\.gate_proj.* two forms"):
        weights_of(written("qwen3_next", both))


# Sizes of published models, and the number of weights that transformers counts in them.
QWEN = {"partial_rotary_factor": 0.25, "rope_theta": 1e7, "max_position_embeddings": 262144}
QWEN3_5: dict[str, Any] = {
    "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
}  # fmt: skip
PUBLISHED = {
    "Qwen3-Next-80B-A3B": (
        {"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120}
        | {"num_hidden_layers": 48, "num_attention_heads": 16, "vocab_size": 151936} | QWEN,
        79_674_391_296,
        DeltaNet(32, 16, 128, 128),
        [LayerKind(mixer="delta_net"), LayerKind(rope=Rope(1e7, fraction=0.25))],
    ),
    "Qwen3.5-27B": (
        {"model_type": "qwen3_5", "vision_config": {}, "tie_word_embeddings": False}
        | {"text_config": QWEN3_5 | {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
            "num_hidden_layers": 64, "num_attention_heads": 24, "linear_num_value_heads": 48,
        }},
        26_895_998_464,
        DeltaNet(48, 16, 128, 128),
        [LayerKind(mixer="delta_net"), LayerKind(rope=Rope(1e7, fraction=0.25))],
    ),
    "Qwen3.5-35B-A3B": (
        {"model_type": "qwen3_5_moe", "vision_config": {}, "text_config": QWEN3_5},
        34_660_610_688,
        DeltaNet(32, 16, 128, 128),
        [LayerKind(mixer="delta_net"), LayerKind(rope=Rope(1e7, fraction=0.25))],
    ),
    "Olmo-Hybrid-7B": (
        {"model_type": "olmo_hybrid", "hidden_size": 3840, "intermediate_size": 11008}
        | {"num_hidden_layers": 32, "num_attention_heads": 30, "vocab_size": 100352}
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        7_430_870_688,
        DeltaNet(30, 30, 96, 192, norm_epsilon=1e-5, negative_eigenvalues=True),
        [LayerKind(mixer="delta_net"), LayerKind(rope=Rope(fraction=0.0), norms="after")],
    ),
    "Kimi-Linear-48B-A3B": (
        {"model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216}
        | {"num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32}
        | {"vocab_size": 163840, "head_dim": 72, "auto_map": {}, "rope_theta": 1e4}
        | {"linear_attn_config": {
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            "full_attn_layers": [*range(4, 28, 4), 27],
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        }},
        49_122_681_728,  # With the buffers of the routers.
        KimiDelta(32, 32, 128, 128),
        [LayerKind(mixer="delta_net"), LayerKind(rope=Rope(fraction=0.0))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(tmp_path, name):
    written, count, sizes, kinds = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = load_config(tmp_path)
    assert config.delta_net == sizes
    assert [config.layer_kinds[2], config.layer_kinds[3]] == kinds
    _, shapes = abstract_decoder(config)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == count
    # A file of its own has the same meaning.
    own = dataclasses.replace(config, hf_config=None)
    (tmp_path / "config.json").write_text(json.dumps(config_json(own, jnp.float32, 4096)[0]))
    again = load_config(tmp_path)
    assert dataclasses.replace(again, hf_config=None, layer_pattern=config.layer_kinds) == own


@pytest.fixture
def read(tmp_path):
    """The config of a model's ``config.json`` with changes; None removes a key."""

    def read(name, **changes):
        given = hf_models.golden(name)["config"] | changes
        given = {key: value for key, value in given.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(given))
        return read_config(tmp_path)[0]

    return read


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def test_ropes(read):
    """As transformers 5.24 reads them: a null base is no RoPE, an absent one is 1e4."""
    assert read("qwen3_next").layer_ropes == (Rope(1e7, fraction=0.25),)
    assert read("qwen3_next", partial_rotary_factor="absent", rope_theta="absent").layer_ropes == (
        Rope(1e4, fraction=0.25),
    )
    yarn = YarnRope(1e7, 4.0, 1024, fraction=0.25)
    assert read("qwen3_next", rope_scaling=YARN).layer_ropes == (yarn,)
    for change, rope in (
        ({}, Rope(fraction=0.0)),
        ({"rope_parameters": None}, Rope(1e4)),
        ({"rope_parameters": "absent", "rope_theta": None}, Rope(fraction=0.0)),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None}, Rope(5e5)),
    ):
        assert read("olmo_hybrid", **change).layer_ropes == (rope,) * 2


def test_kinds_of_layers_and_sizes(read):
    def mixers(config):
        return [kind.mixer == "delta_net" for kind in config.layer_kinds]

    assert mixers(read("qwen3_next")) == [True, True, True, False]
    assert mixers(read("qwen3_5_moe")) == [True, False] * 2
    types = {"layer_types": "absent"}
    assert mixers(read("olmo_hybrid", **types)) == [True, True, True, False]
    assert mixers(read("olmo_hybrid", **types, num_hidden_layers=3)) == [True, True, False]
    names = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    derived = read("olmo_hybrid", **{f"linear_{name}": None for name in names})
    assert derived.delta_net == DeltaNet(4, 4, 6, 12, norm_epsilon=1e-5, negative_eigenvalues=True)
    # transformers' keys of the same layers and sizes.
    kimi, types = read("kimi_linear"), [LINEAR, LINEAR, FULL]
    theirs = {"linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}
    theirs |= {"layer_types": types, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    other = read("kimi_linear", linear_attn_config="absent", **theirs)
    assert (other.delta_net, other.layer_kinds) == (kimi.delta_net, kimi.layer_kinds)
    assert trained_length(kimi) == 1024
    full = read("qwen3_5", layer_types=[FULL] * 4)
    assert full.delta_net is None
    own = dataclasses.replace(full, hf_config=None)
    assert config_json(own, jnp.float32, 64)[0]["model_type"] == "qwen3_5_text"


VALUE, UNSUPPORTED = ValueError, NotImplementedError
KDA: Any = hf_models.golden("kimi_linear")["config"]["linear_attn_config"]


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("qwen3_next", {"mlp_only_layers": [1]}, UNSUPPORTED, r"mlp_only_layers is \[1\] and must"),
        ("qwen3_next", {"decoder_sparse_step": 2}, UNSUPPORTED, "decoder_sparse_step is 2 and"),
        ("qwen3_5", {"attn_output_gate": False}, UNSUPPORTED, "attn_output_gate is False and must"),
        ("qwen3_5", {"layer_types": [LINEAR] * 4}, UNSUPPORTED, "4 layers, all 'linear_attention'"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, VALUE,
         "needs 4 entries, each 'full_attention' or 'linear_attention'"),
        ("qwen3_5", {"linear_conv_kernel_dim": 0}, VALUE, "linear_conv_kernel_dim is 0"),
        ("qwen3_5", {"linear_num_key_heads": 3}, VALUE,
         "linear_num_key_heads 3.*: num_heads is 4, num_key_heads 3"),
        ("qwen3_5", {"linear_key_head_dim": None}, VALUE, "has linear_key_head_dim null: it must"),
        ("qwen3_next", {"num_experts": None}, VALUE, "has num_experts null: it must be a number"),
        ("qwen3_next", {"num_experts_per_tok": 9}, VALUE, "tok 9.*: per_token is 9"),
        ("qwen3_5", {"full_attention_interval": 0}, VALUE, "full_attention_interval is 0"),
        ("qwen3_next", {"partial_rotary_factor": 1.5}, VALUE, "partial_rotary_factor 1.5: it"),
        ("qwen3_next", {"partial_rotary_factor": 0.2}, VALUE, "fraction 0.2, 3 features: RoPE"),
        ("qwen3_next", {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
         UNSUPPORTED, "has mrope_section: known options are"),
        ("kimi_linear", {"q_lora_rank": 8}, UNSUPPORTED, "q_lora_rank is 8 and must be None"),
        ("kimi_linear", {"mla_use_nope": False}, UNSUPPORTED, "mla_use_nope is False and must"),
        ("kimi_linear", {"num_key_value_heads": 2}, VALUE, "num_kv_heads is 2, num_heads 4"),
        ("kimi_linear", {"topk_group": 1}, VALUE, "topk_group 1.*: per_token is 3, and 1 of 4"),
        ("kimi_linear", {"qk_rope_head_dim": -1}, VALUE, "qk_rope_head_dim is -1"),
        ("kimi_linear", {"moe_intermediate_size": None}, VALUE, "moe_intermediate_size is None"),
        ("kimi_linear", {"mlp_layer_types": ["moe"] * 3}, VALUE,
         "needs 3 entries, each 'dense' or 'sparse'"),
        ("kimi_linear", {"layer_types": [LINEAR] * 3}, VALUE,
         "linear_attn_config describes layer_types .*, and config.json has"),
        ("kimi_linear", {"linear_attn_config": KDA | {"kda_layers": [1, 3]}}, VALUE,
         r"has kda_layers \[1, 3\], full_attn_layers \[3\]: they need each of the layers 1 to 3"),
        ("kimi_linear", {"linear_attn_config": KDA | {"head_dim": 0}}, VALUE, "head_dim is 0"),
        ("kimi_linear", {"linear_attn_config": {"head_dim": 8}}, VALUE, "it needs the keys full"),
        ("olmo_hybrid", {"linear_use_gate": False}, UNSUPPORTED, "linear_use_gate is False and"),
        ("olmo_hybrid", {"linear_allow_neg_eigval": 2}, VALUE, "linear_allow_neg_eigval is 2: it"),
    ],
)  # fmt: skip
def test_configs_that_are_rejected(read, name, change, error, message):
    with pytest.raises(error, match=message):
        read(name, **change)


def test_adapters_of_both_kinds_of_layers_are_those_of_peft(written, tmp_path):
    """Under the names of its projections; merged they are what peft would add."""
    mesh = mesh_of(seq=1)
    model = load(written("olmo_hybrid"), mesh=mesh, dtype=jnp.float32)
    adapted = add_lora(model, 3, targets="query|out|output_gate|decay")
    adapted = decoders.with_drawn_adapters(adapted)
    save_adapter(adapted, tmp_path / "adapter")
    save(adapted, tmp_path / "merged")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["a_proj", "g_proj", "o_proj", "q_proj"]
    weights = hf_models.tensors("olmo_hybrid")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    ends = ("g_proj.weight", "a_proj.weight", "q_proj.weight", "o_proj.weight")
    projections = [name for name in weights if name.endswith(ends)]
    assert len(tensors) == 2 * len(projections) == 24
    for name in projections:
        stem = "base_model.model." + name.removesuffix("weight")
        a, b = tensors[stem + "lora_A.weight"], tensors[stem + "lora_B.weight"]
        weights[name] = weights[name] + b @ a
    assert_close(hf_models.read_folder(tmp_path / "merged")[0], weights)
    again = load_adapter(model, tmp_path / "adapter")
    assert again.config.lora == Lora(3, 3.0, ("query", "out", "output_gate", "decay"))
    assert_same(*(nnx.to_pure_dict(nnx.state(m, nnx.LoRAParam)) for m in (again, adapted)))


def test_adapters_of_latent_attention_and_decays(written, tmp_path):
    """Their names are those of transformers' modules; experts and dense layers have none."""
    model = load(written("kimi_linear"), mesh=mesh_of(seq=1), dtype=jnp.float32)
    adapted = add_lora(model, 2, targets=("latent", "decay_b", "o_proj"))
    save_adapter(adapted, tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    stem = "base_model.model.model.layers.{}.self_attn.{}.lora_A.weight"
    modules = [(layer, "o_proj") for layer in range(3)] + [(2, "kv_a_proj_with_mqa")]
    modules += [(layer, "forget_gate.f_b_proj") for layer in (0, 1)]
    assert {name for name in names if "lora_A" in name} == {stem.format(*m) for m in modules}
    again = load_adapter(model, tmp_path / "adapter")
    assert set(again.config.adapted) == {"latent", "decay_b", "out"}
    with pytest.raises(NotImplementedError, match="experts have no adapters"):
        add_lora(model, 2, targets=("gate",))


def test_an_adapter_of_a_fused_projection_is_one_of_each_part(written, tmp_path):
    """W of the parts is that of peft; they may then be trained apart, and peft has no such ones."""
    model = load(written("qwen3_5"), mesh=mesh_of(seq=1), dtype=jnp.float32)
    rng, weights = np.random.default_rng(0), hf_models.tensors("qwen3_5")
    tensors = {}
    ends = ("q_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
    for name in [name for name in weights if name.endswith(ends)]:
        outputs, inputs = weights[name].shape
        a, b = (rng.standard_normal(s).astype(np.float32) for s in ((2, inputs), (outputs, 2)))
        stem = "base_model.model." + name.removesuffix("weight")
        tensors |= {stem + "lora_A.weight": a, stem + "lora_B.weight": b}
        weights[name] = weights[name] + 4 * b @ a
    keys = [
        n for n in weights if n.endswith(("self_attn.k_proj.weight", "self_attn.v_proj.weight"))
    ]
    for name in keys:
        stem, (outputs, inputs) = "base_model.model." + name[:-6], weights[name].shape
        tensors[stem + "lora_A.weight"] = np.zeros((2, inputs), np.float32)
        tensors[stem + "lora_B.weight"] = np.zeros((outputs, 2), np.float32)
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    adapted = load_adapter(model, folder)
    assert adapted.config.adapted == ("query", "key", "value", "output_gate")
    save(adapted, tmp_path / "merged")
    assert_close(hf_models.read_folder(tmp_path / "merged")[0], weights)


def test_adapters_of_the_parts_of_fused_projections_are_one_in_peft(written, tmp_path):
    """Of other parts in each, whose rows a key head's others follow; with the scale of rsLoRA."""
    rank, alpha = 2, 3.0
    model = load(written("qwen3_next"), mesh=mesh_of(seq=1), dtype=jnp.float32)
    targets = "query|value|output_gate|beta"
    adapted = add_lora(model, rank, alpha=alpha, targets=targets, rank_stabilized=True)
    adapted = decoders.with_drawn_adapters(adapted)
    save_adapter(adapted, tmp_path / "adapter")
    save(adapted, tmp_path / "merged")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    parts = {"self_attn.q_proj": 2, "linear_attn.in_proj_qkvz": 3}
    assert (config["r"], config["lora_alpha"]) == (rank, alpha)
    assert config["target_modules"] == ["in_proj_ba", "in_proj_qkvz", "q_proj", "v_proj"]
    assert config["rank_pattern"] == {name: rank * count for name, count in parts.items()}
    weights = hf_models.tensors("qwen3_next")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    ends = tuple(f"{module}.weight" for module in config["target_modules"])
    projections = [name for name in weights if name.endswith(ends)]
    assert len(tensors) == 2 * len(projections) == 16
    for name in projections:
        stem, module = "base_model.model." + name[:-6], name.split(".", 3)[3][:-7]
        a, b = tensors[stem + "lora_A.weight"], tensors[stem + "lora_B.weight"]
        own = rank * parts.get(module, 1)
        assert (a.shape[0], b.shape[1]) == (own, own)
        scale = config["alpha_pattern"].get(module, alpha) / own**0.5
        weights[name] = weights[name] + np.float32(scale) * b @ a
    assert_close(hf_models.read_folder(tmp_path / "merged")[0], weights)
    again = load_adapter(model, tmp_path / "adapter")
    assert again.config.lora == Lora(rank, alpha, tuple(targets.split("|")), True)
    assert_same(*(nnx.to_pure_dict(nnx.state(m, nnx.LoRAParam)) for m in (again, adapted)))
    # peft keeps the ranks, and no metadata: what it trained may be in every rank.
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    message = r"_qkvz': 6, .* where save_adapter wrote the file"
    with pytest.raises(NotImplementedError, match=message):
        load_adapter(model, tmp_path / "adapter")
    metadata = {"burst_jax.projections": "query,other"}
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors", metadata)
    with pytest.raises(ValueError, match=r"has burst_jax.projections \['query', 'other'\] in its"):
        load_adapter(model, tmp_path / "adapter")
