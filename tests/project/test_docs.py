"""README and documentation: code runs, commands and links exist, search finds its terms."""

from __future__ import annotations

import ast
import errno
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import burst_jax

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)

sys.path.insert(0, str(ROOT / "examples"))
import draw_ring  # noqa: E402 - the examples are scripts, not a package


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


WITH_CODE = [page for page in PAGES if blocks(page, "python")]


def printed_by_program(code):
    """What a reader's first program prints, in a process whose devices it counts itself."""
    hidden = ("JAX_NUM_CPU_DEVICES", "SLURM")
    env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    command = [sys.executable, "-W", "error", "-c", code]
    env["JAX_PLATFORMS"] = "cpu"
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=() if page == README else pytest.mark.slow)
        for page in WITH_CODE
    ],
)
def test_blocks_run_in_order_and_print_what_their_comments_show(page, capsys, monkeypatch):
    code = "\n".join(blocks(page, "python"))
    if page == README:
        out = printed_by_program(code)
    else:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        with jax.numpy_dtype_promotion("standard"):
            exec(compile(code, name(page), "exec"), {"__name__": "__main__"})
        out = capsys.readouterr().out
    expected = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    # Progress lines contain speeds, which differ each time.
    shown = [line for line in out.splitlines() if not re.match(r"step \d+/\d+  ", line)]
    assert shown == expected


def test_all_code_is_found():
    """What is not collected is not run."""
    text = "".join(page.read_text() for page in PAGES)
    opened = re.findall(r"^[ >]*```+ *(?:py|python|Python).*$", text, re.MULTILINE)
    assert len(opened) == sum(len(blocks(page, "python")) for page in PAGES) > 40
    for command in ("make train", "make docs", "burst_jax.plan --length", "benchmarks ring"):
        assert command in "\n".join(COMMANDS)


def test_readme_fits_on_a_few_screens():
    text = README.read_text()
    assert text.count("\n") <= 150
    end = text.index("```\n", text.index("```python"))
    assert text[:end].count("\n") + 1 <= 40


def test_patches_of_frameworks_have_as_many_lines_as_the_page_says():
    """Without imports, constants, comments and empty lines; a row of the table for each patch."""
    page = (ROOT / "docs" / "frameworks.md").read_text()
    patches = sorted((ROOT / "examples" / "frameworks").glob("*_patch.py"))
    assert len(patches) == 7
    for path in patches:
        text = re.search(r"start:patch\](.*)# --8<-- \[end:patch\]", path.read_text(), re.DOTALL)
        assert text is not None
        lines = text[1].splitlines()
        for node in ast.parse(text[1]).body:
            first, last = node.lineno - 1, node.end_lineno
            constant = isinstance(node, ast.Assign) and re.match(r"[A-Z, ]+ =", lines[first])
            if isinstance(node, (ast.Import, ast.ImportFrom)) or constant:
                lines[first:last] = [""] * len(lines[first:last])
        count = sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)
        assert f'"{path.relative_to(ROOT)}:patch"' in page
        name = path.stem.removesuffix("_patch").replace("_", "-")
        row = re.search(rf"^\| \[[^]]*\]\(#{name}\) \|[^|]*\| (\d+) \|", page, re.MULTILINE)
        assert row is not None, name
        assert int(row[1]) == count, (name, count)
        assert count <= 12, name


# --- commands ------------------------------------------------------------------------------------


def commands():
    """``(page, words)`` of every command line in a block or in a line's code."""
    found = {}
    for page in PAGES:
        lines = "".join(blocks(page, "sh")).splitlines()
        text = FENCED.sub("", page.read_text())
        lines += re.findall(r"(?<!`)`((?:make|python) [^`]+)`(?!`)", text, re.DOTALL)
        for line in lines:
            line = re.sub(r"<[^>]*>|\s+", " ", line).replace("...", "")
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                found[f"{name(page)}: {' '.join(words)}"] = words
    return found


COMMANDS = commands()


