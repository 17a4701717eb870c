"""PEFT adapters, and adapters merged into Hugging Face checkpoints."""

from __future__ import annotations

import functools
import json
import re

import decoders
import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from meshes import assert_close, mesh_of
from safetensors.numpy import load_file, save_file

from burst_jax import ShardingRules
from burst_jax.models import Lora, add_lora, load, load_adapter, save, save_adapter

RANK, ALPHA = 3, 12.0
TARGETS = "query|value|out|down"


def loaded(folder, mesh):
    rules = ShardingRules.of(mesh)
    return load(folder, mesh=mesh, rules=rules, layout="zigzag", dtype=jnp.float32)


def trained(model, stabilized):
    """A decoder with adapters whose B is not zero."""
    adapted = add_lora(model, RANK, alpha=ALPHA, targets=TARGETS, rank_stabilized=stabilized)
    return decoders.with_drawn_adapters(adapted)


# rsLoRA's scale, from peft: lora_alpha / math.sqrt(r).
@pytest.mark.parametrize(
    ("stabilized", "scale"), [(False, ALPHA / RANK), (True, ALPHA / RANK**0.5)]
)
def test_adapters_and_merged_weights_are_those_of_peft(tmp_path, stabilized, scale):
    folder = hf_models.write_folder("qwen3", tmp_path / "model")
    mesh = mesh_of(seq=2, tensor=2)
    model = trained(loaded(folder, mesh), stabilized)
    save_adapter(model, tmp_path / "adapter", base=folder)
    save(model, tmp_path / "merged")

    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written == written | {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(folder),
        "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_rslora": stabilized,
        "target_modules": ["down_proj", "o_proj", "q_proj", "v_proj"],
    }  # fmt: skip
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    weights = hf_models.tensors("qwen3")
    projections = [tensor for tensor in weights if re.search(r"(down|o|q|v)_proj\.weight$", tensor)]
    assert len(tensors) == 2 * len(projections)
    for tensor in projections:
        stem = "base_model.model." + tensor.removesuffix("weight")
        a, b = tensors[stem + "lora_A.weight"], tensors[stem + "lora_B.weight"]
        outputs, inputs = weights[tensor].shape
        assert (a.shape, b.shape) == ((RANK, inputs), (outputs, RANK))
        # What peft adds, in PyTorch's order of dimensions.
        weights[tensor] = weights[tensor] + scale * b @ a
    merged, _ = hf_models.read_folder(tmp_path / "merged")
    assert_close(merged, weights)
    again = load_adapter(loaded(folder, mesh_of(seq=1)), tmp_path / "adapter")
    assert again.config.lora == Lora(RANK, ALPHA, tuple(TARGETS.split("|")), stabilized)
    tokens, positions = jnp.asarray(hf_models.TOKENS[None, :8]), np.arange(8, dtype=np.int32)
    outputs = (load(tmp_path / "merged", mesh=mesh_of(seq=1)), again)
    hidden = [model(tokens, positions) for model in outputs]
    assert_close(hidden[1], hidden[0], 1e-5)
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.device_get(nnx.to_pure_dict(nnx.state(m, nnx.LoRAParam))) for m in (again, model)),
    )


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A model, and the config and tensors of its adapter's folder."""
    folder = tmp_path_factory.mktemp("models")
    model = loaded(hf_models.write_folder("qwen3", folder / "model"), mesh_of(seq=1))
    save_adapter(add_lora(model, RANK, targets="query"), folder / "adapter")
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    return model, config, load_file(folder / "adapter" / "adapter_model.safetensors")


