"""What texts start and end with: as in transformers, and the same wherever a text is encoded."""

from __future__ import annotations

import json
import re
import warnings

import chat_cases
import generate
import numpy as np
import perplexity
import pytest
from chat_cases import FOLDER
from data_files import loader_of, taken
from tokenizers import Tokenizer, models, processors

from burst_jax.data import TokenizerFile, open_corpus, save_tokens

GOLDEN = json.loads((FOLDER / "special_tokens.json").read_text())


def tokenizer_in(folder, name, with_eos, **config):
    folder.mkdir(exist_ok=True)
    made = Tokenizer.from_file(str(FOLDER / name / "tokenizer.json"))
    (chat_cases.with_eos(made) if with_eos else made).save(str(folder / "tokenizer.json"))
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def test_a_document_starts_and_ends_as_in_transformers(tmp_path):
    """The config's add_bos_token and add_eos_token have no effect, and warn if that is wrong."""
    (tmp_path / "text.txt").write_text(chat_cases.TEXT)
    corpus = open_corpus(tmp_path / "text.txt")
    for index, (name, with_eos, bos, eos, ids) in enumerate(GOLDEN):
        file = tokenizer_in(
            tmp_path / str(index), name, with_eos, add_bos_token=bos, add_eos_token=eos
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokens = TokenizerFile(file, special_tokens=True)
        (batch,) = taken(loader_of(corpus, tokens=tokens, batch=1, epochs=1))
        assert batch["rows"][batch["segment_ids"] > 0].tolist() == ids
        has = name != "qwen", with_eos
        wrong = [
            f"add_{which}_token {flag}, and the post-processor of tokenizer.json adds "
            f"{'one' if added else 'none'}, "
            for which, flag, added in zip(("bos", "eos"), (bos, eos), has, strict=True)
            if flag is not None and flag != added
        ]
        assert len(caught) == len(wrong)
        for warning, text in zip(caught, wrong, strict=True):
            assert text in str(warning.message)


def test_perplexity_and_generation_start_as_training_does(tmp_path):
    file = tokenizer_in(tmp_path / "folder", "gemma", True)
    (tmp_path / "text.txt").write_text(chat_cases.TEXT)
    whole = Tokenizer.from_file(str(file)).encode(chat_cases.TEXT).ids
    given = ["--tokenizer", str(file), "--model", str(tmp_path)]
    args, _ = perplexity.parse_args([*given, "--data", str(tmp_path / "text.txt")])
    (ids,) = perplexity.documents(open_corpus(args.data), perplexity.tokenizer_of(args))
    assert ids.tolist() == whole
    args, _ = generate.parse_args([*given, "--prompt", chat_cases.TEXT])
    (ids,), _, ends = generate.prompts_of(args)
    assert ends == []
    # It continues the text.
    assert ids.tolist() == whole[:-1]


@pytest.mark.parametrize("packing", ["first_fit", "split"])
def test_each_document_has_them_once_though_it_is_cut(tmp_path, packing):
    file = tokenizer_in(tmp_path / "folder", "gemma", True)
    tokens = TokenizerFile(file, special_tokens=True)
    (bos,), (eos,) = tokens.prefix_ids, tokens.suffix_ids
    texts = ["the ring of four\n" * 100, "keys", "values and " * 150]
    (tmp_path / "text").mkdir()
    for index, text in enumerate(texts):
        (tmp_path / "text" / f"{index}.txt").write_text(text)
    corpus = open_corpus(tmp_path / "text")
    batches = taken(loader_of(corpus, tokens=tokens, epochs=1, batch=2, packing=packing))
    ids = np.concatenate([x["rows"][x["segment_ids"] > 0] for x in batches])
    assert [(ids == token).sum() for token in (bos, eos)] == [3, 3]
    for batch in batches:
        for row, segments in zip(batch["rows"], batch["segment_ids"], strict=True):
            for segment in range(1, segments.max() + 1):
                own = row[segments == segment]
                # A document starts or ends there, and only there.
                assert bos not in own[1:]
                assert eos not in own[:-1]
    # The parts that a split makes of one document start like documents.
    train, held_out = open_corpus(tmp_path / "text" / "0.txt").split(0.3)
    for part in (train, held_out):
        found = np.concatenate(
            [
                x["rows"][x["segment_ids"] > 0]
                for x in taken(loader_of(part, tokens=tokens, epochs=1, batch=1, packing="split"))
            ]
        )
        assert [(found == token).sum() for token in (bos, eos)] == [1, 1]
        assert found[np.flatnonzero(found == bos)[0] + 1] != eos
    saved = save_tokens(corpus, tokens, tmp_path / "ids.npy")
    offsets, ids = np.load(tmp_path / "ids.offsets.npy"), np.load(tmp_path / "ids.npy")
    assert len(saved) == 3
    assert ids[offsets[:-1]].tolist() == [bos] * 3
    assert ids[offsets[1:] - 1].tolist() == [eos] * 3


def test_special_tokens_change_the_fingerprint_only_if_there_are_any(tmp_path):
    for name, same in (("qwen", True), ("gemma", False)):
        file = tokenizer_in(tmp_path / name, name, False)
        plain, special = (
            TokenizerFile(file, special_tokens=x).fingerprint() for x in (False, True)
        )
        assert (plain == special) == same
    assert TokenizerFile(file).prefix_ids == ()
    made = Tokenizer(models.WordLevel({"<s>": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.post_processor = processors.TemplateProcessing("<s> $A <s>", None, [("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokens = TokenizerFile(tmp_path / "tokenizer.json", special_tokens=True)
    assert (tokens.prefix_ids, tokens.suffix_ids) == ((0,), (0,))


def test_a_separator_that_texts_end_with_already_raises(tmp_path):
    file = tokenizer_in(tmp_path / "folder", "gemma", True)
    message = re.escape("separator is '<eos>', with which texts of ") + ".* end already: leave it"
    with pytest.raises(ValueError, match=message):
        TokenizerFile(file, "<eos>", special_tokens=True)
    assert TokenizerFile(file, "<eos>").suffix_ids == ()
    (file.parent / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        TokenizerFile(file, special_tokens=True)
