"""What is otherwise on CUDA: reads land in plain memory and are copied; kernels that go wrong aren't asked.

On MLX's CPU device, which is told that it is CUDA, or on a GPU when ONDEVICE_TEST_MLX_GPU is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.budget.mlx_memory import MLX_PIECES
from ondevice.bundle.layout import expert_bytes
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import never_cancelled
from ondevice.converters.convert import convert
from tests.support.bundles import convert_bundle
from tests.support.chat import squeeze
from tests.support.engines import error, random_tokens
from tests.support.families import CASES, OLMOE, write_model
from tests.support.mlx_models import ON_GPU, loaded, smallest
from tests.support.models import write_checkpoint
from tests.support.paths import SHIPPED

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from ondevice.backends import mlx_memory  # noqa: E402
from ondevice.backends.mlx_experts import CUDA_PRODUCTS  # noqa: E402
from ondevice.backends.mlx_weights import Records  # noqa: E402

pytestmark = pytest.mark.usefixtures("usual_threads", "mlx_device")


@contextmanager
def on(cuda: bool) -> Iterator[None]:
    """Models that are loaded within take MLX's device for CUDA, or for one that isn't."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlx_memory, "on_cuda", lambda: cuda)
        yield


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """On CUDA. The bytes of each copy that is made."""
    made: list[int] = []
    true = Records.copied

    def copying(records: Any) -> Any:
        made.append(records.nbytes)
        return true(records)

    monkeypatch.setattr(Records, "copied", copying)
    with on(cuda=True):
        yield made


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 experts, three for each token; three layers."""
    folder = tmp_path_factory.mktemp("olmoe")
    write_model(folder / "source", "Olmoe", {**OLMOE, "intermediate_size": 100, "num_experts": 12})
    return convert(folder / "source", folder / "bundle", "q4")


@pytest.mark.fast("dense-direct")
@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize("sparsity", ["dense", "exact", "predicted"])
def test_the_budget_changes_no_bit(copied: list[int], sparsity: str, io: str) -> None:
    options: dict[str, Any] = {"sparsity": sparsity, "io": io}
    with loaded(SHIPPED, **options) as model:
        tokens = random_tokens(model.config, 30)
        expected, text = model.logits(tokens), model.generate(tokens=tokens, max_tokens=8).tokens
    copied.clear()
    with loaded(SHIPPED, dram_budget=smallest(SHIPPED, **options), **options) as model:
        assert (model.logits(tokens) == expected).all()
        assert model.generate(tokens=tokens, max_tokens=8).tokens == text
        assert model._engine._backend.feed_forwards[0].piece_memory.records is None
        stride = Bundle.open(SHIPPED).neuron_layouts[0].stride
        assert set(copied) == ({model.plan.buffers.neurons * stride} if sparsity == "dense" else set())


@pytest.mark.slow
@pytest.mark.parametrize(("case", "act"), [("olmoe", "silu"), ("qwen2 moe", "silu"), ("qwen2 moe", "relu2")])
def test_experts_are_multiplied_as_they_were_read_last(
    copied: list[int], tmp_path: Path, case: str, act: str
) -> None:
    """Slots are read into again and again; an expert's copy is that of what its slot holds now."""
    family, values = CASES[case]
    write_model(tmp_path / "source", family, {**values, "hidden_act": act})
    folder = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    with loaded(folder, prefill_chunk=13) as model:
        tokens = random_tokens(model.config, 40)
        expected, text = model.logits(tokens), model.generate(tokens=tokens, max_tokens=10).tokens
        copied.clear()
        for segments in (3, 0):
            squeeze(model, segments)
            assert np.array_equal(model.logits(tokens), expected), segments
            assert model.generate(tokens=tokens, max_tokens=10).tokens == text, segments
        slots = dict(model._engine._backend.feed_forwards[0].piece_memory._slots)
        assert slots
        assert all(it.records is None for it in slots.values())
        assert set(copied) == {expert_bytes(model.config, model._engine._bundle.quant)}


