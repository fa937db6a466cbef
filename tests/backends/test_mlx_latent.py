"""Latent attention on MLX: near `reference`, stored as the plan counts, and a text's bits in any company."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.token_tree import TokenTree
from ondevice.budget.mlx_memory import MLX_CACHE_BYTES, MlxMemory
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.converters.convert import convert
from ondevice.model.sequence_state import SequenceState
from ondevice.runtime import backend_choice
from tests.converters.test_latent_attention import FAMILIES, TEXT, V3
from tests.support.chat import squeeze
from tests.support.engines import always_draft, error, every_logits, random_tokens
from tests.support.families import write_model
from tests.support.mlx_models import ON_GPU, loaded, run_every_op, smallest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from ondevice.backends.mlx_kv import MlxKV, no_block  # noqa: E402

pytestmark = pytest.mark.usefixtures("mlx_device")

TOLERANCE = 2e-2 if ON_GPU else 1e-3
CASES = {"v2": "f16", "v3": "q4", "glm": "q8", "v2 wide": "q4", "v3 wide": "q5", "glm narrow": "q6"}
FAST = ("v3",)
ENDLESS: dict[str, Any] = {"max_tokens": 10, "logit_bias": {2: -math.inf}}
equal_on_cpu = pytest.mark.skipif(ON_GPU, reason="a GPU doesn't promise equal bits of chunks")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_logits_are_those_of_reference(tmp_path: Path, case: str) -> None:
    write_model(tmp_path / "source", *FAMILIES[case])
    folder = convert(tmp_path / "source", tmp_path / "bundle", CASES[case])
    for kv_bits, tolerance in ((16, TOLERANCE), (8, 1e-2)):
        with loaded(folder, "reference", kv_bits=kv_bits) as reference:
            theirs = reference.logits(TEXT[:90])
        with loaded(folder, kv_bits=kv_bits, prefill_chunk=37) as model:
            assert error(model.logits(TEXT[:90]), theirs) < tolerance, kv_bits


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "kv_bits"), [(8, 16), (128, 8), (128, 16)])
def test_what_a_long_context_takes_is_what_is_planned(
    tmp_path: Path, chunk: int, kv_bits: Literal[16, 8]
) -> None:
    """Beside the latents themselves: heads share them, and no copy of them is made for each."""
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 256}
    sizes |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    sizes |= {"first_k_dense_replace": 3, "max_position_embeddings": 1300}
    write_model(tmp_path / "source", "DeepseekV3", {**V3, **sizes})
    made = convert(tmp_path / "source", tmp_path / "bundle", "q8")
    with loaded(made, kv_bits=kv_bits, max_context=1200, prefill_chunk=chunk, sparsity="dense") as model:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        model.generate(tokens=random_tokens(model.config, 1190), max_tokens=5)
        taken = mx.get_peak_memory() - before - model.plan.kv_cache_bytes
        engine = model._engine
        memory = MlxMemory(model.config, engine._bundle.quant, engine._runtime, operand_bytes=4)
        assert 0.4 < taken / (memory.activation_bytes(chunk) - MLX_CACHE_BYTES) < 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A V3 with experts in two of its three layers."""
    made = tmp_path_factory.mktemp("latent")
    write_model(made / "source", "DeepseekV3", V3)
    return convert(made / "source", made / "bundle", "q4")


def texts(model: Any) -> list[tuple[int, ...]]:
    prompt = TEXT[:8] * 3
    sampled = model.generate(tokens=prompt, temperature=0.9, seed=3, **ENDLESS)
    return [model.generate(tokens=prompt, temperature=0.0, **ENDLESS).tokens, sampled.tokens]


