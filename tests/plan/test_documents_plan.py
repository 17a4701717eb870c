"""The planner for packed documents against the work reports and placements that it compares."""

from __future__ import annotations

import json
import re
import tracemalloc

import numpy as np
import pytest

import burst_jax
from burst_jax.plan.__main__ import main

BATCH = [[30_000, *[2000] * 8], [700] * 60]
LENGTH = 49_152


def test_layouts_and_rings_are_compared(tmp_path, capsys):
    plan = burst_jax.plan.documents(BATCH, length=LENGTH, gpus_per_host=12)
    assert sorted({each.num_shards for each in plan.work}) == [2, 3, 4, 6, 12]
    ids = np.zeros((2, LENGTH), np.int32)
    for row, lengths in zip(ids, BATCH, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths) + 1
    for each in plan.work:
        expected = burst_jax.layouts.work_report(ids, each.layout, each.num_shards)
        np.testing.assert_array_equal(each.report.pairs, expected.pairs)
        assert each.report.share_of_ideal == expected.share_of_ideal
    for n in (2, 3, 4, 6, 12):
        shares = [each.report.share_of_ideal for each in plan.work if each.num_shards == n]
        assert shares == sorted(shares, reverse=True)
        assert plan.best(n).report.share_of_ideal >= shares[0] - 0.01
    placed = burst_jax.layouts.balance_batch(BATCH, num_shards=12, tokens_per_shard=LENGTH // 12)
    assert plan.best(12).layout == placed[0].layout

    (tmp_path / "lengths.json").write_text(json.dumps(BATCH))
    command = ["--length", "48K", "--gpus-per-host", "12", "--documents"]
    main([*command, str(tmp_path / "lengths.json"), "--json", str(tmp_path / "plan.json")])
    assert capsys.readouterr().out == f"{plan}\n"
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["recommended"]["12"] == placed[0].layout
    assert record["estimates"][0] == plan.work[0].record()
    row = re.search(r"^ +12  (balanced:\d+) +(\d+)% .*recommended$", str(plan), re.MULTILINE)
    assert row is not None
    assert row[1] == placed[0].layout
    assert float(row[2]) == pytest.approx(100 * plan.best(12).report.share_of_ideal, abs=0.5)


def test_memory_grows_with_the_documents_only():
    """An array of the tokens of one such sequence has 4 MiB, of all 256 MiB."""
    tracemalloc.start()
    try:
        plan = burst_jax.plan.documents([[300_000, *[5000] * 20]] * 64, length=2**20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {each.num_shards for each in plan.work} == {2, 4, 8}
    assert peak < 3e6


def test_equal_layouts_differ_in_bytes():
    # One shard's documents on each of two shards: contiguous sends keys for nothing.
    plan = burst_jax.plan.documents([[4096, 4096]], length=8192, gpus_per_host=2)
    assert plan.best(2).layout == "balanced:0"
    assert plan.best(2).report.bytes_sent == 0
    assert [name for name, _ in plan.left_out] == []
    with pytest.raises(ValueError, match="num_shards is 4: the planned sizes are 2"):
        plan.best(4)


def test_what_no_ring_can_shard_is_left_out():
    plan = burst_jax.plan.documents([[9000]], length=3 * 4097, gpus_per_host=6)
    assert {each.num_shards for each in plan.work} == {3}
    reasons = dict(plan.left_out)
    assert reasons["ring of 3, zigzag"] == "length is 12291: it must be a multiple of 6"
    assert "ring of 2, striped" in reasons
    assert reasons["ring of 6, balanced"] == "length is 12291: it must be a multiple of 6"
    small = burst_jax.plan.documents([[9000]], length=3 * 4096, gpus_per_host=12)
    assert dict(small.left_out)["ring of 12"].startswith("shards of fewer than 2,048 tokens")


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ([], {}, "batch has no documents: it needs the document lengths of a sequence"),
        ([[]], {}, "batch has no documents"),
        ([[5, 0]], {}, r"batch\[0\]\[1\] is 0: a document has at least 1 token"),
        ([[9000]], {}, r"batch\[0\] has 9000 tokens in all, more than length 8192: pack"),
        ([[5, [6]]], {}, r"batch\[0\] is \[5, \[6\]\]: it must be a sequence of integers"),
        ([[5], [[6]]], {}, r"batch\[1\] is \[\[6\]\]: it must be a sequence of integers"),
        ([[5], 6], {}, r"batch\[1\] is 6: it must be a sequence of integers"),
        (5, {}, "batch is 5: it must be a list, the document lengths of each sequence"),
        ([[2**62] * 4], {}, f"has {2**64} tokens in all, more than length 8192"),
        ([[5]], {"length": 0}, "length is 0: it must be an integer, at least 1"),
        ([[5]], {"length": 2**31}, "length is 2147483648: it must be an integer, at least 1 and"),
        ([[5]], {"hosts": 0}, "hosts is 0: it must be an integer, at least 1"),
        ([[5]], {"gpus_per_host": 1}, "length is 8192: no ring can shard it over 1 GPUs"),
        ([[5]], {"length": 4097}, "no ring can shard it over 8 GPUs: ring of 2, contiguous: len"),
    ],
)
def test_bad_input(batch, options, message):
    with pytest.raises(ValueError, match=message):
        burst_jax.plan.documents(batch, **{"length": 8192} | options)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("[5, 6]", [], "is [5, 6]: it must be a list of lists"),
        ("[[5]", [], "is not JSON"),
        ("[[1.5]]", [], "lengths.json[0] is [1.5]: it must be a sequence of integers"),
        ("[[5, [6]]]", [], "lengths.json[0] is [5, [6]]: it must be a sequence of integers"),
        ("[" * 10**5, [], "lengths.json is nested deeper than 32 levels"),
        ("[[-5]]", [], "lengths.json[0][0] is -5: a document has at least 1 token"),
        ("[[5]]", ["--json", ""], "argument --json: '': it must name a file\n"),
        ("[[5]]", ["--heads", "8"], "--heads is not for --documents: leave it out"),
        ("[[5]]", ["--batch", "2"], "--batch is not for --documents: leave it out"),
        ("[[5]]", ["--model", "llama-3-8b"], "--model is given with --documents: plan them one"),
    ],
)
def test_bad_commands(tmp_path, capsys, content, options, message):
    (tmp_path / "lengths.json").write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["--length", "8K", "--documents", str(tmp_path / "lengths.json"), *options])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert content == "[[5]]" or ": error: --documents: " in printed
