"""The files of a Hugging Face checkpoint: index and tensors, missing or damaged."""

from __future__ import annotations

import json
import re
import shutil

import hf_models
import numpy as np
import pytest
from meshes import mesh_of
from safetensors.numpy import save_file

from burst_jax.models import load, save


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
    save_file(kept, path / "model.safetensors")
    message = (
        "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; unexpected: model.extra; "
        "of another shape: lm_head.weight is [63, 32], expected [64, 32]; pass ignore="
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load(path, mesh=mesh_of(seq=1))
    # Unexpected tensors and unknown keys can be ignored; RoPE's frequencies always are.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors | {"model.extra": kept["model.extra"]}, path / "model.safetensors")
    config = hf_models.golden("llama2")["config"] | {"new_trick": 1}
    (path / "config.json").write_text(json.dumps(config))
    model = load(path, mesh=mesh_of(seq=1), ignore=("model.extra", "new_trick"))
    np.testing.assert_array_equal(model.final_norm.scale[...], tensors["model.norm.weight"])


def test_quantized_tensors_raise(path):
    tensors = hf_models.tensors("llama2")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"than F64, F32, F16, BF16: lm_head.weight is I8"):
        load(path, mesh=mesh_of(seq=1))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index.json is not JSON"),
        ("[]", "index.json lacks weight_map, which"),
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
        load(path, mesh=mesh_of(seq=1))


def test_the_single_file_comes_before_those_of_an_index(path):
    """As in transformers; here the index's file is missing."""
    places = dict.fromkeys(hf_models.tensors("llama2"), "model-1.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    load(path, mesh=mesh_of(seq=1))


def test_missing_or_damaged_files_raise(path, tmp_path):
    mesh = mesh_of(seq=1)
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is not a safetensors file, or dam"):
        load(path, mesh=mesh)
    (path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model.safetensors"):
        load(path, mesh=mesh)
    model = load(hf_models.write_folder("llama2", path), mesh=mesh)
    save(model, tmp_path / "s", max_file_bytes=60000)
    first, second = sorted((tmp_path / "s").glob("model-*"))[:2]
    # A second copy under another name, which some checkpoints have, is not read.
    shutil.copy(first, tmp_path / "s" / "consolidated.safetensors")
    load(tmp_path / "s", mesh=mesh)
    kept = second.read_bytes()
    shutil.copy(first, second)
    with pytest.raises(ValueError, match=f"{second.name} and .*index.json do not agree: only one"):
        load(tmp_path / "s", mesh=mesh)
    second.write_bytes(kept)
    first.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {first.name}"):
        load(tmp_path / "s", mesh=mesh)
    (path / "config.json").unlink()
    for name, text, error, message in (
        ("config.json", "{", ValueError, r"config.json is not JSON"),
        ("config.json", "[]", ValueError, r"config.json is \[\]: it must be a JSON object"),
        ("x", "", FileNotFoundError, r"lacks config.json: pass the folder of a Hugging Face check"),
        ("adapter_config.json", "{}", FileNotFoundError, r"it has a PEFT adapter; load its base"),
    ):
        (path / name).write_text(text)
        with pytest.raises(error, match=message):
            load(path, mesh=mesh)
        if name == "config.json":
            (path / name).unlink()
