"""Models with Mamba-2 mixers through the API: no way of running one changes its text."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.api import load
from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import verify
from ondevice.converters.training.predictors import train as predictors
from ondevice.errors import UnsupportedModelError
from ondevice.kernels._native import crc32c
from ondevice.measure.profiling import recorded_gates
from ondevice.model_config import ExpertsSpec, FeedForwardSpec, LayerSpec, ModelConfig
from tests.conftest import mlx_on
from tests.support.small_models import MODELS, write_small

PROMPT = [37 * index % 300 + 3 for index in range(100)]


def _with_feed_forward(spec: FeedForwardSpec, experts: ExpertsSpec | None = None) -> ModelConfig:
    """Mixers and attention, some without a feed-forward; `spec` where there is one."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if not layer.has_feed_forward:
            return replace(layer, feed_forward=replace(spec, neurons=0))
        return replace(layer, feed_forward=spec, experts=experts)

    return replace(MODELS["mixers"], layers=tuple(map(changed, MODELS["mixers"].layers)))


EXPERTS = ExpertsSpec(6, 2, 32, "sigmoid", renormalised=True)
CASES = {
    "beside attention": MODELS["mixers beside attention"],
    "squared": _with_feed_forward(FeedForwardSpec("relu2", gated=False)),
    "experts": _with_feed_forward(FeedForwardSpec("silu", neurons=256), EXPERTS),
    "squared experts": _with_feed_forward(
        FeedForwardSpec("relu2", gated=False, neurons=256), replace(EXPERTS, layout="neurons")
    ),
}
"""Mixers of Granite's hybrids, Falcon-H1 and Nemotron-H."""
WAYS: list[dict[str, Any]] = [
    {"threads": 2, "speculation": "lookup"},
    {"prefill_chunk": 7, "parallel": 2, "kv_bits": 16},
]


@pytest.mark.fast("beside attention-cpu", "squared-cpu", "squared experts-cpu")
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("case", CASES)
def test_no_way_of_running_it_changes_the_text(tmp_path: Path, case: str, backend: str) -> None:
    config = replace(CASES[case], max_context=256, vocab_size=320)
    bundle = write_small(tmp_path / "bundle", config)
    assert verify(bundle, crc32c).checksums > 0
    more = [{"sparsity": "exact"}, {"sparsity": "dense"}] if case == "squared" else []
    with mlx_on(gpu=False) if backend == "mlx" else nullcontext():
        found = [_text(bundle, backend=backend, **way) for way in ({"threads": 1}, *WAYS, *more)]
        with pytest.raises(ondevice.BudgetError) as refused:
            load(bundle, backend=backend, dram_budget="1MB").close()
        budget = refused.value.required_bytes + (4 << 20)
        found.append(_text(bundle, backend=backend, dram_budget=budget))
    assert len(set(found)) == 1
    assert len(found[0]) == 24


def test_what_records_every_layers_neurons_is_refused(tmp_path: Path) -> None:
    pieces = [[5] * 300] * 10
    bundle = Bundle.open(write_small(tmp_path / "squared", CASES["squared"]))
    with pytest.raises(UnsupportedModelError, match="layer 1 has no feed-forward"):
        predictors.check(bundle, pieces, predictors.PredictorOptions())
    with (
        pytest.raises(UnsupportedModelError, match="layer 1 has no feed-forward"),
        recorded_gates(bundle, pieces, lambda tokens: None),
    ):
        pass


def _text(bundle: Path, **options: Any) -> tuple[int, ...]:
    with load(bundle, **options) as model:
        return tuple(model.generate(tokens=PROMPT, max_tokens=24).tokens)
