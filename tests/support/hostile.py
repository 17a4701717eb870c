"""Hostile input: mutations of a valid example by rules, under limits of time and memory.

A table of cases is ``json_cases(valid, keys)`` for JSON with named fields, ``text_cases(valid)``
for a whole file, ``array_cases()`` for a file of numpy.save, and ``special_files()`` for what is at
a path instead of a file. ``check`` runs a case: it must end with an answer, or with an error that
names what it should, within a second of processor time and 256 MB, while everything outside of the
folders that may change stays as it was.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from burst_jax.training import CheckpointError

# A case takes at most a second of CPU time on an idle machine.
SECONDS, MEGABYTES = 2.5, 256
# For what waits. The rest may be delayed: three processes share two cores in CI.
_WAITING_SECONDS = 30.0
# Errors with which a case may end; all have a sentence.
ERRORS = (ValueError, NotImplementedError, FileNotFoundError, CheckpointError)
_PLACE = "\x00here"
_ESCAPE = r"\u001b[31mred\u0007\u202e"
# JSON texts of values, by the name of the rule; None removes the key.
VALUES: dict[str, str | None] = {
    "missing": None,
    "null": "null",
    "true": "true",
    "zero": "0",
    "negative": "-1",
    "fraction": "1.5",
    "huge": "1000000000",
    "huger": "1" + "0" * 30,
    "digits": "1" + "0" * 5000,
    "tiny": "1e-320",
    "nan": "NaN",
    "infinity": "Infinity",
    "overflow": "1e999",
    "minus-infinity": "-Infinity",
    "text": '"seven"',
    "escapes": f'"{_ESCAPE}"',
    "long": f'"{"x" * 20_000}"',
    "surrogate": r'"\ud800"',
    "list": "[1]",
    "empty": "[]",
    "object": '{"a": 1}',
    "deep-list": "[" * 5000 + "]" * 5000,
    "deep-object": '{"a":' * 900 + "1" + "}" * 900,
}
# Whatever the key means, such a value never is valid.
NEVER = frozenset(
    ("nan", "infinity", "overflow", "minus-infinity", "digits", "deep-list", "deep-object")
)
INTEGERS = NEVER | {
    *("true", "zero", "negative", "fraction", "huger", "tiny", "text", "escapes", "long"),
    *("surrogate", "list", "empty", "object"),
}
NUMBERS = INTEGERS - {"fraction", "huger"}
# Errors of the whole text, which cannot name a key.
_WHOLE_TEXT = frozenset(("digits", "deep-list", "deep-object"))


class _Hangs(BaseException):
    """No Exception, which the code under test may catch."""


class Case(NamedTuple):
    """One case.

    Attributes:
      name: for the report.
      content: of the file.
      names: what an error must name, next to the file: one of each tuple.
      rejected: whether an error is required.
    """

    name: str
    content: bytes
    names: tuple[tuple[str, ...], ...] = ()
    rejected: bool = False


def json_cases(
    valid: Mapping[str, Any],
    rejected: Mapping[str, Iterable[str]],
    also: Mapping[str, Iterable[str]] | None = None,
) -> Iterator[Case]:
    """Each field x each rule of :data:`VALUES`.

    Args:
      valid: an object that is accepted.
      rejected: path of a field, like ``"rope_scaling.factor"`` (list indices are numbers), to the
        rules whose values must raise, like :data:`INTEGERS`; others may raise.
      also: path of a field to other names by which an error may name it.
    """
    for path, rules in rejected.items():
        key = path.rpartition(".")[2]
        aliases = (key, *(also or {}).get(path, ()))
        for rule, text in VALUES.items():
            content = json.dumps(_with(valid, path.split("."), text is None))
            content = content.replace(json.dumps(_PLACE), text or "")
            names = () if rule in _WHOLE_TEXT else (aliases,)
            yield Case(f"{path}={rule}", content.encode(), names, rule in set(rules))


def _with(value: Any, path: list[str], remove: bool) -> Any:
    """A copy of nested dicts and lists without the value at ``path``, or with :data:`_PLACE`."""
    first, *rest = path
    copied: Any = value.copy()
    where: Any = int(first) if isinstance(value, list) else first
    if rest:
        copied[where] = _with(copied[where], rest, remove)
    elif not remove:
        copied[where] = _PLACE
    elif isinstance(copied, list) or where in copied:
        del copied[where]
    return copied


def text_cases(valid: bytes) -> Iterator[Case]:
    """What a whole file of JSON may be instead, all rejected."""
    twice = b'{"a": 1, "a": 2, ' + valid.lstrip()[1:]
    for name, content in {
        "empty": b"",
        "half": valid[: len(valid) // 2],
        "more": valid + b"{}",
        "zeros": bytes(1000),
        "not UTF-8": b"\xff\xfe" + valid,
        "byte order mark": b"\xef\xbb\xbf" + valid,
        "UTF-16": valid.decode().encode("utf-16"),
        "a key twice": twice,
        "null": b"null",
        "list": b"[]",
        "number": b"7",
        "text": b'"text"',
        "escapes": f'"{_ESCAPE}"'.encode(),
        "digits": b"1" * 5000,
        "deep lists": b"[" * 100_000,
        "deep objects": b'{"a":' * 100_000,
        "closed lists": b"[" * 5000 + b"]" * 5000,
        "long": b'"' + b"x" * 5_000_000 + b'"',
    }.items():
        yield Case(name, content, (), True)


_HEADER = "{'descr': '<i4', 'fortran_order': False, 'shape': %s}"
_SHAPES = [
    *("(4,)", "(-1,)", "(2, -1)", "(10**30,)", "(1000000000000,)", "(1.5,)", "('a',)", "(None,)"),
    *("3", "None", "(True,)", "(0, 5)", "(2**31, 2**31, 2**31)", "(((1,),),)", "(3,) * 10**9"),
    *("(" * 90 + ")" * 90, "(3,), 'shape': (9,)", "(3,", "__import__('os').system('true')"),
]
_HEADERS = [
    *(_HEADER % shape for shape in _SHAPES),
    *(
        _HEADER.replace("<i4", descr) % "(3,)"
        for descr in ("|O", "<f8", "<U9", "x", "<i9999", "<i4,<i4")
    ),
    *("", "[]", "{}", "{" * 1000, "\xff" * 50, "\x1b[31mred", "{'descr': []}", "x" * 60_000),
    *("[" * 3000, _HEADER % "(3,)" + "\0"),
]


def array_cases() -> Iterator[Case]:
    """What a file of numpy.save with 12 bytes of numbers may be instead, all rejected."""
    for header in _HEADERS:
        text = header.encode("latin-1") + b"\n"
        start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text))
        yield Case(header[:60], start + text + bytes(12), (), True)
    several = io.BytesIO()
    np.savez(several, np.arange(3), np.arange(3))
    archive = several.getvalue()
    for content in (
        b"", b"\x93", b"PK\x03\x04" + bytes(60), b"PK\x05\x06" + bytes(18), archive, archive[:-30],
        b"no array", b"\x80\x04K\x01.",
    ):  # fmt: skip
        yield Case(repr(content[:60]), content, (), True)


def saved(array: np.ndarray) -> bytes:
    """The file that numpy.save writes."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@contextlib.contextmanager
