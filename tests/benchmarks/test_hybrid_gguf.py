"""The dense hybrid that is compared with llama.cpp, small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ondevice.converters.convert import convert
from tests.benchmarks.lib.hybrid_gguf import HYBRID_4B, hybrid_file
from tests.support.engines import all_logits, running

pytest.importorskip("gguf")

SMALL = HYBRID_4B | {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "layer_types": HYBRID_4B["layer_types"][:4],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 512,
}


def test_it_converts_and_its_text_is_alive(tmp_path: Path) -> None:
    path = hybrid_file(SMALL, tmp_path)
    with running(convert(path, tmp_path / "bundle")) as model:
        kinds = [layer.delta is not None for layer in model.config.layers]
        logits = all_logits(model, [3, 4, 5, 6], 32)
    assert kinds == [True, True, True, False]
    assert model.config.tie_embeddings
    assert np.isfinite(logits).all()
    assert np.ptp(logits, axis=1).min() > 0.1
    assert not np.allclose(logits[0], logits[3])
