"""README and documentation: their code runs, their commands and links lead somewhere."""

from __future__ import annotations

import ast
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


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=() if page == README else pytest.mark.slow)
        for page in WITH_CODE
    ],
)
def test_blocks_run_one_after_the_other_and_print_what_they_say(page):
    code = "\n".join(blocks(page, "python"))
    hidden = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_DISABLE", "SLURM")
    env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    env["JAX_PLATFORMS"] = "cpu"
    if page != README:  # Which is somebody's first program, and runs as theirs does.
        # Compiled quickly: what the blocks print does not depend on how fast they are.
        env |= {"JAX_NUM_CPU_DEVICES": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    said = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    # The progress of a run says speeds, which differ each time.
    shown = [line for line in run.stdout.splitlines() if not re.match(r"step \d+/\d+  ", line)]
    assert shown == said


def test_code_is_found():
    """What is not collected is not run."""
    assert {name(page) for page in WITH_CODE} >= {"README.md", "docs/getting-started.md"}
    text = "".join(page.read_text() for page in PAGES)
    opened = re.findall(r"^[ >]*```+ *(?:py|python|Python).*$", text, re.MULTILINE)
    assert len(opened) == sum(len(blocks(page, "python")) for page in PAGES)


def test_readme_fits_on_a_few_screens():
    text = README.read_text()
    assert text.count("\n") <= 150
    end = text.index("```\n", text.index("```python"))
    assert text[:end].count("\n") + 1 <= 40


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


def extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def help_of(program, words, monkeypatch, capsys):
    """What the program, and its subcommand if one is named, says of its options."""
    subcommand = [word for word in words[:1] if re.fullmatch("[a-z]+", word)]
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
            wanted = re.findall(r"[\w]+", target.partition("[")[2])
            assert set(wanted) <= extras()
        case ["python", "-m", "pytest", *rest] | ["pytest", *rest]:
            assert all(list(ROOT.glob(word)) for word in rest if word.startswith("tests/"))
            for option in options:
                request.config.getoption(option)  # ValueError where there is no such option
        case ["python", "-m", module, *rest]:
            text = help_of(module, rest, monkeypatch, capsys)
            assert [option for option in options if not re.search(rf"{option}\b", text)] == []
        case ["python", script, *rest]:
            assert (ROOT / script).is_file()
            text = help_of(script, rest, monkeypatch, capsys)
            assert [option for option in options if not re.search(rf"{option}\b", text)] == []
        case ["git", "clone", *_] | ["cd", _] | ["python3.12", "-m", "venv", _] | [".", _] | []:
            pass
        case _:
            pytest.fail(f"nothing here knows whether this command exists: {words}")


def test_commands_are_found():
    lines = "\n".join(COMMANDS)
    for command in ("make train", "make docs", "burst_jax.plan --length", "benchmarks ring"):
        assert command in lines


# --- links ---------------------------------------------------------------------------------------


def anchors(page):
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    found = set()
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
        # The API's pages are made of docstrings.
        if anchor and file.suffix == ".md" and file.parent.name != "api":
            assert anchor in anchors(file), target
    # Files that are named as code.
    folders = "burst_jax|pallas_kernels|benchmarks|tests|examples|docs|.ci"
    for path in re.findall(rf"`((?:{folders})/[\w./*-]+)`", text):
        assert list(ROOT.glob(path)), path


def test_every_page_is_in_the_contents():
    contents = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs')}\n" in contents, page


# --- what the pages say of the library -----------------------------------------------------------


def literals(tree):
    """Every string of a module as it is shown, ``…`` for what an f-string puts in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_in_troubleshooting_are_the_library_s():
    sources = [
        p for d in ("burst_jax", "pallas_kernels", "benchmarks") for p in (ROOT / d).rglob("*.py")
    ]
    said = [text for path in sources for text in literals(ast.parse(path.read_text()))]
    said += [(ROOT / ".ci" / "find-python").read_text()]
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    own = text[: text.index("## Warnings")]
    messages = re.findall(r"^\| `([^`]+)` \|", own, re.MULTILINE)
    assert len(messages) > 50
    for message in messages:
        parts = [part.strip() for part in message.split("…") if part.strip(" :;")]
        assert any(all(part in text for part in parts) for text in said), message


SENT = re.compile(r":(bf16|f32)\[[^=]* = ppermute\[.*?perm=\(\((\d+), (\d+)\)", re.DOTALL)


def test_the_drawn_schedule_is_the_ring_s():
    """Which block is sent how far, step by step, as the traced gradient does it."""
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
    # K and V, or their gradients, in so many permutes each.
    for dtype, first, arrays in (("bf16", "K", 2), ("f32", "dK", 2)):
        shown = [int(text[-1]) for text in drawn if text.startswith(first)]
        assert [distance for kind, distance in sent if kind == dtype][::arrays] == shown
        assert sum(kind == dtype for kind, _ in sent) == arrays * len(shown)
