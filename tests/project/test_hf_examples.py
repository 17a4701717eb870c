"""The examples that generate text with a Hugging Face checkpoint, and evaluate one."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import extras
import generate
import hf_checkpoints
import hf_models
import hostile
import jax
import jax.numpy as jnp
import numpy as np
import perplexity
import plan_command
import pytest
import run_options
from data_files import write_tokenizer
from flax import nnx
from meshes import make_mesh, mesh_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from burst_jax.models import add_lora, load, load_adapter, save_adapter
from burst_jax.plan import __main__ as planner
from burst_jax.verify import __main__ as verify

ROOT = Path(__file__).parents[2]
IDS = hf_models.TOKENS[:90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 64 token ids, and a tokenizer of no more."""
    path = hf_models.write_folder("llama3_tied", tmp_path_factory.mktemp("hf") / "model")
    letters = [chr(ord("!") + i) for i in range(60)]
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


# --- generate.py ---------------------------------------------------------------------------------


def generated(capsys, folder, options):
    words = f"--model {folder} --dtype float32 --max-new-tokens 6 --prompt GH {options}"
    assert generate.main(shlex.split(words)) == 0
    return capsys.readouterr()


@pytest.mark.slow
def test_a_single_answer_is_streamed_and_a_batch_printed_at_the_end(folder, capsys, tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("ABCDEF")
    second.write_text("HELLO")
    one = generated(capsys, folder, f"--prompt-file {first} --mesh seq=2")
    assert "prompts of 8 tokens; the KV cache takes" in one.err
    assert "first token after" in one.err
    assert "tokens/s per sequence" in one.err
    text = one.out.removesuffix("\n")
    assert len(text) > 0
    chunks = "--mesh seq=2,tensor=2 --prefill-chunk 5 --split-weights"
    both = generated(capsys, folder, f"--prompt-file {first} {second} {chunks}")
    assert both.out.split("\n---\n")[0] == text
    assert len(both.out.split("\n---\n")) == 2


def test_end_of_text_ids(folder, tmp_path):
    assert generate.stop_tokens(tmp_path, 64) == []
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert generate.stop_tokens(tmp_path, 64) == [3]
    text = {"text_config": {"eos_token_id": [4]}}  # Of a model of text and images.
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None} | text))
    assert generate.stop_tokens(tmp_path, 64) == [4]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 99]}))
    assert generate.stop_tokens(tmp_path, 64) == [5]