def test_the_plan_counts_two_copies_under_way(olmoe: Path) -> None:
    for folder, options in ((SHIPPED, {"sparsity": "dense"}), (olmoe, {})):
        plans = []
        for cuda in (False, True):
            with on(cuda):
                plans.append(ondevice.inspect(folder, backend="mlx", speculation="off", **options))
        bundle = Bundle.open(folder)
        nbytes = expert_bytes(bundle.config, bundle.quant)
        if folder == SHIPPED:
            nbytes = plans[0].buffers.neurons * bundle.neuron_layouts[0].stride
        assert plans[1].buffers.nbytes - plans[0].buffers.nbytes == MLX_PIECES * nbytes


def test_no_fewer_products_are_asked_for_than_take_one_kernel(
    copied: list[int], olmoe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three experts a token, held or one by one, so many are asked for that CUDA has one kernel."""
    asked: list[int] = []
    true = mx.gather_qmm

    def watched(*arrays: Any, rhs_indices: Any, **options: Any) -> Any:
        asked.append(rhs_indices.size)
        return true(*arrays, rhs_indices=rhs_indices, **options)

    monkeypatch.setattr(mx, "gather_qmm", watched)
    with loaded(olmoe) as model:
        for held in (True, False):
            if not held:
                squeeze(model, 3)
            model.generate(tokens=random_tokens(model.config, 20), max_tokens=5)
            assert min(asked) in range(CUDA_PRODUCTS, CUDA_PRODUCTS + 3)
            assert max(asked) > CUDA_PRODUCTS + 3, "of a prompt there are more"
            asked.clear()


@pytest.mark.parametrize("quant", ["q4", "q8"])
def test_no_product_of_a_matrix_is_of_one_group(
    copied: list[int], bundles: Any, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of 64 columns: MLX's CUDA kernel for one group isn't to be trusted; zeros make it two."""
    folder, groups = bundles("llama-relu", quant), set()
    with loaded(folder, "reference") as reference:
        tokens = random_tokens(reference.config, 30)
        expected = reference.logits(tokens)
    true = mx.quantized_matmul

    def watched(x: Any, codes: Any, *pairs: Any, transpose: bool, **options: Any) -> Any:
        if transpose:
            groups.add(pairs[0].shape[-1])
        return true(x, codes, *pairs, transpose=transpose, **options)

    monkeypatch.setattr(mx, "quantized_matmul", watched)
    with loaded(folder, sparsity="dense") as model:
        assert model.config.hidden_size == 64
        assert error(model.logits(tokens), expected) < (2e-2 if ON_GPU else 1e-3)
    assert min(groups) == 2


@pytest.mark.skipif(ON_GPU, reason="a GPU's kernels take other memory")
@pytest.mark.fast("True")
@pytest.mark.parametrize("experts", [False, True])
def test_no_more_copies_exist_than_are_planned(
    copied: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: bool
) -> None:
    """Nothing is computed before it is waited for, so that copies live as long as they can."""
    if experts:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_experts": 12, "num_hidden_layers": 2}
        write_model(tmp_path / "source", "Olmoe", {**OLMOE, **sizes})
        folder, options = convert(tmp_path / "source", tmp_path / "bundle", "q8"), {}
    else:
        sizes = {"hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 2}
        source = write_checkpoint(tmp_path / "source", **sizes)
        folder, options = convert_bundle(source, tmp_path / "bundle", "q8"), {"sparsity": "dense"}
    with loaded(folder, **options) as model:
        tokens = random_tokens(model.config, 8)
        for segments in (3, 12 * 2) if experts else (0,):  # Experts that are in slots are copied too.
            squeeze(model, segments)
            model.logits(tokens)
        monkeypatch.setattr(mx, "async_eval", lambda *arrays: None)
        copied.clear()

        def peak() -> int:
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            list(model._engine.logits(tokens, never_cancelled))
            return int(mx.get_peak_memory() - before)

        most = model._owner.call(peak)
        (one,) = set(copied)
        assert len(copied) > 2 * MLX_PIECES
        assert MLX_PIECES * one < most < model.plan.buffers.packed_bytes + one
