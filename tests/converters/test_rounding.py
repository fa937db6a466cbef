"""Rounding with a text: less error on other text, the same bytes always, and what a bundle says of it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle.reader import Bundle
from ondevice.config import QuantConfig, RowFormat
from ondevice.converters import convert as converting
from ondevice.converters.architectures import tensors as names
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import Training, convert
from ondevice.converters.quantize import dequantize, quantize, to_float32
from ondevice.converters.rounding import feedback, layers
from ondevice.converters.rounding.feedback import Inputs, rounded_by_columns, rounded_by_rows
from ondevice.errors import CheckpointError, UsageError
from ondevice.kernels import _native
from ondevice.runtime.conversion import prepare
from ondevice.training import convert_by_random_tokens
from tests.benchmarks.lib.array_checkpoint import ArrayTensor
from tests.converters.test_resume import StopError, folder_bytes, stop_at
from tests.support.engines import all_logits, running
from tests.support.models import VARIANTS, write_checkpoint


def pieces_of(seed: int, count: int = 6, length: int = 100) -> list[list[int]]:
    """A text of few words, so that inputs depend on each other as those of real texts do."""
    return np.random.default_rng(seed).integers(3, 35, (count, length)).tolist()


PIECES = pieces_of(1)


def by_text(source: Path, output: Path, pieces: Sequence[Sequence[int]] = PIECES, **options: Any) -> Path:
    """A bundle at 4 bits, rounded by `pieces` and not trained further."""
    training = Training(hashlib.sha256(repr(pieces).encode()).hexdigest()[:32], None, pieces)
    return convert(source, output, options.pop("quant", "q4"), begin_training=lambda _: training, **options)


def logits(folder: Path, pieces: Sequence[Sequence[int]] = tuple(pieces_of(2, 2))) -> np.ndarray:
    with running(folder) as model:
        return np.concatenate([all_logits(model, list(piece), 32) for piece in pieces])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("rounding") / "source")


@pytest.fixture(scope="module")
def expected(source: Path) -> Path:
    return by_text(source, source.with_name("by text"))


@pytest.mark.fast("qwen2-q4")
@pytest.mark.parametrize(("variant", "quant"), [("qwen2", "q4"), ("qwen2", "q6"), ("qwen3-bias-relu2", "q5")])
def test_other_text_loses_less_than_by_least_squares(variant: str, quant: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", **VARIANTS[variant])
    exact = logits(convert(source, tmp_path / "f16", "f16"))
    losses = [
        np.square(logits(folder) - exact).mean()
        for folder in (
            by_text(source, tmp_path / "by text", quant=quant),
            convert(source, tmp_path / "plain", quant),
        )
    ]
    assert losses[0] < 0.9 * losses[1]


def test_every_matrix_is_off_by_less_on_held_out_activations(source: Path) -> None:
    checkpoint, runner = open_checkpoint(source), _native.Runner(1)
    rounding, other = (
        layers.LayerRounding(checkpoint, QuantConfig(), pieces, runner, lambda step: None)
        for pieces in (PIECES, pieces_of(7))
    )
    name, met = names.LayerNames(0), other.run(0)
    entering = {name.projection("o"): "out", name.gate: "gate", name.up: "gate", name.down: "down"}
    for matrix, rows in rounding.layer(0).items():
        weights = to_float32(checkpoint.tensors[matrix].rows(0, checkpoint.tensors[matrix].shape[0]))
        inputs = met[entering.get(matrix, "qkv")]
        moments = inputs.moments(np.arange(inputs.count))
        losses = []
        for stored in (rows.rows, quantize(runner, weights, 4, matrix)):
            off = dequantize(stored, 4, weights.shape[1]) - weights
            losses.append(np.trace(off @ moments @ off.T))
        assert losses[0] < 0.9 * losses[1], matrix
    checkpoint.close()


@pytest.mark.parametrize("case", ["opt norms behind", "opt wide embeddings"])
def test_embeddings_of_another_width_are_projected_with_less_error(tmp_path: Path, case: str) -> None:
    """Into the layers and out of them, on other text: what `transformers` multiplies, by both roundings."""
    torch = pytest.importorskip("torch")
    from tests.support import families

    family, options = families.CASES[case]
    model, met = families.write_model(tmp_path / "source", family, options), {}
    for which in ("project_in", "project_out"):
        getattr(model.model.decoder, which).register_forward_pre_hook(
            lambda _, values, which=which: met.update({which: values[0].detach()[0].double().numpy()})
        )
    model(torch.tensor(pieces_of(2, 1, 60)))
    checkpoint, runner = open_checkpoint(tmp_path / "source"), _native.Runner(1)
    with closing(checkpoint):
        pieces = pieces_of(1, 10, 60)
        rounding = layers.LayerRounding(checkpoint, QuantConfig(), pieces, runner, lambda step: None)
        for layer in range(checkpoint.config.num_layers):
            rounding.layer(layer, wanted=False)
        found = rounding.head()
        for which, inputs in met.items():
            tensor = checkpoint.tensors[names.model_weight(which)]
            exact, losses = to_float32(tensor.rows(0, tensor.shape[0])), []
            for rows in (found[tensor.name].rows, quantize(runner, exact, 4, which)):
                off = dequantize(rows, 4, exact.shape[1]) - exact
                losses.append(np.square(inputs @ off.T).sum())
            assert losses[0] < 0.9 * losses[1], which


def correlated(count: int, tokens: int, seed: int) -> np.ndarray:
    mixing = np.random.default_rng(3).standard_normal((count, count)) / np.sqrt(count)
    return (np.random.default_rng(seed).standard_normal((tokens, count)) @ mixing).astype(np.float32)


@pytest.mark.parametrize("block", [4096, 64])
def test_each_matrix_is_off_by_less_on_other_inputs(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where not all inputs feed back to each other."""
    monkeypatch.setattr(feedback, "MAX_INPUTS", block)
    runner, inputs, other = _native.Runner(2), Inputs(), correlated(150, 400, 8)
    for seed in (5, 6):
        inputs.add(correlated(150, 300, seed))
    weights = np.random.default_rng(0).standard_normal((130, 150)).astype(np.float32)
    found = rounded_by_columns(runner, [ArrayTensor("w", weights)], inputs, RowFormat(4))["w"]
    down = rounded_by_rows(runner, ArrayTensor("down", weights), inputs, RowFormat(4))
    for rows, exact in ((found, weights), (down, weights.T)):
        product = (lambda w: other @ w.T) if exact is weights else (lambda w: other @ w)
        plain = dequantize(quantize(runner, np.ascontiguousarray(exact), 4, "w"), 4, exact.shape[1])
        stored = dequantize(rows.rows, 4, exact.shape[1])
        off, plain_off = (np.square(product(w) - product(exact)).mean() for w in (stored, plain))
        assert off < (0.75 if block > 150 else 0.95) * plain_off
        assert np.allclose(rows.squares[:, 0], np.square(stored - exact).sum(axis=1), rtol=1e-4)
        assert np.allclose(rows.squares[:, 1], np.square(exact).sum(axis=1))


