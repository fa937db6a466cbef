"""A process that fills a prompt cache in forked children and kills them in the middle; prints one JSON line.

    python kill_while_caching.py BUNDLE CACHE KILLS SEED

Children die at a chosen system call (a write, a sync, a rename, an unlink), before it or after it, or in the
middle of a write, so kills fall between any two steps and not only where the time goes. After each kill a
child that lives says every text; each must be the one without a cache. Half of the rounds have a cache too
small for all texts, so that files are removed as well.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from ondevice.api import load
from tests.support.cached_texts import Said, said, settle
from tests.support.kill_and_resume import count_down, killed

STEPS = ("pwrite", "fdatasync", "replace", "unlink", "utime", "makedirs")
OPTIONS: dict[str, Any] = {"threads": 1, "speculation": "off"}
COUNT = 3


def texts(chance: random.Random) -> list[list[int]]:
    """Prompts that begin alike in part."""
    start = [chance.randrange(3, 250) for _ in range(100)]
    return [[*start[: 50 * at], *(chance.randrange(3, 250) for _ in range(30 + 20 * at))] for at in range(3)]


def says(bundle: Path, prompts: list[list[int]], expected: list[Said], **options: Any) -> int:
    """Say all texts. Returns the tokens restored in all; another text ends the process."""
    restored = 0
    with load(bundle, **OPTIONS, **options) as model:
        for prompt, text in zip(prompts, expected, strict=True):
            found = said(model, prompt, COUNT)
            if found[0] != text:
                os._exit(3)
            restored += found[1]
            settle(model)
    return restored


def one_round(bundle: Path, cache: Path, chance: random.Random) -> tuple[bool, int]:
    """Fill the cache in a child that dies, then say everything again. If it died, and tokens restored."""
    prompts = texts(chance)
    limit = {"prompt_cache": cache, "prompt_cache_bytes": chance.choice((10**9, 250_000))}
    calls, before = chance.randrange(1, 60), chance.random() < 0.5
    reading, writing = os.pipe()

    def plain() -> None:
        with load(bundle, **OPTIONS) as model:
            os.write(writing, json.dumps([said(model, it, COUNT)[0] for it in prompts]).encode())

    def fill() -> None:
        count_down(calls, before, STEPS)
        says(bundle, prompts, expected, **limit)

    def check() -> None:
        os.write(writing, str(says(bundle, prompts, expected, **limit)).encode())

    assert not killed(plain)
    expected: list[Said] = [[(it[0], it[1]) for it in text] for text in json.loads(os.read(reading, 1 << 16))]
    died = killed(fill)
    assert not killed(check)
    restored = int(os.read(reading, 100))
    os.close(reading)
    os.close(writing)
    return died, restored


def main() -> None:
    """Print the number of kills, and of tokens that were restored after them."""
    bundle, cache = Path(sys.argv[1]), Path(sys.argv[2])
    kills, chance = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    done = restored = 0
    while done < kills:
        died, tokens = one_round(bundle, cache, chance)
        done, restored = done + died, restored + tokens
    left = [path.name for path in cache.rglob("*.unfinished") if path.stat().st_size]
    print(json.dumps({"kills": done, "restored_tokens": restored, "left": left}))


if __name__ == "__main__":
    main()