def test_hostile_generation_configs_and_prompts(tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": [5, 9]}')
    ids = hostile.INTEGERS - {"zero", "negative", "huger", "list", "empty"}
    fields = {"eos_token_id": ids, "eos_token_id.0": ids | {"null", "list", "empty"}}

    def results():
        valid = json.loads(file.read_text())
        cases = [*hostile.json_cases(valid, fields, {"eos_token_id.0": ("eos_token_id",)})]
        for case in [*cases, *hostile.text_cases(file.read_bytes())]:
            file.write_bytes(case.content)
            yield hostile.check(
                case.name, lambda: generate.stop_tokens(tmp_path, 64), (file.name, *case.names),
                rejected=case.rejected,
            )  # fmt: skip
        with hostile.special_files(file) as found:
            for name in found:
                yield hostile.check(
                    name, lambda: generate.text_of(file), (file.name,), rejected=True
                )
        file.write_bytes(b"caf\xe9")
        yield hostile.check("Latin-1", lambda: generate.text_of(file), (file.name,), rejected=True)

    hostile.check_all(results(), 60)


def test_only_whole_characters_are_printed(tmp_path, capsys):
    file = write_tokenizer(tmp_path / "tokenizer.json", "plain text " * 50)
    printer = generate.Printer(generate.TokenizerFile(file))
    shown = []
    for token in Tokenizer.from_file(str(file)).encode("aé√b", add_special_tokens=False).ids[:7]:
        printer.add(token)
        shown.append(capsys.readouterr().out)
    printed = "".join(shown)
    assert "\N{REPLACEMENT CHARACTER}" not in printed
    assert "aé√b".startswith(printed)
    assert len(printed) >= 2


# --- perplexity.py -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Two documents of tokens, 60 and 30 long."""
    path = tmp_path_factory.mktemp("text")
    np.save(path / "a.npy", IDS[:60])
    np.save(path / "b.npy", IDS[60:])
    return path


def evaluated(folder, documents, out, options):
    words = f"--model {folder} --data {documents} --out {out} --dtype float32 {options}"
    assert perplexity.main(shlex.split(words)) == 0
    return json.loads((out / "perplexity.json").read_text())


def losses(folder, parts, adapter=None):
    """The negative log-likelihood of each token but the first of each part, on one device."""
    model = load(folder, mesh=make_mesh(), dtype=jnp.float32)
    if adapter is not None:
        model = load_adapter(model, adapter)
    # One program: what follows a part in its row does not change its logits.
    rows = np.stack([np.pad(part, (0, 60 - len(part))) for part in parts])
    logits = jax.jit(lambda x: model.unembed(model(x, jnp.arange(60, dtype=jnp.int32))))(rows)
    logs = -np.asarray(jax.nn.log_softmax(logits))
    each = [row[np.arange(len(part) - 1), part[1:]] for row, part in zip(logs, parts, strict=True)]
    return np.concatenate(each)


@pytest.mark.slow
def test_packed_documents_do_not_attend_to_each_other_and_an_adapter_counts(
    folder, documents, tmp_path
):
    model = add_lora(load(folder, mesh=make_mesh(), dtype=jnp.float32), 2, seed=1)
    # B is initialized with zeros, which would change nothing.
    params = jax.tree.map(lambda x: x + 0.5, nnx.state(model, nnx.LoRAParam))
    nnx.update(model, params)
    adapter = tmp_path / "adapter"
    save_adapter(model, adapter, base=folder)
    options = f"--seq-len 96 --packed --mesh fsdp=2,seq=2 --check --adapter {adapter}"
    found = evaluated(folder, documents, tmp_path / "out", options)
    want, plain = (losses(folder, (IDS[:60], IDS[60:]), each) for each in (adapter, None))
    assert set(found) == {"mesh", "one_device"}
    for each in found.values():
        assert each["tokens"] == len(want)
        np.testing.assert_allclose(each["nll"], want.mean(), rtol=1e-5)
    assert abs(plain.mean() - want.mean()) > 1e-2


def test_windows_and_packs():
    ids = np.arange(10)
    cut = [[x.tolist() for x in window] for window in perplexity.windows(ids, 4, 3)]
    assert cut == [
        [[0, 1, 2, 3, 4], [1, 1, 1, 1]],
        [[3, 4, 5, 6, 7], [0, 1, 1, 1]],
        [[6, 7, 8, 9], [0, 1, 1]],
    ]
    # Tokens 1, 2 and 9 count, and the first one, which nothing predicts: two windows have some.
    some = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 1], np.float32)
    cut = [[x.tolist() for x in window] for window in perplexity.windows(ids, 4, 3, some)]
    assert cut == [[[0, 1, 2, 3, 4], [1, 1, 0, 0]], [[6, 7, 8, 9], [0, 0, 1]]]
    assert not list(perplexity.windows(ids[:1], 4, 4))
    packs = perplexity.packed(perplexity.windows(ids, 3, 3), 7)
    assert [len(pack) for pack in packs] == [2, 1]
    # Two windows of a sequence of 9 tokens and padding: their last 2 and 3 targets count.
    weights = np.array([[0, 1, 1], [1, 1, 1]], np.float32)
    pack = [perplexity.Window(ids[at : at + 4], w) for at, w in zip((0, 5), weights, strict=True)]
    tokens, segments, counts = perplexity.sequence(pack, 8)
    assert tokens.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 0]
    assert segments.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 0]
    assert counts.tolist() == [0, 1, 1, 0, 1, 1, 1, 0]


def test_a_text_begins_with_the_tokenizer_s_start_token(tmp_path):
    made = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "plain.json"))
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "special.json"))
    (tmp_path / "text.txt").write_text("a b b")
    corpus = perplexity.open_corpus(tmp_path / "text.txt")
    for name, want in (("plain", [1, 2, 2]), ("special", [0, 1, 2, 2])):
        tokenizer = perplexity.TokenizerFile(tmp_path / f"{name}.json", special_tokens=True)
        (ids,) = perplexity.documents(corpus, tokenizer)
        assert ids.tolist() == want


# --- extras and other options --------------------------------------------------------------------

