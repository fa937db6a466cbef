"""What the real Qwen2.5-Coder writes between two texts."""

from __future__ import annotations

from pathlib import Path

import pytest

import ondevice
from tests.support.bundles import convert_bundle
from tests.support.real_models import real_model

CASES = (
    ("def add(a, b):\n    return ", "\n\n\nprint(add(1, 2))\n", "a + b"),
    ("def is_even(n):\n    return n % 2 ", " 0\n", "=="),
    ("import ", "\n\nprint(math.sqrt(16))\n", "math"),
    (
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ",
        "\n",
        "fibonacci(n - 2)",
    ),
    ("total = 0\nfor number in [1, 2, 3]:\n    total ", " number\nprint(total)\n", "+="),
    ("class Point:\n    def __init__(self, x, y):\n        self.x = x\n        ", "\n", "self.y = y"),
    ("with open('data.txt') ", " file:\n    text = file.read()\n", "as"),
    ("def square(x):\n    return ", "\n\n\nassert square(4) == 16\n", "x *"),
    ("try:\n    value = int(text)\n", " ValueError:\n    value = 0\n", "except"),
    ("function square(x) {\n  return ", ";\n}\n\nconsole.log(square(4)); // 16\n", "x * x"),
)
"""Texts before and behind a gap, and how what belongs there begins."""


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_it_writes_what_belongs_between(name: str, tmp_path: Path) -> None:
    bundle = convert_bundle(real_model(name), tmp_path / name, "auto")
    with ondevice.load(bundle) as model:
        written = [model.generate(before, suffix=behind, max_tokens=8).text for before, behind, _ in CASES]
    expected = [begins for *_, begins in CASES]
    fits = [text.startswith(begins) for text, begins in zip(written, expected, strict=True)]
    assert all(fits), list(zip(written, expected, strict=True))
