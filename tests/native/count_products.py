"""Instructions per 1,000 multiplications of bytes, by format, target and tokens: NEON's and i8mm's.

    python tests/native/count_products.py PROGRAM EMULATOR [ARGUMENT ...]

PROGRAM is `product_rates` for aarch64, EMULATOR QEMU's user emulator. For machines without such a processor:
how long an instruction takes is not in it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

ROWS, COLS = 16, 1536
"""A tile, and the columns of product_rates."""
TOKENS = (1, 4, 64)
TARGET = re.compile(r"ondevice\d(neon|i8mm)")


def counts(command: list[str], tokens: int) -> dict[str, Counter[str]]:
    """Instructions of each target in each format's products with `tokens` tokens.

    Packing of activations doesn't count.
    """
    traced = [*command[1:], "-singlestep", "-d", "nochain,exec", "-D", "/dev/stdout"]
    program = [*traced, command[0], str(tokens), str(ROWS), "1"]
    by_format: dict[str, Counter[str]] = {}
    executed: Counter[str] = Counter()
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, errors="replace") as emulator:
        assert emulator.stdout is not None
        for line in emulator.stdout:
            if not line.startswith("Trace "):
                # The line that product_rates prints after a format.
                by_format[re.split(r"\s\s+", line)[0]], executed = executed, Counter()
                continue
            symbol = line.rpartition(" ")[2]
            target = TARGET.search(symbol)
            if target and "quantize_activations" not in symbol:
                executed[target[1]] += 1
    if emulator.returncode or not by_format:
        raise SystemExit(f"{' '.join(program)} ended with {emulator.returncode}")
    return by_format


def main() -> None:
    print("instructions per 1,000 products, for " + " / ".join(map(str, TOKENS)) + " tokens")
    per_tokens = {tokens: counts(sys.argv[1:], tokens) for tokens in TOKENS}
    for name, targets in per_tokens[TOKENS[0]].items():
        cells = []
        for target in sorted(targets, reverse=True):
            executed = ((tokens, per_tokens[tokens][name][target]) for tokens in TOKENS)
            numbers = (f"{1000 * count / (tokens * ROWS * COLS):.0f}" for tokens, count in executed)
            cells.append(f"{target} " + " / ".join(numbers))
        print(f"{name:13}", "   ".join(cells))


if __name__ == "__main__":
    main()