WITHOUT = """
import importlib.util, runpy, sys
found = importlib.util.find_spec
lacking = ("grain", "tokenizers", "jinja2", "safetensors", "qwix", "tensorboardX")
importlib.util.find_spec = lambda name, *rest: None if name in lacking else found(name, *rest)
sys.argv, sys.path[0] = sys.argv[1:], "examples"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
DATA, MODELS = "it needs grain, tokenizers", "it needs grain, tokenizers, safetensors"
LACKING = (
    ("train_lm.py --help", DATA, "data"),
    ("train_lm.py --model=x --lora-rank 8", f"{MODELS}, qwix", "data,models,lora"),
    ("train_lm.py --tensorboard", f"{DATA}, tensorboardX", "data,tensorboard"),
    ("generate.py --chat", "it needs grain, tokenizers, jinja2, safetensors", "data,chat,models"),
    ("generate.py --help", MODELS, "data,models"),
    ("perplexity.py --adapter a", f"{MODELS}, qwix", "data,models,lora"),
)


def test_a_script_names_all_libraries_that_it_lacks():
    """The script ends before any of them is imported."""
    for words, names, needed in LACKING:
        script, *options = words.split()
        command = [sys.executable, "-c", WITHOUT, f"examples/{script}", *options]
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert run.returncode == 2
        assert run.stderr == (
            f"{script}: error: {names}, not installed here; in the checkout of burst-jax: "
            f"pip install '.[{needed}]'\n"
        )
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, libraries in extras.LIBRARIES.items():
        for library in libraries:
            assert any(x.startswith(library) for x in declared["optional-dependencies"][extra])
        # The page of the scripts names them.
        assert f"`{extra}`" in (ROOT / "docs" / "hugging-face.md").read_text()


def test_unknown_keys_are_passed_to_ignore(folder, documents, tmp_path, capsys, monkeypatch):
    """By each command line that reads a config.json; without it the message names the flag."""
    other = tmp_path / "model"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text()) | {"new_key": 1, "other_key": 2}
    (other / "config.json").write_text(json.dumps(config))
    plan = ["--length", "1024", "--gpus-per-host", "2", "--model", str(other)]

    def evaluate(words):
        perplexity.prepare(perplexity.parse_args(["--data", str(documents), *words])[0])

    def serve(words):
        hf_checkpoints.load_for_inference(generate.parse_args(words)[0], mesh_of(seq=1))

    def train(words):
        words = ["--dtype=float32", "--seq-len=64", *words]
        run_options.make_config(run_options.parse_args(words)[0], None)

    for call in (evaluate, serve, train):
        with pytest.raises(NotImplementedError, match=r"on a command line --ignore new_key other"):
            call(["--model", str(other)])
        call(["--model", str(other), "--ignore", "new_key", "other_key"])
    for main, words in ((planner.main, plan), (verify.main, ["--model", str(other)])):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "--ignore new_key other_key" in capsys.readouterr().err
    file = other.with_name("plan.json")
    planner.main([*plan, "--ignore", "new_key", "other_key", "--json", str(file)])
    printed = capsys.readouterr().out
    assert 'param_dtype=jnp.float32, ignore=("new_key", "other_key"))' in printed
    plan_command.main([str(file), "--model", str(other), "--ignore", "new_key", "other_key"])
    printed = capsys.readouterr().out
    assert f"train_lm.py --model {other} --ignore new_key other_key --data DATA" in printed
    monkeypatch.setattr(verify, "load", lambda *_, ignore, **__: pytest.fail(f"with {ignore}"))
    with pytest.raises(pytest.fail.Exception, match=r"with \['new_key', 'other_key'\]"):
        verify.main(["--model", str(other), "--ignore", "new_key", "other_key"])


# --- mistakes ------------------------------------------------------------------------------------

MISTAKES = (
    (generate, "", "there is no prompt: pass --prompt, --prompt-file or both"),
    (generate, "--prompt A --temperature 1e-9", "temperature is 1e-09: it must be 0, or finite"),
    (
        generate, "--prompt A --model {tmp}",
        "--model is {tmp}, which lacks tokenizer.json: name one with --tokenizer",
    ),
    (generate, "--prompt A --tokenizer {tmp}/none", "--tokenizer is {tmp}/none: there is no"),
    (
        generate, "--prompt A --mesh data=2",
        "--mesh shards the batch over 2 devices, and the number of prompts is 1: pass a multiple "
        "of 2 text files as --prompt-file, or a --mesh with data, fsdp and stage of size 1",
    ),
    (
        perplexity, "--data {tmp}/other.jsonl",
        "no key 'text': set key= to the key of the text, on a command line --text-key",
    ),
    (perplexity, "--data {tmp}/other.jsonl --text-key body --batch 3 --mesh data=2", "--batch is"),
    (perplexity, "--stride 5000", "--stride is 5000: it must be at most --seq-len, 1024, or tok"),
    (perplexity, "--mesh fsdp=2 --batch 3", "--batch is 3: use a multiple of 2"),
    (perplexity, "--adapter missing", "argument --adapter: 'missing': there is no such folder"),
    (
        perplexity, "--data {tmp}/ids.npy",
        "--data has token ids from 0 to 79, but the model's vocabulary is 64",
    ),
)  # fmt: skip


def test_mistakes_are_reported(folder, documents, tmp_path, capsys):
    np.save(tmp_path / "ids.npy", np.arange(80))
    (tmp_path / "other.jsonl").write_text('{"body": "AB"}\n')
    for example, options, message in MISTAKES:
        words = f"--model {folder} --dtype float32 "
        words += f"--data {documents} " if example is perplexity else ""
        with pytest.raises(SystemExit, match="2"):
            example.main(shlex.split(words + options.format(tmp=tmp_path)))
        assert message.format(tmp=tmp_path) in capsys.readouterr().err
