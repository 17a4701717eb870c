"""The files of a Hugging Face checkpoint: read, missing, damaged, and saved as a whole."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import mesh_of
from safetensors.numpy import save_file

import burst_jax
from burst_jax.models import (
    Decoder,
    DecoderConfig,
    UntiedHead,
    check_save_folder,
    load,
    load_config,
    save,
)
from burst_jax.models.hf.save import take_layer, write_folder

ONE = mesh_of(seq=1)


def test_mxfp4_tensors_are_dequantized(tmp_path):
    """Each device's part, by the definition of e2m1: sign, 2 bits of exponent, 1 of mantissa."""
    tensors, rng = hf_models.tensors("gpt_oss"), np.random.default_rng(0)
    config = hf_models.golden("gpt_oss")["config"]
    modules = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    folder, stored = hf_models.write_folder("gpt_oss", tmp_path / "model"), {}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": modules}))
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        codes = rng.integers(0, 16, (experts, outputs, inputs // 32, 32), dtype=np.uint8)
        scales = rng.integers(120, 131, codes.shape[:-1], dtype=np.uint8)
        stored[f"{name}_blocks"] = codes[..., ::2] + 16 * codes[..., 1::2]
        stored[f"{name}_scales"] = scales
        exponent, mantissa = codes // 2 % 4, codes % 2 / 2
        number = np.where(exponent, 2.0**exponent / 2 * (1 + mantissa), mantissa)
        values = (-1.0) ** (codes // 8) * number * 2.0 ** (scales[..., None] - 127.0)
        tensors[name] = values.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(np.float32)
    whole = {name: x for name, x in tensors.items() if f"{name}_blocks" not in stored}
    save_file(whole | stored, folder / "model.safetensors")
    mesh = mesh_of(fsdp=2, seq=2, tensor=2)
    model = load(folder, mesh=mesh, rules=burst_jax.ShardingRules.of(mesh), dtype=jnp.float32)
    save(model, tmp_path / "saved")
    found, written = hf_models.read_folder(tmp_path / "saved")
    assert written == config
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(whole | stored | {name: stored[name][:, :3]}, folder / "model.safetensors")
    message = r"down_proj_blocks is U8 \(4, 32, 1, 16\), its scales U8 \(4, 3, 1\): MXFP4 needs U8"
    with pytest.raises(ValueError, match=message):
        load(folder, mesh=mesh)
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(NotImplementedError, match=r"FineGrainedFP8Config\(dequantize=True\)"):
        load(folder, mesh=mesh)


@pytest.fixture
def path(tmp_path):
    """A checkpoint of a small model."""
    return hf_models.write_folder("llama2", tmp_path / "llama2")


def test_tensors_that_do_not_fit_are_all_named(path):
    tensors = hf_models.tensors("llama2")
    kept = dict(tensors)
    del kept["model.norm.weight"], kept["model.layers.1.mlp.up_proj.weight"]
    kept["lm_head.weight"] = kept["lm_head.weight"][:-1]
    kept["model.extra"] = np.zeros(2, np.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    kept[name] = kept[name].astype(np.int8)
    save_file(kept, path / "model.safetensors")
    message = (
        "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; unexpected: model.extra; "
        "of another shape: lm_head.weight is [63, 32], expected [64, 32]; of another dtype than "
        f"F64, F32, F16, BF16: {name} is I8; these weights are quantized, and their scales are "
        "needed, too: dequantize the checkpoint with transformers"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load(path, mesh=ONE)
    save_file(tensors | {"model.extra": kept["model.extra"]}, path / "model.safetensors")
    message = "unexpected: model.extra; if .* as ignore=, on a command line --ignore$"
    with pytest.raises(ValueError, match=message):
        load(path, mesh=ONE)
    # Unexpected tensors and unknown keys can be ignored; RoPE's frequencies always are.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors | {"model.extra": kept["model.extra"]}, path / "model.safetensors")
    config = hf_models.golden("llama2")["config"] | {"new_trick": 1}
    (path / "config.json").write_text(json.dumps(config))
    model = load(path, mesh=ONE, ignore=("model.extra", "new_trick"))
    np.testing.assert_array_equal(model.final_norm.scale[...], tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {}}', "index.json lacks weight_map, which"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "must be a file name in the same folder"),
        ('{"weight_map": {"a": "/model.safetensors"}}', "must be a file name in the same folder"),
        ('{"weight_map": {"a": 1}}', "must be a file name in the same folder"),
        (
            '{"weight_map": {"a": "model-1.safetensors"}}',
            "model.safetensors and .*index.json are of different models: .* has a, lm_head.weight,"
            " model.embed_tokens.weight, .* and [0-9]+ more. Remove",
        ),
    ],
)
def test_wrong_indices_raise(path, index, message):
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        load(path, mesh=ONE)


def test_the_single_file_comes_before_those_of_an_index(path):
    """As in transformers; here the index's file is missing."""
    places = dict.fromkeys(hf_models.tensors("llama2"), "model-1.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    load(path, mesh=ONE)


def test_missing_or_damaged_files_raise(path, tmp_path):
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is not a safetensors file, or dam"):
        load(path, mesh=ONE)
    (path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model.safetensors"):
        load(path, mesh=ONE)
    model = load(hf_models.write_folder("llama2", path), mesh=ONE)
    save(model, tmp_path / "s", max_file_bytes=60000)
    first, second = sorted((tmp_path / "s").glob("model-*"))[:2]
    # A second copy under another name, which some checkpoints have, is not read.
    shutil.copy(first, tmp_path / "s" / "consolidated.safetensors")
    load(tmp_path / "s", mesh=ONE)
    kept = second.read_bytes()
    shutil.copy(first, second)
    with pytest.raises(ValueError, match=f"{second.name} and .*index.json do not agree: only one"):
        load(tmp_path / "s", mesh=ONE)
    second.write_bytes(kept)
    first.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {first.name}"):
        load(tmp_path / "s", mesh=ONE)
    (path / "config.json").unlink()
    for name, text, error, message in (
        ("x", "", FileNotFoundError, "lacks config.json: pass the folder of a Hugging Face check"),
        ("adapter_config.json", "{}", FileNotFoundError, "it has a PEFT adapter; load its base"),
    ):
        (path / name).write_text(text)
        with pytest.raises(error, match=message):
            load(path, mesh=ONE)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def tied(tmp_path):
    """A function that stores a tied checkpoint with these tensors, too, and returns its folder."""
    folder, tensors = tmp_path / "tied", hf_models.tensors("llama3_tied")
    hf_models.write_folder("llama3_tied", folder)

    def store(**more):
        changed = {name: x for name, x in (tensors | more).items() if x is not None}
        save_file(changed, folder / "model.safetensors")
        return folder

    return store


def test_a_copy_of_a_tied_embedding_is_not_loaded(tied, tmp_path):
    """Copies are equal in the dtype of the weights; the copy may be the only one."""
    plain, (embedding,) = load(tied(), mesh=ONE), [hf_models.tensors("llama3_tied")[EMBEDDING]]
    for more, dtype in (
        ({HEAD: embedding}, jnp.float32),
        ({HEAD: embedding.astype(jnp.bfloat16)}, jnp.bfloat16),
        ({HEAD: embedding, EMBEDDING: None}, jnp.float32),
    ):
        model = load(tied(**more), mesh=ONE, dtype=dtype)
        assert model.config.tie_embeddings
        assert load_config(tied(**more), dtype=dtype) == model.config
        want = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), nnx.state(plain))
        jax.tree.map(np.testing.assert_array_equal, nnx.state(model), want)
    save(model, tmp_path / "saved")
    tensors, config = hf_models.read_folder(tmp_path / "saved")
    assert HEAD not in tensors
    assert config == hf_models.golden("llama3_tied")["config"]


def test_a_head_that_differs_from_a_tied_embedding_is_loaded(tied, tmp_path, monkeypatch):
    """As transformers does, which warns, too; here the last one of several blocks differs."""
    monkeypatch.setattr(burst_jax.models.hf.tied, "_BLOCK", 1000)
    head = hf_models.tensors("llama3_tied")[EMBEDDING].copy()
    head[-1, -1] += 1
    folder = tied(**{HEAD: head})
    message = "lm_head.weight differs from the embedding: they are loaded untied, .*lm_head.weight'"
    with pytest.warns(UntiedHead, match=message):
        model = load(folder, mesh=ONE)
    assert not model.config.tie_embeddings
    assert load_config(folder) == model.config
    hidden = np.random.default_rng(0).standard_normal((1, 3, head.shape[1])).astype(np.float32)
    np.testing.assert_allclose(model.unembed(jnp.asarray(hidden)), hidden @ head.T, rtol=1e-4)
    save(model, tmp_path / "saved")
    tensors, config = hf_models.read_folder(tmp_path / "saved")
    np.testing.assert_array_equal(tensors[HEAD], head)
    assert config == hf_models.golden("llama3_tied")["config"] | {"tie_word_embeddings": False}
    assert load(folder, mesh=ONE, ignore=(HEAD,)).config.tie_embeddings
    # One of another shape or dtype is not tied, and what is wrong with it is the message.
    wrong = {"is [63, 32], expected [64, 32]": head[:-1], f"{HEAD} is I8": head.astype(np.int8)}
    for message, array in wrong.items():
        with (
            pytest.warns(UntiedHead),
            pytest.raises(ValueError, match=re.escape(message)),
        ):
            load(tied(**{HEAD: array}), mesh=ONE)


@pytest.fixture
def model():
    config = DecoderConfig(vocab_size=8, num_layers=2, embed_dim=8, head_dim=4, mlp_dim=8)
    return Decoder(config, rngs=nnx.Rngs(0), mesh=ONE)


def test_the_language_model_of_a_model_with_images(tmp_path):
    folder = hf_models.write_folder("gemma3_images", tmp_path / "images")
    model = load(folder, mesh=ONE, dtype=jnp.float32)
    save(model, tmp_path / "saved")
    found, config = hf_models.read_folder(tmp_path / "saved")
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["model_type"] == "gemma3_text"
    stored = hf_models.tensors("gemma3_images")
    prefix = "language_model."
    want = {name.removeprefix(prefix): x for name, x in stored.items() if name.startswith(prefix)}
    assert len(want) < len(stored)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    # A newer order of the names' parts.
    newer = {f"model.{prefix}{name.removeprefix('model.')}": x for name, x in want.items()}
    save_file(newer | {"model.vision_tower.probe": np.zeros(2)}, folder / "model.safetensors")
    again = load(folder, mesh=ONE, dtype=jnp.float32)
    np.testing.assert_array_equal(again.embedding[...], model.embedding[...])
    assert again.config == model.config


def test_dtypes_of_tensors_weights_and_computation(tmp_path):
    folder = hf_models.write_folder("qwen3", tmp_path / "model")
    save(load(folder, mesh=ONE, dtype=jnp.float32), tmp_path / "half", dtype=jnp.bfloat16)
    found, config = hf_models.read_folder(tmp_path / "half")
    assert config["dtype"] == "bfloat16"
    want = hf_models.tensors("qwen3")["model.norm.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["model.norm.weight"], want)
    model = load(tmp_path / "half", mesh=ONE)
    assert model.config.dtype == model.config.param_dtype == jnp.bfloat16
    assert model.embedding[...].dtype == jnp.bfloat16
    options: Any = {"param_dtype": jnp.float32, "remat": "selective", "remat_layers": 1}
    model = load(tmp_path / "half", mesh=ONE, **options)
    assert model.config.dtype == jnp.bfloat16
    assert (model.config.remat, model.config.remat_layers) == ("selective", 1)
    np.testing.assert_array_equal(model.final_norm.scale[...], want.astype(np.float32))


def test_a_new_decoder_is_saved_as_the_family_with_its_architecture(model, tmp_path):
    """The defaults are Qwen 3's; a config that no family can express raises."""
    with pytest.raises(ValueError, match=r"max_length is None: config.json has a number"):
        save(model, tmp_path / "new")
    save(model, tmp_path / "new", max_length=4096)
    assert hf_models.read_folder(tmp_path / "new")[1]["model_type"] == "qwen3"
    again = load(tmp_path / "new", mesh=ONE)
    assert again.config.qk_norm
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    with pytest.raises(FileExistsError, match=r"new exists: choose a folder that does not"):
        save(model, tmp_path / "new", max_length=4096)
    # Before a training, too, and without a trace.
    with pytest.raises(FileExistsError, match=r"new exists: choose a folder that does not"):
        check_save_folder(tmp_path / "new")
    with pytest.raises(PermissionError, match=r"deep cannot be created: .*json is no folder that"):
        check_save_folder(tmp_path / "new" / "config.json" / "very" / "deep")
    with pytest.raises(PermissionError, match="y cannot be created: /proc is no folder that"):
        check_save_folder("/proc/x/y")
    with pytest.raises(ValueError, match="folder is '': it must name a folder"):
        check_save_folder("")
    check_save_folder(tmp_path / "not" / "yet")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    model.config = dataclasses.replace(model.config, post_norms=True)
    nearest = r"no model family .* the nearest is \w+, which has post_norms=False$"
    with pytest.raises(NotImplementedError, match=nearest):
        save(model, tmp_path / "other", max_length=4096)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="max_file_bytes is 0"):
        save(model, tmp_path / "other", max_length=4096, max_file_bytes=0)


def test_an_empty_folder_is_replaced_and_a_link_to_it_stays(model, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    save(model, tmp_path / "link", max_length=64)
    assert (tmp_path / "link").is_symlink()
    files = sorted(path.name for path in (tmp_path / "disk").iterdir())
    assert files == ["config.json", "model.safetensors"]
    # With the mode of any new folder.
    (tmp_path / "other").mkdir()
    assert (tmp_path / "disk").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link", "other"]


def test_numbers_of_numpy_are_json(tmp_path):
    """A config made in Python may have some."""
    text = {"heads": np.int64(3), "tied": np.True_, "epsilons": [np.float32(0.5)]}
    write_folder(tmp_path / "new", {}, {}, None, {"config.json": text})
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert written == {"heads": 3, "tied": True, "epsilons": [0.5]}


def test_a_failed_save_leaves_nothing(model, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save(model, tmp_path / "saved", max_length=64)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    assert not list(tmp_path.iterdir())
    (tmp_path / "disk").mkdir()
    with pytest.raises(ValueError, match=r"disk is a mount point.*choose a folder in it, like"):
        save(model, tmp_path / "disk", max_length=64)
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]


def test_a_complete_model_that_cannot_be_renamed_is_kept(model, tmp_path, monkeypatch):
    """A file has appeared in the folder during the write."""
    real = safetensors.numpy.save_file

    def meanwhile(*arguments, **options):
        real(*arguments, **options)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "notes").touch()

    monkeypatch.setattr(safetensors.numpy, "save_file", meanwhile)
    with pytest.raises(OSError, match=r"model cannot be replaced; .* is complete") as raised:
        save(model, tmp_path / "model", max_length=64)
    kept = str(raised.value).split("replaced; ")[1].removesuffix(" is complete")
    assert load(kept, mesh=ONE).config.num_layers == 2
    assert (tmp_path / "model" / "notes").exists()


def test_a_layer_is_sent_by_the_stage_that_has_it():
    """No device ever receives the layers of another stage."""
    mesh = mesh_of(AxisType.Explicit, stage=2, fsdp=2)
    stack = np.random.default_rng(0).standard_normal((6, 8, 5)).astype(np.float32)
    stack[1, 0], stack[4, 1] = -0.0, np.nan
    spec = PartitionSpec("stage", "fsdp")
    weight = jax.device_put(stack, NamedSharding(mesh, spec))
    for layer in range(6):
        taken = take_layer(weight, np.int32(layer), mesh=mesh, spec=spec)
        assert {shard.data.shape for shard in taken.addressable_shards} == {(4, 5)}
        assert np.asarray(taken).tobytes() == stack[layer].tobytes()
    compiled = take_layer.lower(weight, np.int32(0), mesh=mesh, spec=spec).compile().as_text()
    assert compiled is not None
    sent = re.findall(r"= (\S+) (all-\w+|collective-\w+|reduce-\w+)\(", compiled)
    found = [(re.sub(r"\{.*", "", shape), name) for shape, name in sent]
    assert found == [("u8[4,5,4]", "all-reduce")]
