"""Fine-tuning of Hugging Face checkpoints by train_lm.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import types
from pathlib import Path
from typing import Any

import hf_checkpoints
import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_lm
from flax import nnx
from meshes import make_mesh, mesh_of
from safetensors.numpy import save_file

from burst_jax.models import Lora, add_lora, load, load_adapter, load_config, merge_lora
from burst_jax.training import Evaluation, init_train_state
from burst_jax.training.checkpoint_files import read_record


def test_weights_of_another_decoder_raise(tmp_path):
    mesh = mesh_of(seq=2)
    model = load(hf_models.write_folder("qwen3", tmp_path / "model"), mesh=mesh, dtype=jnp.float32)
    other = dataclasses.replace(model.config, mlp_dim=2 * model.config.mlp_dim)
    weights = nnx.state(model)
    half = dataclasses.replace(model.config, param_dtype=jnp.bfloat16)
    for config, message in (
        (other, r"params.*'mlp'.* is float32 .*, but config requires float32"),
        (half, r"is float32 .*, but config requires bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            init_train_state(config, optax.sgd(1.0), mesh, 0, layout="zigzag", params=weights)


GENERATION = "generation_config.json"
BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", GENERATION),
)


@pytest.fixture
def folder(tmp_path):
    """A model, next to a file of token ids."""
    np.save(tmp_path / "ids.npy", np.tile(hf_models.TOKENS, 12))
    path = hf_models.write_folder("qwen3", tmp_path / "model")
    for name in BESIDE:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(f'{{"name": "{name}"}}')
    # As in the cache of a hub.
    (path / "tokenizer.json").rename(tmp_path / "blob")
    (path / "tokenizer.json").symlink_to(tmp_path / "blob")
    return path


def arguments(folder, *more):
    tmp = folder.parent
    return [
        f"--model={folder}", f"--data={tmp / 'ids.npy'}", f"--out={tmp / 'out'}",
        "--mesh=seq=2", "--seq-len=256", "--batch=2", "--steps=2", "--eval-batches=1",
        "--sample-tokens=0", "--dtype=float32", "--lr=1e-2", *more,
    ]  # fmt: skip


def changes(one, other):
    """The largest change of each weight between two checkpoints or decoders."""
    states = (
        nnx.state(load(x, mesh=make_mesh(), dtype=jnp.float32) if isinstance(x, Path) else x)
        for x in (one, other)
    )
    return jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), *states))


def test_an_export_has_the_tokenizer_chat_templates_and_generation_settings(folder, tmp_path):
    """An adapter's generation settings are those of its base model."""
    config = load_config(folder, dtype=jnp.float32)
    for name, lora, left_out in (
        ("model", None, set()),
        ("adapter", Lora(2, targets="query"), {GENERATION}),
    ):
        model = load(folder, mesh=mesh_of(seq=1), dtype=jnp.float32)
        model = model if lora is None else add_lora(model, 2, targets="query")
        run: Any = types.SimpleNamespace(
            config=dataclasses.replace(config, lora=lora), mesh=mesh_of(seq=1), axes={}
        )
        args = argparse.Namespace(
            model=folder, out=tmp_path / "out", dtype="float32", tokenizer=None, lora_export=name,
            chat=False,
        )  # fmt: skip
        for tokenizer in (None, tmp_path / "ids.npy"):
            args.tokenizer = tokenizer
            hf_checkpoints.export(args, run, {}, nnx.state(model))
            exported = tmp_path / "out" / name
            for file in set(BESIDE) - left_out - {"tokenizer.json"}:
                assert (exported / file).read_text() == (folder / file).read_text()
            want = (tokenizer or folder / "tokenizer.json").read_bytes()
            assert (exported / "tokenizer.json").read_bytes() == want
            assert not (exported / "tokenizer.json").is_symlink()
            assert not any((exported / file).exists() for file in left_out)


def test_an_export_has_the_chat_template_of_the_training(folder, tmp_path):
    """That next to --tokenizer, and none of the model's that would be used instead."""
    model = load(folder, mesh=mesh_of(seq=1), dtype=jnp.float32)
    run: Any = types.SimpleNamespace(config=model.config, mesh=mesh_of(seq=1), axes={})
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_text(f'{{"other": "{name}"}}')
    args = argparse.Namespace(
        model=folder, out=tmp_path / "out", dtype="float32", tokenizer=other / "tokenizer.json",
        lora_export=None, chat=True,
    )  # fmt: skip
    hf_checkpoints.export(args, run, {}, nnx.state(model))
    exported = tmp_path / "out" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (exported / name).read_text() == (other / name).read_text()
    assert not list(exported.rglob("*.jinja"))
    assert (exported / "merges.txt").exists()