@equal_on_cpu
@pytest.mark.parametrize("kv_bits", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_no_setting_changes_the_text(
    folder: Path, tmp_path: Path, kv_bits: Literal[16, 8], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every drafter, budget and chunk, from a prompt cache, and of the logits of a prompt."""
    with loaded(folder, kv_bits=kv_bits) as model:
        expected, logits = texts(model), model.logits(TEXT[:70])
        assert len(set(expected[1])) > 4, "the text says nothing"
    always_draft(monkeypatch, [5, 3, 9])
    ways: list[dict[str, Any]] = [
        {"prefill_chunk": 7, "speculation": "lookup", "prompt_cache": tmp_path / "cache"},
        {"prefill_chunk": 16, "dram_budget": smallest(folder, kv_bits=kv_bits)},
    ]
    if kv_bits == 16:
        ways += [
            {"prefill_chunk": 3, "speculation": "recycling", "prompt_cache": tmp_path / "cache"},
            {"prefill_chunk": 1, "dram_budget": smallest(folder, kv_bits=kv_bits)},
        ]
    for settings in ways:
        with loaded(folder, kv_bits=kv_bits, **settings) as model:
            assert texts(model) == expected, settings
            assert np.array_equal(model.logits(TEXT[:70]), logits), settings
            squeeze(model)
            assert texts(model)[1] == expected[1], settings
            drafting = model.generate(tokens=TEXT[:8] * 3, **ENDLESS).stats.drafting
            assert "speculation" not in settings or drafting.draft_tokens > 0


@pytest.mark.fast("8")
@equal_on_cpu
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_draft_trees_change_no_bit(folder: Path, kv_bits: Literal[16, 8]) -> None:
    """Two tokens a pass with wrong ones beside them, of which none stays; and forks go on alike."""
    rng, found = np.random.default_rng(3), []
    with loaded(folder, kv_bits=kv_bits) as model:
        engine = model._engine

        def drafted() -> None:
            transformer, layout = engine.transformer, engine.kv.layout
            backend = transformer.backend
            kv = SequenceState(layout, backend.allocate_block, arrays=backend.new_arrays(layout))
            whole = np.array(every_logits(transformer, TEXT[:40], kv))
            kv = SequenceState(layout, backend.allocate_block, arrays=backend.new_arrays(layout))
            for at in range(0, 40, 2):
                wrong = rng.integers(0, 256, 3).tolist()
                tokens = [TEXT[at], wrong[0], TEXT[at + 1], wrong[1], wrong[2]]
                batch = ForwardBatch(tokens, TokenTree([-1, 0, 0, 1, 2]), drafted=[1, 2, 3, 4])
                found.append(np.array(transformer.logits(transformer.run(batch, kv).hidden))[[0, 2]])
                kv.keep(at, [0, 2], partial(backend.kv_move, kv))
                transformer.accept(batch, [0, 2])
            assert np.concatenate(found).tobytes() == whole.tobytes()
            copy = kv.fork()
            first, second = (np.array(every_logits(transformer, TEXT[40:46], it)) for it in (kv, copy))
            assert np.array_equal(first, second)

        model._owner.call(drafted)


def test_what_a_token_takes(folder: Path) -> None:
    """One latent and one key part a layer, whatever the number of heads; 8 bits take two scales more."""
    latent, config = 48 + 8, Bundle.open(folder).config
    for kv_bits, nbytes in ((16, 2 * latent), (8, latent + 8)):
        layout = KVLayout(config, kv_bits)  # type: ignore[arg-type]
        kv = SequenceState(layout, no_block, arrays=MlxKV(layout))
        kv.reserve(70)
        assert sum(part.nbytes for layer in kv.arrays._layers for part in layer) == kv.nbytes
        assert kv.nbytes == 2 * 64 * 3 * nbytes


@pytest.mark.usefixtures("rows_measured_anew")
def test_each_op_of_latents_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU:
        run_every_op(monkeypatch)
    bundle = Bundle.open(folder)
    found = backend_choice.row_invariance(bundle.config, bundle.quant, RuntimeConfig(backend="mlx"))
    for name in ("product 48 x 20 of 4 heads", "norm of 48 latent values", "attention, tree behind 1 keys"):
        assert name in found.ops
    assert ON_GPU or set(found.ops.values()) == {16}
