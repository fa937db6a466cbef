"""Which of MLX's operations give a row the same bits whatever lies beside it, and what zeros change.

On MLX's default device. Rows: each row of a batch of 2 to 64 against the row by itself; of attention, the
last query with others before it, and the first with keys behind it that it may not see. Zeros: the product of
a down projection over all neurons, most of whose inputs are zero, against the product of the others alone, in
the same order, which is what skipping neurons does. Padding: more rows of zeros behind those. Ends with one
JSON line.

    python -m tests.benchmarks.explain.mlx_invariance [--device cpu|gpu]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from tests.benchmarks.lib.measure import machine

BATCHES = (2, 3, 4, 8, 16, 64)
WIDTH, NEURONS, HEADS, HEAD, CONTEXT = 256, 704, 8, 32, 300
GROUP = 64


def rows_invariant(op: Callable[[Any], Any], x: Any) -> list[int]:
    """The batches of x whose rows have the bits that they have alone."""
    alone = np.concatenate([np.array(op(x[i : i + 1])) for i in range(max(BATCHES))])
    return [n for n in BATCHES if np.array_equal(np.array(op(x[:n])), alone[:n])]


def products(rng: np.random.Generator, dtype: mx.Dtype) -> dict[str, list[int]]:
    x = mx.array(rng.standard_normal((max(BATCHES), WIDTH)).astype(np.float32)).astype(dtype)
    weight = mx.array(rng.standard_normal((NEURONS, WIDTH)).astype(np.float32)).astype(dtype)
    found = {"matmul": rows_invariant(lambda it: it @ weight.T, x)}
    for bits in (4, 8):
        packed = mx.quantize(weight, group_size=GROUP, bits=bits)
        options = {"group_size": GROUP, "bits": bits}
        hidden = mx.array(rng.standard_normal((max(BATCHES), NEURONS)).astype(np.float32)).astype(dtype)

        def by_rows(it: Any, packed: Any = packed, options: Any = options) -> Any:
            return mx.quantized_matmul(it, *packed, transpose=True, **options)

        def by_columns(it: Any, packed: Any = packed, options: Any = options) -> Any:
            return mx.quantized_matmul(it, *packed, transpose=False, **options)

        found[f"quantized_matmul q{bits}, rows"] = rows_invariant(by_rows, x)
        found[f"quantized_matmul q{bits}, columns"] = rows_invariant(by_columns, hidden)
    norm = mx.ones((WIDTH,))
    found["rms_norm"] = rows_invariant(lambda it: mx.fast.rms_norm(it, norm, 1e-5), x)
    found["sigmoid"] = rows_invariant(mx.sigmoid, x)
    return found


def skipping(rng: np.random.Generator, dtype: mx.Dtype) -> dict[str, bool]:
    """Whether a sum over neurons has the same bits without those whose input is zero, and with padding."""
    weight = mx.array(rng.standard_normal((NEURONS, WIDTH)).astype(np.float32)).astype(dtype)
    hidden = rng.standard_normal((1, NEURONS)).astype(np.float32)
    hidden[:, rng.random(NEURONS) < 0.8] = 0
    kept = mx.array(np.flatnonzero(hidden[0]))
    found = {}
    for bits in (4, 8):
        packed = mx.quantize(weight, group_size=GROUP, bits=bits)

        def product(h: Any, parts: Any, bits: int = bits) -> Any:
            return np.array(
                mx.quantized_matmul(h.astype(dtype), *parts, transpose=False, group_size=GROUP, bits=bits)
            )

        full = product(mx.array(hidden), packed)
        short = mx.array(hidden)[:, kept]
        rows = [part[kept] for part in packed]
        found[f"zeros q{bits}"] = bool((product(short, rows) == full).all())
        more = GROUP - len(kept) % GROUP
        padded = [mx.pad(part, [(0, more), (0, 0)]) for part in rows]
        found[f"padding q{bits}"] = bool((product(mx.pad(short, [(0, 0), (0, more)]), padded) == full).all())
    return found


def attention(rng: np.random.Generator, dtype: mx.Dtype) -> dict[str, list[int]]:
    """How many queries before it, and keys that it may not see, leave one query's bits as they are."""
    q, k, v = (
        mx.array(rng.standard_normal((1, HEADS, n, HEAD)).astype(np.float32)).astype(dtype)
        for n in (max(BATCHES), CONTEXT, CONTEXT)
    )

    def last(queries: int) -> Any:
        places = np.arange(CONTEXT - queries, CONTEXT)[:, None]
        mask = mx.array(np.arange(CONTEXT)[None, :] <= places)
        found = mx.fast.scaled_dot_product_attention(
            q[:, :, max(BATCHES) - queries :], k, v, scale=HEAD**-0.5, mask=mask
        )
        return np.array(found[:, :, -1])

    def first(hidden_keys: int) -> Any:
        seen = CONTEXT - max(BATCHES) + hidden_keys
        mask = mx.array(np.arange(seen)[None, :] < CONTEXT - max(BATCHES))
        found = mx.fast.scaled_dot_product_attention(
            q[:, :, :1], k[:, :, :seen], v[:, :, :seen], scale=HEAD**-0.5, mask=mask
        )
        return np.array(found)

    return {
        "attention, queries before": [n for n in BATCHES if np.array_equal(last(n), last(1))],
        "attention, hidden keys behind": [n for n in BATCHES if np.array_equal(first(n), first(0))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default=mx.default_device().type.name)
    args = parser.parse_args()
    mx.set_default_device(mx.Device(getattr(mx.DeviceType, args.device)))
    found: dict[str, Any] = {}
    for dtype, name in ((mx.float32, "float32"), (mx.float16, "float16")):
        rng = np.random.default_rng(0)
        kinds: dict[str, Any] = products(rng, dtype) | attention(rng, dtype)
        found[name] = {"rows": kinds, "skipping": skipping(rng, dtype)}
        print(f"\n{name} on the {args.device}\n\n| operation | equal bits in batches of |\n|---|---|")
        for op, batches in kinds.items():
            every = "all" if batches == list(BATCHES) else ", ".join(map(str, batches)) or "none"
            print(f"| {op} | {every} |")
        for op, same in found[name]["skipping"].items():
            print(f"| {op} | {'equal' if same else 'others'} |")
    print(json.dumps({"machine": machine(), "mlx": mx.__version__, "device": args.device, "found": found}))


if __name__ == "__main__":
    main()