def help_of(program, words, monkeypatch, capsys):
    """What the program, and its subcommand if one is named, says of its options."""
    subcommand = [word for word in words[:1] if re.fullmatch("[a-z][a-z-]*", word)]
    monkeypatch.setattr(sys, "argv", [program, *subcommand, "--help"])
    monkeypatch.chdir(ROOT)
    start = runpy.run_path if program.endswith(".py") else runpy.run_module
    with pytest.raises(SystemExit) as stop:
        start(program, run_name="__main__")
    assert not stop.value.code
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command, monkeypatch, capsys, request):
    words = COMMANDS[command]
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    match words:
        case ["make", *goals]:
            makefile = (ROOT / "Makefile").read_text() + (ROOT / ".ci/find-python").read_text()
            for goal in goals:
                pattern = rf"^{goal}:" if "=" not in goal else rf"\b{goal.split('=')[0]}\b"
                assert re.search(pattern, makefile, re.MULTILINE), goal
        case ["pip", "install", target]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            wanted = re.findall(r"[\w]+", target.partition("[")[2])
            assert set(wanted) <= set(project["optional-dependencies"])
        case ["python", "-m", "pytest", *rest] | ["pytest", *rest]:
            assert all(list(ROOT.glob(word)) for word in rest if word.startswith("tests/"))
            for option in options:
                request.config.getoption(option)  # ValueError where there is no such option
        case ["python", "-m", program, *rest] | ["python", program, *rest]:
            text = help_of(program, rest, monkeypatch, capsys)
            assert [option for option in options if not re.search(rf"{option}\b", text)] == []
        case ["git", "clone", *_] | ["cd", _] | ["python3.12", "-m", "venv", _] | [".", _] | []:
            pass
        case _:
            pytest.fail(f"nothing here knows whether this command exists: {words}")


# --- links ---------------------------------------------------------------------------------------


def anchors(page):
    """The anchors of a page: its headings, as GitHub and MkDocs name them, and its API entries."""
    found = set(re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE))
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        text, _, given = heading.partition("{ #")
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found |= {slug, given.rstrip(" }")}
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        assert file.is_relative_to(ROOT), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target
    # Files that are named as code.
    folders = "burst_jax|pallas_kernels|benchmarks|tests|examples|docs|.ci"
    for path in re.findall(rf"`((?:{folders})/[\w./*-]+)`", text):
        assert list(ROOT.glob(path)), path


def test_the_path_to_a_kernel_names_functions_of_its_files():
    text = (ROOT / "docs" / "contributing.md").read_text()
    rows = re.findall(
        r"^\| \d+ \| `([\w.]+)` \| \[`([\w./]+)`\]\(\.\./([\w./]+)\)", text, re.MULTILINE
    )
    assert 2 < len(rows) <= 12
    assert len({file for _, file, _ in rows}) <= 8
    for function, file, target in rows:
        assert file == target
        source = (ROOT / file).read_text()
        for part in function.split("."):
            assert re.search(rf"^ *(?:def|class) {part}\b", source, re.MULTILINE), (function, file)


# --- search --------------------------------------------------------------------------------------

TERMS = (
    "context parallel", "sequence parallel", "GQA", "Megatron", "MaxText", "OOM", "cu_seqlens",
    "varlen", "resume", "Ulysses", "Llama 3", "Qwen 3", "sliding window", "ZeRO", "Ring Attention",
    "master weights", "relative position bias", "Equinox", "TransformerEngine",
)  # fmt: skip
DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]


def lead(page):
    """A page's title and headings, and the text before its first section."""
    text = FENCED.sub("", page.read_text().split("---", 2)[2])
    return "\n".join([text.partition("\n## ")[0], *re.findall(r"^#+ .*$", text, re.MULTILINE)])


def test_pages_are_found_by_the_terms_of_the_field():
    """In leads and headings; every page is in the contents."""
    leads = [lead(page).lower() for page in DOCS]
    assert [term for term in TERMS if not any(term.lower() in text for text in leads)] == []
    contents = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS:
        assert f": {page.relative_to(ROOT / 'docs')}\n" in contents, page