def special_files(path: Path) -> Iterator[Iterator[str]]:
    """Yields an iterator; at each of its names something else than a file is at ``path``."""

    def put() -> Iterator[str]:
        for name, make in {
            "pipe": os.mkfifo,
            "device": lambda path: path.symlink_to("/dev/zero"),
            "folder": Path.mkdir,
            "loop of links": lambda path: path.symlink_to(path),
            "broken link": lambda path: path.symlink_to(path.with_name("nowhere")),
        }.items():
            make(path)
            yield name
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    content = path.read_bytes()
    path.unlink()
    try:
        yield put()
    finally:
        path.write_bytes(content)


def check(
    case: str,
    call: Callable[[], Any],
    names: Iterable[str | tuple[str, ...]] = (),
    *,
    rejected: bool = False,
) -> str | None:
    """Runs a case; returns what is wrong with its end, or None.

    Args:
      case: its name.
      call: what is done with the input.
      names: what the message of an error must contain; of a tuple, one of its strings.
      rejected: whether it must raise.
    """
    before, start = _reset_peak(), time.process_time()
    try:
        with _alarm(_WAITING_SECONDS), _no_collection():
            call()
    except ERRORS as error:
        message = str(error)
        wanted = [(name,) if isinstance(name, str) else name for name in names]
        missing = [each for each in wanted if not any(name in message for name in each)]
        if missing:
            return f"{case}: {type(error).__name__} without {missing}: {message[:300]!r}"
        if not all(character.isprintable() or character == "\n" for character in message):
            return f"{case}: an unprintable message, {message[:300]!r}"
        if len(message) > 3000:
            return f"{case}: a message of {len(message)} characters, {message[:300]!r}"
    except _Hangs:
        return f"{case}: it hangs"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{case}: {type(error).__name__}: {str(error)[:300]!r}"
    else:
        if rejected:
            return f"{case}: it is accepted"
    if (seconds := time.process_time() - start) > SECONDS:
        return f"{case}: took {seconds:.1f} s"
    if (used := _peak() - before) > MEGABYTES:
        return f"{case}: took {used:.0f} MB"
    return None


def check_all(results: Iterable[str | None], at_least: int) -> None:
    """Raises AssertionError with all that is wrong; ``at_least`` guards against an empty table."""
    found = list(results)
    wrong = [line for line in found if line is not None]
    assert not wrong, f"{len(wrong)} of {len(found)} cases:\n" + "\n".join(wrong)
    assert len(found) >= at_least, f"{len(found)} cases"


def tree(folder: Path) -> dict[str, Any]:
    """All that is in a folder: names, contents, links."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        else:
            found[name] = path.read_bytes() if path.is_file() else "no file"
    return found


@contextlib.contextmanager
def unchanged(folder: Path, *but: Path) -> Iterator[None]:
    """Asserts that all in ``folder``, but what is in the paths ``but``, is as it was."""

    def found() -> dict[str, Any]:
        left_out = [str(path.relative_to(folder)) for path in but]
        return {
            name: content
            for name, content in tree(folder).items()
            if not any(name == path or name.startswith(path + "/") for path in left_out)
        }

    before = found()
    yield
    assert found() == before


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises _Hangs in the main thread after some seconds, also out of a blocking call."""

    def ring(*_: Any) -> None:
        raise _Hangs

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A collection visits what all tests of the process left: seconds that are not the case's."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _reset_peak() -> float:
    """Forgets the largest memory of this process so far, where Linux can; returns the current."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    """The largest resident memory since then, in MB; 0 where it is unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM")), 0.0)