@pytest.mark.slow
def test_train_lm_fine_tunes_and_exports(folder, monkeypatch):
    monkeypatch.setattr(train_lm, "held_out", lambda *_: Evaluation(0.0, 1.0, 1))  # Not shown here.
    assert train_lm.main(arguments(folder)) == 0
    exported = folder.parent / "out" / "model"
    assert all((exported / file).exists() for file in BESIDE)
    assert all(0 < change < 0.1 for change in changes(folder, exported))


@pytest.mark.slow
def test_train_lm_trains_adapters_and_resumes(folder, capsys, monkeypatch):
    """Two steps in two runs are two steps in one; checkpoints do not contain the base."""
    monkeypatch.setattr(train_lm, "held_out", lambda *_: Evaluation(0.0, 1.0, 1))  # Not shown here.
    lora = ["--lora-rank=4", "--lora-alpha=8", "--lora-targets=query|up", "--checkpoint-every=1"]
    assert train_lm.main(arguments(folder, *lora)) == 0
    assert "M adapter weights, on query, up\n" in capsys.readouterr().out
    whole, out = folder.parent / "whole", folder.parent / "out"
    out.rename(whole)
    # The same run, but killed after its first step.
    shutil.copytree(whole / "checkpoints" / "1", out / "checkpoints" / "1")
    more = arguments(folder, *lora, "--lora-export=adapter")
    assert train_lm.main(more) == 0
    assert "resuming from step 1" in capsys.readouterr().out
    last = [(run / "metrics.jsonl").read_text().splitlines()[-1] for run in (whole, out)]
    assert [json.loads(line)["step"] for line in last] == [2, 2]
    assert json.loads(last[0])["loss"] == json.loads(last[1])["loss"]
    record = read_record(out / "checkpoints" / "2").arrays
    sizes = [math.prod(shape) for shape, _ in record.values()]
    count = dataclasses.replace(load_config(folder), lora=Lora(4, 8.0, "query|up"))
    assert sum(sizes) == 3 * count.num_adapter_params + 2  # Weights, two moments, two counts.
    assert (out / "adapter" / "tokenizer.json").exists()
    adapted = load_adapter(load(folder, mesh=make_mesh(), dtype=jnp.float32), out / "adapter")
    assert max(changes(whole / "model", merge_lora(adapted))) < 1e-6
    assert sum(change > 0 for change in changes(whole / "model", folder)) == 2

    weights = hf_models.tensors("qwen3")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(SystemExit, match="2"):
        train_lm.main(more)
    error = capsys.readouterr().err
    assert f"--model is {folder}, whose weights have changed: the adapters in" in error
    other = folder.rename(folder.parent / "other")
    with pytest.raises(SystemExit, match="2"):
        train_lm.main([f"--model={other}", *more[1:]])
    assert f"--model is {other}: the run of the checkpoints in" in capsys.readouterr().err


MISTAKES = [
    ("--lora-alpha=8", "--lora-alpha needs --lora-rank"),
    ("--lora-export=adapter", "--lora-export needs --lora-rank"),
    ("--lora-rank=0", "--lora-rank is 0: it must be at least 1"),
    ("--lora-rank=8 --lora-alpha=0", "--lora-alpha is 0.0: it must be positive and finite"),
    ("--lora-rank=8 --lora-targets=q", "targets is 'q': it matches none of query (q_proj"),
    ("--layers=2", "--layers is given with --model, which defines it: leave it out"),
    ("--tokenizer=x", "--tokenizer is x, but --data already holds tokens"),
    ("--mesh=stage=2", "--model has 3 layers: --mesh shards them over stage=2, but 2 does not "
     "divide 3; use another --mesh\n"),
    ("--mesh=tensor=3", "--model has 4 query heads: --mesh shards them over tensor=3"),
    ("--out={tmp}", "--model is {tmp}/model, where the result goes: use another --out than"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "message"), MISTAKES)
def test_mistakes_with_a_model(folder, capsys, more, message):
    with pytest.raises(SystemExit, match="2"):
        train_lm.main(arguments(folder, *more.format(tmp=folder.parent).split()))
    assert message.format(tmp=folder.parent) in capsys.readouterr().err


def test_adapters_need_a_model(capsys):
    with pytest.raises(SystemExit, match="2"):
        train_lm.main(["--lora-rank=8"])
    message = "--lora-rank is 8: LoRA adapts an existing model; give --model"
    assert message in capsys.readouterr().err
