"""Which known names a mistyped one resembles, word by word: ``--num-device`` and ``--devices``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

MIN_SCORE = 0.55
MIN_WORD_RATIO = 0.75
MIN_TEXT_RATIO = 0.8
MAX_NAMES = 3
_SYNONYMS = {
    word: meaning
    for meaning, words in {
        "devices": (
            "gpu gpus ngpu ngpus npu npus nproc nprocs proc procs process processes worker workers"
            " task tasks ntasks"
        ),
        "nodes": "machine machines nnode",
        "hosts": "host",
        "timeout": "wait",
        "python": "interpreter",
        "threads": "omp thread",
        "env": "environment variable",
        "restarts": "retries retry",
        "log": "logs output",
        "dir": "folder directory path",
    }.items()
    for word in words.split()
}
"""Words of other launchers' options -> the word of pdrun's."""


def similar_names(typed: str, known: Iterable[str]) -> list[str]:
    """Return the known names that resemble ``typed`` most, the best first; at most three."""
    scored = [(_score(typed, name), _text_ratio(typed, name), name) for name in known]
    best = max(scored, default=(0.0, 0.0, ""))
    if best[0] < MIN_SCORE:
        return []
    near = sorted((row for row in scored if row[0] > best[0] - 0.01), reverse=True)
    return [name for _, _, name in near][:MAX_NAMES]


def _score(typed: str, name: str) -> float:
    """Return how well the words of two names fit, 0 to 1."""
    words = _split_name(typed)
    known = _split_name(name)
    if not words or not known:
        return 0.0
    found = sum(max(_word_ratio(word, other) for other in known) for word in words) / len(words)
    used = sum(max(_word_ratio(word, other) for word in words) for other in known) / len(known)
    ratio = _text_ratio(typed, name)
    return max(0.7 * found + 0.3 * used, ratio if ratio >= MIN_TEXT_RATIO else 0.0)


def _split_name(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.]+", name.lower()) if word]


def _word_ratio(typed: str, known: str) -> float:
    if typed == known:
        return 1.0
    if _SYNONYMS.get(typed) == known or (len(typed) > 2 and known.startswith(typed)):
        return 0.9
    ratio = SequenceMatcher(None, typed, known).ratio()
    return ratio if ratio >= MIN_WORD_RATIO else 0.0


def _text_ratio(typed: str, name: str) -> float:
    one = "".join(_split_name(typed))
    other = "".join(_split_name(name))
    return SequenceMatcher(None, one, other).ratio()