def test_search_splits_messages_and_not_words():
    """Into words without operators of the search, for which its index fails: ``2**31``."""
    (separator,) = re.findall(
        r"^ +separator: '(.*)'$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    separator = separator.replace("''", "'")

    def words(text):
        return [word for word in re.split(separator, text) if word]

    assert words("ZeRO PyPI DeepSeek") == ["ZeRO", "PyPI", "DeepSeek"]
    assert words("layout is 'x': below 2**31, --mesh seq=4") == [
        "layout", "is", "x", "below", "2", "31", "mesh", "seq", "4",
    ]  # fmt: skip
    assert words("burst_jax.plan.attention(length=1)") == [
        "burst", "jax", "plan", "attention", "length", "1",
    ]  # fmt: skip


def templates():
    """The constant parts of every whole string of the library; f-strings have gaps between them."""
    for folder in ("burst_jax", "pallas_kernels", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            whole = [node for node in nodes if isinstance(node, ast.JoinedStr)]
            inside = {id(value) for node in whole for value in node.values}
            whole += [node for node in nodes if isinstance(node, ast.Constant)]
            for node in whole:
                found = getattr(node, "values", [node]) if id(node) not in inside else []
                parts = [getattr(value, "value", None) for value in found]
                parts = [re.sub(r"\s+", " ", part) for part in parts if isinstance(part, str)]
                if len("".join(parts).split()) >= 3:  # More than a name.
                    yield parts
    missing = re.search('echo "(No .*)" >&2', (ROOT / ".ci/find-python").read_text(), re.DOTALL)
    assert missing is not None
    yield re.split(r'\$\{PYTHON:-|\}|" \\\n *"', missing[1])
    yield ["Jax plugin configuration error"]
    yield ["supported are "]  # Model families
    # Reasons that a message quotes.
    yield ["Object of type ", " is not JSON serializable"]
    yield ["too many positional arguments"]
    yield from ([os.strerror(code)] for code in (errno.ENOENT, errno.ENOSPC))


def find(message, parts):
    """Where the parts are in the message, one after the other; empty unless all are."""
    spans, at = [], 0
    for part in parts:
        start = message.find(part, at)
        if start < 0:
            return []
        at = start + len(part)
        spans.append((start, at))
    return spans


def unknown(message, known):
    """The prose of the message, three words or more in a row, that no string of the library has."""
    left = list(message)
    for parts in known:
        for start, end in find(message, parts):
            left[start:end] = "\n" * (end - start)
    if left == list(message):
        return [message]
    return re.findall(r"(?:\b[a-z]+ ){2,}[a-z]+\b", "".join(left))


def test_error_rows_hold_whole_messages_of_the_library():
    """So that a pasted message finds its row."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `([^`]+)`(?: \(\w+\))? \| (.*) \|$", text, re.MULTILINE)
    # Messages carry their remedies: a row is for what needs an explanation.
    assert 60 < len(rows) < 140
    known = list(templates())
    stale = {}
    for message, remedy in rows:
        assert "…" not in message, message
        assert remedy.strip(), message
        # Some messages end with a line break and a list.
        if found := unknown(message.replace("\\|", "|") + " ", known):
            stale[message] = found
    assert stale == {}


def test_a_reworded_message_is_stale():
    known = [[" cannot run: "], ["the length is ", "; it supports multiples of "]]
    message = "implementation 'x' cannot run: the length is 3; it supports multiples of 8"
    assert unknown(message, known) == []
    stale = unknown(message.replace("supports", "takes"), known)
    assert stale == ["the length is", "it takes multiples of"]
    assert unknown("x is 3", known)


# --- figures -------------------------------------------------------------------------------------

SENT = re.compile(r":(bf16|f32)\[[^=]* = ppermute\[.*?perm=\(\((\d+), (\d+)\)", re.DOTALL)


def test_the_drawn_schedule_is_the_one_that_runs():
    """Which block is sent how far, step by step, as in the traced gradient."""
    mesh = jax.make_mesh(
        (draw_ring.N,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[: draw_ring.N]
    )
    x = jnp.ones((1, 32, 2, 16), jnp.bfloat16)

    def loss(q, k, v):
        out = burst_jax.burst_attention(q, k, v, mesh=mesh, backward="rotate_kv")
        return out.astype(jnp.float32).sum()

    traced = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x))
    sent = [
        (kind, (int(to) - int(start)) % draw_ring.N) for kind, start, to in SENT.findall(traced)
    ]
    assert len(sent) == traced.count("ppermute[")
    steps = (*draw_ring.forward_steps(0), *draw_ring.backward_steps(0))
    drawn = [text for _, sends in steps for text in sends]
    # K and V, or their gradients: one permute each.
    for dtype, first, arrays in (("bf16", "K", 2), ("f32", "dK", 2)):
        shown = [int(text[-1]) for text in drawn if text.startswith(first)]
        assert [distance for kind, distance in sent if kind == dtype][::arrays] == shown
        assert sum(kind == dtype for kind, _ in sent) == arrays * len(shown)
