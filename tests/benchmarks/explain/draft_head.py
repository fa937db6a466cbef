"""What a draft head covers of real text, and what a product with it takes beside one with the whole head.

Coverage: tokens of documents of each kind are counted, as training does; the head has the k most frequent,
and its share of the tokens of held-out documents is printed by kind, under a vocabulary of 32,000 entries
(Llama 2's) and one of 151,643 (Qwen's). The head of a row is counted on all kinds together (`mixed`), or on
that kind alone (`own`). Draft tokens of a model are likelier to be among the frequent ones than a text's.

Times: our kernels' product at 4 bits, 4,096 wide, of k rows and of all, for the rows of one token and of four
streams; medians of interleaved rounds, with the caches emptied of weights before each product. The machine
should do nothing else. Ends with one JSON line; exits 0.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ondevice.backends.base import Float32
from ondevice.backends.cpu import make_runner
from ondevice.config import GROUP_SIZE, TRAIN_TOKENS
from ondevice.converters.training.token_counts import count_tokens
from ondevice.kernels import _native
from ondevice.tokenizer import load_tokenizer
from ondevice.units import usable_cores
from tests.benchmarks.lib.held_out_prompts import DOMAINS
from tests.benchmarks.lib.measure import machine, note
from tests.support.paths import SHARED_DATA, SHIPPED

SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
WIDTH, BITS = 4096, 4
INPUT_ROWS = (1, 4)
EVICTED_BYTES = 256 << 20
"""Bytes that are read before a product, so that no cache has its weights."""
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Qwen's pattern of the pieces that are tokenized one by one."""

Encode = Callable[[str], Sequence[int]]


def llama(data: Path) -> tuple[Encode, int]:
    """Llama 2's tokenizer, and the size of its vocabulary."""
    file = data / "tokenizers" / "llama2" / "tokenizer.model"
    return load_tokenizer("sentencepiece", file.read_bytes(), 1, (2,), add_bos=False).encode, 32_000


