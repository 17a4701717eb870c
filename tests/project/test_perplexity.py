"""The example that evaluates a Hugging Face checkpoint."""

from __future__ import annotations

import json
import re
from typing import Any

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import perplexity as example
import pytest
from flax import nnx
from meshes import make_mesh

from burst_jax.models import add_lora, load, load_adapter, save_adapter

IDS = hf_models.TOKENS[:90]


@pytest.fixture
def folder(tmp_path):
    return hf_models.write_folder("llama3", tmp_path / "model")


@pytest.fixture
def documents(tmp_path):
    """Two documents of tokens, 60 and 30 long."""
    path = tmp_path / "text"
    path.mkdir()
    np.save(path / "a.npy", IDS[:60])
    np.save(path / "b.npy", IDS[60:])
    return path


def losses(folder, ids, adapter=None):
    """The negative log-likelihood of each token but the first, on one device."""
    model = load(folder, mesh=make_mesh(), dtype=jnp.float32)
    if adapter is not None:
        model = load_adapter(model, adapter)
    tokens = jnp.asarray(ids[None, :-1])
    logits = model.unembed(model(tokens, jnp.arange(len(ids) - 1, dtype=jnp.int32)))[0]
    return -np.asarray(jax.nn.log_softmax(logits))[np.arange(len(ids) - 1), ids[1:]]


def run(folder, documents, tmp_path, *options):
    out = tmp_path / "out"
    paths = ["--model", str(folder), "--data", str(documents), "--out", str(out)]
    assert example.main([*paths, "--dtype", "float32", *options]) == 0
    return json.loads((out / "perplexity.json").read_text())


def test_packed_documents_do_not_attend_to_each_other(folder, documents, tmp_path):
    found = run(
        folder, documents, tmp_path,
        "--seq-len", "96", "--packed", "--mesh", "fsdp=2,seq=2", "--check",
    )  # fmt: skip
    want = np.concatenate([losses(folder, IDS[:60]), losses(folder, IDS[60:])])
    for each in found.values():
        assert each["tokens"] == len(want)
        np.testing.assert_allclose(each["nll"], want.mean(), rtol=1e-5)
    assert set(found) == {"mesh", "one_device"}


def test_an_adapter_counts(folder, documents, tmp_path):
    model = add_lora(load(folder, mesh=make_mesh(), dtype=jnp.float32), 2, seed=1)
    # B is initialized with zeros, which would change nothing.
    params = jax.tree.map(lambda x: x + 0.5, nnx.state(model, nnx.LoRAParam))
    nnx.update(model, params)
    save_adapter(model, tmp_path / "adapter", base=folder)
    found = run(folder, documents, tmp_path, "--adapter", str(tmp_path / "adapter"))["mesh"]
    want, plain = (
        np.concatenate([losses(folder, ids, adapter) for ids in (IDS[:60], IDS[60:])]).mean()
        for adapter in (tmp_path / "adapter", None)
    )
    np.testing.assert_allclose(found["nll"], want, rtol=1e-5)
    assert abs(plain - want) > 1e-2


@pytest.mark.slow
def test_windows_count_each_token_once(folder, documents, tmp_path):
    found = run(
        folder, documents, tmp_path,
        "--seq-len", "32", "--stride", "20", "--mesh", "seq=4", "--layout", "striped",
    )  # fmt: skip
    # 60 tokens: windows from 0 and 20 of 33 tokens, of which the second counts 20; the third, from
    # 40, has the last 20 tokens, 7 of them uncounted.
    first = IDS[:60]
    parts = [
        losses(folder, first[:33]), losses(folder, first[20:53])[-20:],
        losses(folder, first[40:])[-7:], losses(folder, IDS[60:]),
    ]  # fmt: skip
    want = np.concatenate(parts)
    assert found["mesh"]["tokens"] == len(want) == 59 + 29
    np.testing.assert_allclose(found["mesh"]["nll"], want.mean(), rtol=1e-5)


def test_windows_and_packs():
    ids = np.arange(10)
    cut = [(w.tokens.tolist(), w.counted) for w in example.windows(ids, 4, 3)]
    assert cut == [([0, 1, 2, 3, 4], 4), ([3, 4, 5, 6, 7], 3), ([6, 7, 8, 9], 2)]
    assert sum(counted for _, counted in cut) == 9
    assert not list(example.windows(ids[:1], 4, 4))
    packs = example.packed(example.windows(ids, 3, 3), 7)
    assert [len(pack) for pack in packs] == [2, 1]


def test_a_text_begins_with_the_tokenizer_s_start_token(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "plain.json"))
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "special.json"))
    (tmp_path / "text.txt").write_text("a b b")
    corpus = example.open_corpus(tmp_path / "text.txt")
    for name, want in (("plain", [1, 2, 2]), ("special", [0, 1, 2, 2])):
        tokenizer = example.TokenizerFile(tmp_path / f"{name}.json")
        (ids,) = example.documents(corpus, tokenizer)
        assert ids.tolist() == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stride", "5000"], "--stride is 5000: it must be at least 1 and at most --seq-len"),
        (["--seq-len", "0"], "--seq-len is 0: it must be at least 1"),
        (["--mesh", "fsdp=2", "--batch", "3"], "--batch is 3: use a multiple of 2"),
        (["--adapter", "missing"], "--adapter is missing: there is no such folder"),
        ([], "none: there is no such folder"),
    ],
)
def test_mistakes_are_reported(options, message, documents, tmp_path, capsys):
    if options:
        (tmp_path / "none").mkdir()
    paths: Any = ["--model", str(tmp_path / "none"), "--data", str(documents)]
    with pytest.raises(SystemExit, match="2"):
        example.main([*paths, *options])
    assert re.search(re.escape(message), capsys.readouterr().err)


def test_ids_outside_the_vocabulary_are_reported(folder, tmp_path, capsys):
    np.save(tmp_path / "ids.npy", np.arange(80))
    with pytest.raises(SystemExit, match="2"):
        example.main(["--model", str(folder), "--data", str(tmp_path / "ids.npy")])
    message = "--data has token ids from 0 to 79, but the model's vocabulary is 64"
    assert message in capsys.readouterr().err
