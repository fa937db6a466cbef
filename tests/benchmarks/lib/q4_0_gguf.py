"""A Llama-shaped GGUF file in Q4_0 with random codes, written a tensor at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.benchmarks.lib.random_model import Shape

VOCABULARY = 32000


def q4_0_file(shape: Shape, workdir: Path, layers: int) -> Path:
    """The file, `layers` layers deep, re-used when present. It has no tokenizer. Needs the `gguf` package."""
    import gguf

    path = workdir / f"{shape.name}-{layers}-q4_0.gguf"
    if path.is_file():
        return path
    workdir.mkdir(parents=True, exist_ok=True)
    hidden, neurons = shape.hidden_size, shape.intermediate_size
    writer = gguf.GGUFWriter(path.with_suffix(".partial"), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(neurons)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // shape.num_heads)
    writer.add_vocab_size(VOCABULARY)
    matrices = {name: (hidden, hidden) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    matrices |= {"ffn_gate": (neurons, hidden), "ffn_up": (neurons, hidden), "ffn_down": (hidden, neurons)}
    found = {"token_embd": (VOCABULARY, hidden), "output": (VOCABULARY, hidden)}
    found |= {f"blk.{layer}.{name}": size for layer in range(layers) for name, size in matrices.items()}
    norms = [
        "output_norm",
        *(f"blk.{layer}.{name}_norm" for layer in range(layers) for name in ("attn", "ffn")),
    ]
    quant = gguf.GGMLQuantizationType.Q4_0
    for name, (rows, cols) in found.items():
        nbytes = rows * cols // 32 * 18
        writer.add_tensor_info(f"{name}.weight", (rows, cols // 32 * 18), np.dtype(np.uint8), nbytes, quant)
    for name in norms:
        writer.add_tensor_info(f"{name}.weight", (hidden,), np.dtype(np.float32), 4 * hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for rows, cols in found.values():
        blocks = rng.integers(0, 256, (rows * cols // 32, 18), dtype=np.uint8)
        blocks[:, :2] = rng.uniform(0.002, 0.008, len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
        writer.write_tensor_data(blocks.reshape(rows, -1))
    for _ in norms:
        writer.write_tensor_data(np.ones(hidden, dtype=np.float32))
    writer.close()
    path.with_suffix(".partial").rename(path)
    return path