def qwen(data: Path) -> tuple[Encode, int]:
    """Qwen's tokenizer, made from its byte-pair ranks, and the size of its vocabulary."""
    lines = (data / "tokenizers" / "qwen" / "qwen.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    letters = _byte_letters()

    def spelt(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [merged(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    vocab = {spelt(token): rank for token, rank in ranks.items()}
    pairs = [(spelt(left), spelt(right)) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return lambda text: tokenizer.encode(text).ids, len(ranks)


def merged(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that byte pairs of lower rank make of `token`, and that it is merged from."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def documents(data: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """(kind, documents to count, held-out documents), both in random order, always the same one."""
    sys.path.insert(0, str(SHIPPED))
    from recipe.data import split_documents

    for kind, domain in DOMAINS.items():
        halves = []
        for part in split_documents(data, domain):
            order = np.random.default_rng(24).permutation(len(part))
            halves.append(["\n".join(text for _, text in part[index]) for index in order.tolist()])
        yield kind, halves[0], halves[1]
    lines = (data / "corpus" / "wikitext2" / "valid.txt").read_text().splitlines()
    yield "wikitext", lines[: len(lines) // 2], lines[len(lines) // 2 :]


def encoded(encode: Encode, texts: Sequence[str], most: int) -> list[int]:
    """The first `most` tokens of the texts."""
    found: list[int] = []
    for text in texts:
        if len(found) >= most:
            break
        found += encode(text)
    return found[:most]


def coverage(
    encode: Encode, vocab_size: int, kinds: Sequence[tuple[str, list[str], list[str]]], tokens: int, held: int
) -> list[dict[str, Any]]:
    """Shares of held-out tokens by kind, for heads counted on `tokens` tokens. held: tokens of each kind."""
    counted = {kind: encoded(encode, texts, tokens) for kind, texts, _ in kinds}
    mixed = [ids[: tokens // len(kinds)] for ids in counted.values()]
    rows = []
    for kind, _, texts in kinds:
        ids = np.array(encoded(encode, texts, held))
        for name, pieces in (("mixed", mixed), ("own", [counted[kind]])):
            counts = count_tokens(pieces)
            shares = {
                str(size): float(np.isin(ids, counts.most_frequent(size, vocab_size)).mean())
                for size in SIZES
                if size < vocab_size
            }
            row = {"kind": kind, "counted": name, "tokens": sum(map(len, pieces))}
            rows.append(row | {"distinct": len(counts.tokens), "held_out": len(ids), "shares": shares})
    return rows


def random_matrix(runner: _native.Runner, rows: int) -> _native.Matrix:
    """A head of `rows` rows: random codes, scales of one size."""
    rng, matrix = np.random.default_rng(0), _native.Matrix(rows, WIDTH, BITS)
    for row0 in range(0, rows, 4096):
        count = min(4096, rows - row0)
        codes = rng.integers(0, 256, (count, WIDTH * BITS // 8), np.uint8)
        scales = np.full((count, WIDTH // GROUP_SIZE), 0.01, np.float16).view(np.uint8)
        matrix.load_rows(runner, row0, codes, scales, scales)
    return matrix


def times(vocab_size: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Median milliseconds of the product of k rows and of all, by rows of input."""
    runner = make_runner(threads)
    sizes = [*(size for size in SIZES if size < vocab_size), vocab_size]
    matrices = {size: random_matrix(runner, size) for size in sizes}
    evicting = np.ones(EVICTED_BYTES // 8)
    taken: dict[tuple[int, int], list[float]] = {(size, n): [] for size in sizes for n in INPUT_ROWS}
    inputs: dict[int, Float32] = {
        n: np.random.default_rng(1).standard_normal((n, WIDTH), np.float32) for n in INPUT_ROWS
    }
    for turn in range(rounds + 1):
        for (size, n), seconds in taken.items():
            out = np.empty((n, size), np.float32)
            evicting.sum()
            started = time.perf_counter()
            matrices[size].forward(runner, inputs[n], None, out)
            if turn:
                seconds.append(time.perf_counter() - started)
    return [
        {"rows": size, "input_rows": n, "milliseconds": 1e3 * statistics.median(seconds)}
        for (size, n), seconds in taken.items()
    ]


def show(name: str, vocab_size: int, rows: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]]) -> None:
    sizes = [size for size in SIZES if size < vocab_size]
    print(f"\n{name}, {vocab_size:,} entries\n")
    print(
        "| held-out text | counted on | distinct | " + " | ".join(f"{size:,}" for size in sizes) + " | all |"
    )
    print("|---" * (len(sizes) + 4) + "|")
    for row in rows:
        shares = " | ".join(f"{100 * row['shares'][str(size)]:.1f} %" for size in sizes)
        print(f"| {row['kind']} | {row['counted']}, {row['tokens']:,} | {row['distinct']:,} | {shares} | |")
    for n in INPUT_ROWS:
        found = [f"{row['milliseconds']:.2f} ms" for row in timed if row["input_rows"] == n]
        if found:
            print(f"| product of {n} | | | " + " | ".join(found) + " |")


def main() -> int:
    """Print both tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=SHARED_DATA)
    parser.add_argument("--tokens", type=int, default=TRAIN_TOKENS, help="tokens that are counted")
    parser.add_argument("--held", type=int, default=40_000, help="held-out tokens of each kind, at most")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=15, help="of each product; 0: no times")
    args = parser.parse_args()
    if not args.data.is_dir():
        raise SystemExit(f"texts and tokenizers are read from {args.data}, which isn't there")
    note("texts")
    kinds = list(documents(args.data))
    line: dict[str, Any] = {"benchmark": "draft_head", "machine": machine(), "vocabularies": {}}
    for name, made in (("llama2", llama), ("qwen", qwen)):
        note(f"{name}: coverage")
        encode, vocab_size = made(args.data)
        rows = coverage(encode, vocab_size, kinds, args.tokens, args.held)
        note(f"{name}: products")
        timed = times(vocab_size, args.threads, args.rounds) if args.rounds else []
        show(name, vocab_size, rows, timed)
        line["vocabularies"][name] = {"entries": vocab_size, "coverage": rows, "times": timed}
    line |= {"width": WIDTH, "bits": BITS, "threads": args.threads, "rounds": args.rounds}
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