def test_moments_are_exact_sums_of_the_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no library's order of summation changes a bit of them."""
    monkeypatch.setattr(feedback, "SLAB_INPUTS", 2)
    x, inputs = correlated(20, 50, 1), Inputs()
    x[:, 7] = 0.0
    inputs.add(x)
    largest = np.abs(x).max(axis=0).astype(np.float64)
    scales = np.where(largest > 0, largest / 32767, 1.0)
    whole = np.rint(x / scales).astype(np.int64)
    picks = np.array([3, 7, 0])
    products = (whole[:, picks].T @ whole[:, picks]).astype(np.float64)
    found = inputs.moments(picks)
    assert np.array_equal(found, found.T)
    expected = np.triu(products * scales[picks, None] * scales[picks])
    assert np.array_equal(np.triu(found), expected)
    assert np.allclose(inputs.moments(np.arange(20)), x.T.astype(np.float64) @ x, atol=1e-2)
    assert np.array_equal(inputs.energies()[picks], np.diag(inputs.moments(picks)))


def test_the_bytes_do_not_depend_on_threads(
    source: Path, expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ondevice.converters.convert.usable_cores", lambda: 3)
    assert folder_bytes(by_text(source, tmp_path / "b")) == folder_bytes(expected)


@pytest.mark.fast("neurons-00001*")
@pytest.mark.parametrize(
    "step", ["layer 2 of 2: rounding neurons", "neurons-00001.safetensors", "rounding the head"]
)
def test_an_interrupted_conversion_rounds_anew_to_the_same_bytes(
    source: Path, expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr("ondevice.converters.progress.REPORT_SECONDS", 0.0)
    with pytest.raises(StopError):
        by_text(source, tmp_path / "b", on_progress=stop_at(step))
    with pytest.raises(UsageError, match=r"begun with text of \d+ tokens .* this run has text of \d+ tokens"):
        by_text(source, tmp_path / "b", pieces_of(4), resume=True)
    other = shutil.copytree(source, tmp_path / "other")
    with pytest.raises(UsageError, match="begun from another source"):
        by_text(other, tmp_path / "b", resume=True)
    written = {
        path.name: path.stat().st_mtime_ns
        for path in (tmp_path / "b.partial").glob("neurons*[0-9].safetensors")
    }
    assert "neurons-00000.safetensors" in written
    output = by_text(source, tmp_path / "b", resume=True)
    assert folder_bytes(output) == folder_bytes(expected)
    assert written.items() <= {path.name: path.stat().st_mtime_ns for path in output.iterdir()}.items()


def test_a_bundle_says_that_a_text_rounded_it(source: Path, expected: Path, tmp_path: Path) -> None:
    provenance = Bundle.open(expected).manifest.provenance
    assert provenance.notes == ("weights are rounded with error feedback (GPTQ) on 600 tokens of a text",)
    plain = Bundle.open(convert(source, tmp_path / "plain", "q4")).manifest.provenance
    assert plain.notes == ()
    for kind, error in provenance.quantisation_error.items():
        assert plain.quantisation_error[kind] <= error < 2 * plain.quantisation_error[kind]
    assert (
        expected.joinpath("neurons-00000.safetensors").stat().st_size
        == (tmp_path / "plain" / "neurons-00000.safetensors").stat().st_size
    )


def test_eight_bits_do_not_depend_on_the_text(source: Path, tmp_path: Path) -> None:
    by_a_text = by_text(source, tmp_path / "a", quant="q8")
    plain = convert(source, tmp_path / "b", "q8")
    assert Bundle.open(by_a_text).manifest.provenance.notes == ()
    for name in ("resident.safetensors", "neurons-00001.safetensors", "embedding.safetensors"):
        assert (by_a_text / name).read_bytes() == (plain / name).read_bytes()


def test_what_a_text_makes_infinite_is_refused(source: Path) -> None:
    with pytest.raises(CheckpointError, match="isn't finite"):
        Inputs().add(np.array([[1.0, np.inf]], np.float32))
    bad = ArrayTensor("w", np.full((4, 8), np.nan, np.float32))
    inputs = Inputs()
    inputs.add(correlated(8, 20, 1))
    with pytest.raises(CheckpointError, match="w holds NaN"):
        rounded_by_columns(_native.Runner(1), [bad], inputs, RowFormat(4))


def test_codes_of_the_checkpoint_and_other_bits_are_left_alone(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(source)
    kept = checkpoint.tensors[names.LayerNames(0).projection("q")]
    monkeypatch.setattr(type(kept), "quantized_rows", lambda self, *_: self.name == kept.name or None)
    mixed = QuantConfig(4, (("qkv", RowFormat(6)), ("out", RowFormat(8)), ("feed_forward", RowFormat(4, 32))))
    found = layers.LayerRounding(checkpoint, mixed, PIECES, _native.Runner(1), lambda step: None).layer(0)
    assert kept.name not in found
    name = names.LayerNames(0)
    assert set(found) == {*(name.projection(which) for which in "kv"), name.gate, name.up, name.down}
    assert found[name.gate].rows.scales.shape == (160, 2)
    assert found[name.down].rows.scales.shape == (64, 3)
    assert found[name.projection("k")].rows.codes.shape[1] == 6 * 64 // 8
    checkpoint.close()


def test_the_text_is_cut_to_bounded_memory(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    checkpoint.close()
    assert layers.most_tokens(config) == layers.MAX_ROUNDING_TOKENS
    wide = replace(config, hidden_size=8192, intermediate_size=28672)
    assert layers.most_tokens(wide) * (2 * (2 * 8192 + 64 + 28672) + 4 * 8192) <= layers.INPUT_BYTES


def test_random_tokens_round_without_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source", **VARIANTS["qwen3-bias-relu2"])
    # Nothing is trained, so the bundle isn't written twice.
    monkeypatch.setattr(converting, "_copy_as", None)
    with prepare(source, tmp_path / "random", "q4") as prepared:
        found = convert_by_random_tokens(prepared)
    with prepare(source, tmp_path / "random", "q4") as prepared:
        assert convert_by_random_tokens(prepared, resume=True) == found
    notes = Bundle.open(found).manifest.provenance.notes
    assert notes == ("weights are rounded with error feedback (GPTQ) on 2048 random tokens",)
    text = np.random.default_rng(4).integers(3, 256, (4, 100)).tolist()
    exact = logits(convert(source, tmp_path / "f16", "f16"), text)
    plain = logits(convert(source, tmp_path / "plain", "q4"), text)
    assert np.square(logits(found, text) - exact).mean() < 0.93 * np.square(plain - exact).mean()


def test_random_tokens_are_always_the_same(source: Path) -> None:
    with closing(open_checkpoint(source)) as checkpoint:
        config = checkpoint.config
    pieces = layers.random_pieces(config, 2)
    assert [len(piece) for piece in pieces] == 8 * [256]
    assert all(piece[0] == 2 and max(piece) < config.vocab_size for piece in pieces)
    # The first number of Python's generator, whose sequence is the same in every version.
    assert pieces[0][1] == int(0.8444218515250481 * config.vocab_size)
    assert layers.random_pieces(replace(config, max_context=1), None)[0] == [pieces[0][1]]


@pytest.mark.parametrize("quant", ["q8", "f16"])
def test_random_tokens_have_nothing_to_round_above_six_bits(source: Path, tmp_path: Path, quant: str) -> None:
    with (
        prepare(source, tmp_path / "b", quant) as prepared,
        pytest.raises(UsageError, match=f"there would be none as {quant}; take quant q4, q5 or q6"),
    ):
        convert_by_random_tokens(prepared)


def test_formats_that_a_text_rounds() -> None:
    assert [
        quant for quant in ("q4", "q5", "q6", "q8", "f16") if layers.rounds_any(QuantConfig.parse(quant))
    ] == [
        "q4",
        "q5",
        "q6",
    ]
    assert layers.rounds_any(QuantConfig(8, (("embedding", RowFormat(6)),)))
    assert not layers.rounds_any(QuantConfig(8, (("embedding", RowFormat(4, 32, "symmetric")),)))


@pytest.mark.slow
def test_layers_with_delta_rules_are_rounded_by_a_text(tmp_path: Path) -> None:
    """But for what betas and decays are made of, which keeps 16 bits."""
    families = pytest.importorskip("tests.support.families")
    family, options = families.CASES["qwen3.5"]
    # States of large weights magnify whatever is rounded.
    families.write_model(tmp_path / "source", family, {**options, "initializer_range": 0.05})
    source = tmp_path / "source"
    exact = logits(convert(source, tmp_path / "f16", "f16"))
    plain, by_a_text = convert(source, tmp_path / "plain", "q4"), by_text(source, tmp_path / "text")
    lost = [float(np.square(logits(it) - exact).mean()) for it in (plain, by_a_text)]
    assert lost[1] < 0.9 * lost[0]