def write(folder, config, tensors):
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def test_models_and_adapters_are_placed_on_the_mesh_that_is_set(tmp_path, adapter):
    write(tmp_path, *adapter[1:])
    folder, kind = hf_models.write_folder("qwen3", tmp_path / "model"), AxisType.Explicit
    mesh = mesh_of(kind, seq=2, fsdp=2)
    want = load_adapter(loaded(folder, mesh), tmp_path)
    placed = functools.partial(
        load, folder, rules=ShardingRules.of(mesh), layout="zigzag", dtype=jnp.float32
    )
    with jax.set_mesh(mesh):
        models = [placed(), placed(mesh=mesh.abstract_mesh)]
        found = [load_adapter(model, tmp_path) for model in models]
    for model in found:
        pair = (jax.tree.leaves(nnx.state(one)) for one in (model, want))
        for got, array in zip(*pair, strict=True):
            assert got.sharding == array.sharding
            np.testing.assert_array_equal(got, array)
    other, no_devices = mesh_of(kind, seq=8), "has no devices to put arrays on, and "
    for there, message, call in (
        (other, rf"'seq': 2.* {no_devices}jax.set_mesh has .*8",
         lambda: load_adapter(models[1], tmp_path)),
        (other, rf"{no_devices}jax.set_mesh has .* pass mesh= ",
         lambda: placed(mesh=mesh.abstract_mesh)),
        (mesh, "inside jax.jit, .*: call this function outside of jax.j",
         lambda: jax.jit(lambda x: (placed(), x)[1])(1.0)),
    ):  # fmt: skip
        with jax.set_mesh(there), pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"and no mesh is set: pass mesh= a jax.sharding.Mesh, or"):
        placed(mesh=mesh.abstract_mesh)
    with pytest.raises(ValueError, match="mesh is None and no mesh is set: pass mesh=, or enter"):
        placed()


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        ({"peft_type": "IA3"}, {}, NotImplementedError, "has peft_type 'IA3': only 'LORA'"),
        ({"use_dora": True}, {}, NotImplementedError, "use_dora is True. .* merge_and_unload"),
        ({"bias": "all"}, {}, NotImplementedError, "bias is 'all'"),
        ({"rank_pattern": {"q": 1}}, {}, NotImplementedError, r"rank_pattern is \{'q': 1\}"),
        ({"new_kind": 3}, {}, NotImplementedError, "new_kind is 3"),
        # peft would subtract the initial adapter from W.
        ({"init_lora_weights": "pissa_niter_4"}, {}, NotImplementedError, "is 'pissa_niter_4'"),
        ({"init_lora_weights": "OLoRA"}, {}, NotImplementedError, "init_lora_weights is 'OLoRA'"),
        ({"use_rslora": "yes"}, {}, ValueError, "use_rslora 'yes': it must be true or false"),
        ({"lora_alpha": None}, {}, ValueError, "adapter_config.json lacks lora_alpha"),
        ({"r": None}, {}, ValueError, "adapter_config.json lacks r"),
        ({"r": 5}, {}, ValueError, r"of another shape: .*lora_A.weight is \[3, 32\], expected \[5"),
        ({}, {FIRST: None}, ValueError, "that adapter_config.json and the model .*; missing: base"),
        ({}, {"other": np.ones(1, np.float32)}, ValueError, "unexpected: other; merge others with"),
    ],
)  # fmt: skip
def test_unsupported_adapters_raise(tmp_path, adapter, config, tensors, error, message):
    model, written, there = adapter
    changed = {name: x for name, x in (there | tensors).items() if x is not None}
    write(tmp_path, written | config, changed)
    with pytest.raises(error, match=message):
        load_adapter(model, tmp_path)


def test_wrong_folders_raise(tmp_path, adapter):
    model, written, there = adapter
    config = tmp_path / "adapter_config.json"

    def raises(error, message, call=load_adapter, model=model, folder=tmp_path, **options):
        with pytest.raises(error, match=message):
            call(model, folder, **options)

    message = "model has no adapters: add some with add_lora; save wri"
    raises(ValueError, message, save_adapter, folder=tmp_path / "adapter")
    raises(FileNotFoundError, r"lacks adapter_config.json: pass the folder of a")
    config.write_text("[]")
    raises(ValueError, r"adapter_config.json is \[\]: it must be a JSON object")
    config.write_text(json.dumps(written))
    raises(FileNotFoundError, r"lacks adapter_model.safetensors")
    save_file({"x": there[FIRST]}, tmp_path / "adapter_model.safetensors")
    raises(ValueError, "has no tensor of a projection: not a LoRA adapter")
    # This initializer, unlike pissa's, does not change W.
    write(tmp_path, written | {"init_lora_weights": "Gaussian"}, there)
    adapted = load_adapter(model, tmp_path)
    assert adapted.config.lora == Lora(RANK, float(RANK), ("query",))
    # A scale of 1, if alpha is not given.
    save_adapter(add_lora(model, 4, rank_stabilized=True), tmp_path / "one")
    assert json.loads((tmp_path / "one" / "adapter_config.json").read_text())["lora_alpha"] == 2
    raises(ValueError, r"model already has adapters, Lora\(rank=3", model=adapted)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    message, options = "'gemma3', and the decoder is a 'qwen3': peft", {"base": tmp_path}
    raises(NotImplementedError, message, save_adapter, adapted, tmp_path / "adapter", **options)
