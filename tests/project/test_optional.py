"""Errors about optional libraries that are missing."""

from __future__ import annotations

import sys

import pytest

from burst_jax.data import TokenizerFile
from burst_jax.errors import optional


def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = (
        r"^TokenizerFile needs tokenizers, which is not installed: pip install 'burst-jax\[data\]'$"
    )
    with pytest.raises(ImportError, match=message):
        TokenizerFile(tmp_path / "tokenizer.json")


def test_an_installed_library_that_misses_another_one_says_which(monkeypatch, tmp_path):
    """Installing it again would not help."""
    (tmp_path / "installed_library.py").write_text("import library_that_it_misses")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'library_that_it_misses'$"):
        optional("installed_library", user="this test", extra="test")


def test_a_module_in_a_library_is_returned_itself():
    assert optional("json.decoder", user="this test", extra="test") is sys.modules["json.decoder"]
