"""The plan of draft layers with experts and latent attention, and of layers that draft blocks, against what
loading and running them takes.
"""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.backends.kv_layout import KVLayout
from ondevice.budget.draft_layers import draft_layer_bytes, loaded_bytes
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.converters.draft_layers.dflash import convert_dflash
from ondevice.flash.reader import FlashReader
from ondevice.kernels import memory
from ondevice.model.draft_block import DraftBlock
from ondevice.model.draft_layer import PIECE_ROWS, load_draft_layer
from ondevice.model.sequence_state import SequenceState
from ondevice.model_config import ExpertsSpec, LatentSpec
from ondevice.units import process_memory
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.dflash_heads import dspark_config, write_dflash_head
from tests.support.eagle_heads import add_random_mtp_layer
from tests.support.engines import running

CONTEXT = 2 * PIECE_ROWS
OBJECT_BYTES = 1024
"""More than Python's objects of one matrix take."""
CASES: dict[str, dict[str, Any]] = {
    # Matrices of experts that fill three quarters of their pages, and a row that takes most of the experts.
    "experts": {"neurons": 0, "experts": ExpertsSpec(512, 48, 40)},
    "blocks": {"intermediate_size": 6000, "markov_rank": 512, "block_size": PIECE_ROWS},
    "latent": {"neurons": 16, "latent": LatentSpec(512, 16, 256, 256), "scale": 0.05, "num_heads": 16},
}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_rows_take_what_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Weights to a twentieth, beside Python's objects; what Python sees of a piece of rows has its share."""
    bundle = convert_bundle(write_chat_checkpoint(tmp_path / "checkpoint"), tmp_path / "bundle", "f16")
    if case == "blocks":
        head = write_dflash_head(tmp_path / "head", dspark_config(**CASES[case]))
        layer = convert_dflash(head, bundle, 16)
    else:
        layer = add_random_mtp_layer(bundle, **CASES[case])
    opened, runtime = (
        Bundle.open(bundle),
        RuntimeConfig(backend="cpu", speculation=layer.kind, prefill_chunk=PIECE_ROWS),
    )
    planned = loaded_bytes(layer, opened.config)
    share = draft_layer_bytes(layer, opened.config, runtime, CONTEXT) - planned
    objects = OBJECT_BYTES * sum(matrix.number for matrix in layer.matrices(opened.config).values())
    with running(bundle, "cpu") as transformer:
        gc.collect()
        before = process_memory().current_bytes
        with FlashReader([opened.sidecar_file(layer.sidecar.tensors)], "buffered") as reader:
            loaded = load_draft_layer(
                opened, layer, reader, transformer.backend, transformer.weights, CONTEXT
            )
        gc.collect()
        taken = process_memory().current_bytes - before
        # As `tracemalloc` sees nothing that the kernels' library maps.
        monkeypatch.setattr(memory, "MAPPED_BYTES", 1 << 40)
        hidden = np.ones((PIECE_ROWS, layer.hidden_size), np.float32)
        tracemalloc.start()
        try:
            state = SequenceState(KVLayout(loaded.config, 16))
            if layer.block:
                block = DraftBlock(loaded)
                block.add_rows(list(range(PIECE_ROWS)), hidden, state)
                block.after(1, block.logits(1, layer.block_drafts, state)[0])
            else:
                loaded.logits(loaded.run(list(range(PIECE_ROWS)), hidden, state)[:8])
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert 0.95 * planned < taken < 1.05 * planned + objects
    assert peak < share
