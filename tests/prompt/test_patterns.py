from __future__ import annotations

import pytest
from tokenizers import Regex

from vlmserve.prompt.gguf import PRE_TOKENIZERS
from vlmserve.prompt.patterns import PatternError, check_pattern

PUBLISHED = {
    **{name: kind.split for name, kind in PRE_TOKENIZERS.items() if kind.split},
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "GPT-4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s",
    "DeepSeek-V3": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Kimi-K2": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}&&[^\p{Han}]]*[\p{Ll}\p{Lo}&&[^\p{Han}]]+(?i:'s|'t)?|\s+",
    "EXAONE": r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+",
    "SuperBPE": r"(?=(\d{3})+(?!\d))",
    "Aya": r"\d{1,3}(?=(?:\d{3})*\b)",
    "BLOOM": " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
    "Falcon": r"[\p{P}\$\+<=>\^~\|`]+",
    "Chameleon": r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "CLIP": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "T5": " {2,}",
    "SeamlessM4T": r"^▁+$",
    "Gemma 4": r"[^\n]+|[\n]+",
}
SLOW = [
    "(a+)+b",
    "(a|a)*b",
    "(?i:(a|A)*b)",
    r"(\w+\s?)+$",
    "a*a*[xy]",
    "(?=(a*a*[xy]))a",
    "(?=(a+)+b)",
    "(?=a*)a*b(?=a*a*c)",
    "(?<=a+)b",
    "a*(?i)b|a*c",
    "(?:a?){30}a{30}",
    "a?" * 30 + "a" * 30,
    "a{0,5000}a{0,5000}b",
    "a{5000,0}a{5000,0}b",
    "(?:a{1,3})+b",
    "a{1,3}+b",
    "(?:a*b|a)*c",
    "(?:(?:a+)?)+b",
]
UNREADABLE = {
    r"(a)\1*b": "\\1",
    r"(?<x>a\g<x>*)b": "\\g",
    "(?(1)a|b)": "unknown kind",
    "(?~a)": "unknown kind",
    "(?x:a #)": "unknown kind",
    "(a": "without a )",
    "a)": "without a (",
    "[a": "without a ]",
    "*a": "repeat of nothing",
    "((a{100}){100}){100}": "10,000 characters",
    "(" * 30 + "a" + ")" * 30: "20 deep",
    "[" * 30 + "a" + "]" * 30: "20 deep",
    " " * 10_001: "10,001 characters",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_patterns_pass(name: str) -> None:
    Regex(PUBLISHED[name])
    check_pattern(PUBLISHED[name])


@pytest.mark.parametrize("pattern", SLOW)
def test_slow_patterns_are_rejected(pattern: str) -> None:
    with pytest.raises(PatternError, match=r"repeat|look"):
        check_pattern(pattern)


@pytest.mark.parametrize("pattern", UNREADABLE)
def test_unreadable_patterns_are_rejected(pattern: str) -> None:
    with pytest.raises(PatternError) as caught:
        check_pattern(pattern)
    assert UNREADABLE[pattern] in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a+", True),
        (r"\s{2,}|[\r\n]", True),
        ("(?=a)", False),
        ("^", False),
        ("a*", False),
        ("a|", False),
        ("a?b", True),
    ],
)
def test_empty_matches_are_known(pattern: str, expected: bool) -> None:
    assert check_pattern(pattern) is expected
