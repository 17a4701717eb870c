"""The example that generates text with a Hugging Face checkpoint."""

from __future__ import annotations

import json

import generate as example
import hf_models
import pytest
from data_files import write_tokenizer
from tokenizers import Tokenizer

NAME = "llama3_tied"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 64 token ids, and a tokenizer of no more."""
    path = hf_models.write_folder(NAME, tmp_path_factory.mktemp("generate") / "model")
    letters = [chr(ord("!") + i) for i in range(60)]
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"<s>": 60, "</s>": 61}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<s>"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated",
                          "invert": False},
        "decoder": {"type": "Fuse"},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def run(capsys, folder, *options):
    arguments = ["--model", str(folder), "--dtype", "float32", "--max-new-tokens", "6", *options]
    assert example.main(arguments) == 0
    return capsys.readouterr()


def test_a_single_answer_is_streamed_and_a_batch_printed_at_the_end(folder, capsys, tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("ABCDEF")
    second.write_text("HELLO")
    one = run(capsys, folder, "--prompt-file", str(first), "--prompt", "GH", "--mesh", "seq=4")
    assert "prompts of 8 tokens; the KV cache takes" in one.err
    assert "first token after" in one.err
    assert "tokens/s per sequence" in one.err
    text = one.out.removesuffix("\n")
    assert len(text) > 0
    both = run(
        capsys, folder, "--prompt-file", str(first), str(second), "--prompt", "GH",
        "--mesh", "seq=2,tensor=2", "--prefill-chunk", "5", "--split-weights",
    )  # fmt: skip
    assert both.out.split("\n---\n")[0] == text
    assert len(both.out.split("\n---\n")) == 2


def test_end_of_text_ids(folder, tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    assert example.stop_tokens(path, 64) == []
    (path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert example.stop_tokens(path, 64) == [3]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 99]}))
    assert example.stop_tokens(path, 64) == [5]


def test_only_whole_characters_are_printed(tmp_path, capsys):
    file = write_tokenizer(tmp_path / "tokenizer.json", "plain text " * 50)
    printer = example.Printer(example.TokenizerFile(file))
    shown = []
    for token in Tokenizer.from_file(str(file)).encode("aé√b", add_special_tokens=False).ids[:7]:
        printer.add(token)
        shown.append(capsys.readouterr().out)
    printed = "".join(shown)
    assert "\N{REPLACEMENT CHARACTER}" not in printed
    assert "aé√b".startswith(printed)
    assert len(printed) >= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "there is no prompt: pass --prompt, --prompt-file or both"),
        (["--prompt", "A", "--temperature", "-1"], "temperature is -1.0: it must be 0, or finite"),
        (["--prompt", "A", "--max-new-tokens", "0"], "max_new_tokens is 0: it must be"),
    ],
)
def test_mistakes_are_reported(folder, capsys, options, message):
    with pytest.raises(SystemExit):
        example.main(["--model", str(folder), "--dtype", "float32", *options])
    assert message in capsys.readouterr().err
