"""Real text for prompts: documentation that every Python carries. Deterministic, no network, no files."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import difflib
import functools
import heapq
import importlib
import inspect
import io
import random
import re
import statistics
import string
import textwrap
import threading

_SOURCES: tuple[object, ...] = (
    difflib.SequenceMatcher,
    argparse,
    statistics,
    random,
    threading.Condition,
    string.Template,
    textwrap.TextWrapper,
    re,
)

QUESTIONS = (
    "Question: what does the text above say about order, and where does it contradict itself?\nAnswer:",
    "Question: name the three main claims of the passage in one sentence each.\nAnswer:",
    "Question: which sentence would you show to a beginner, and why?\nAnswer:",
    "Question: what is left unsaid about the cost of each operation?\nAnswer:",
    "Question: rewrite the first paragraph for somebody in a hurry.\nAnswer:",
    "Question: list every name that is defined but never explained.\nAnswer:",
)


@functools.cache
def library() -> str:
    """All the text there is, some tens of thousands of characters, paragraphs in a fixed order."""
    pieces = [_zen(), heapq.__about__]
    pieces += [inspect.getdoc(source) or "" for source in _SOURCES]
    return "\n\n".join(piece.strip() for piece in pieces if piece)


def passage(nbytes: int, start: int = 0) -> str:
    """`nbytes` ASCII characters (= bytes = tokens) of the library from `start` on, wrapping around at its end."""
    text = library().encode("ascii", "ignore")
    start %= len(text)
    whole = text[start:] + text * (nbytes // len(text) + 1)
    return whole[:nbytes].decode("ascii")


def _zen() -> str:
    """The Zen of Python, without printing it twice: importing `this` prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        encoded: str = importlib.import_module("this").s
    return str(codecs.decode(encoded, "rot13"))
