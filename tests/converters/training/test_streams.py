"""Training streams: its gradients against torch, what it leaves behind, and that it can be stopped.

On MLX's CPU device wherever it runs: other devices round products differently.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ondevice.api import load, verify
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import MultiStreams
from ondevice.errors import BackendUnavailableError, OndeviceError, UsageError
from ondevice.model_config import FeedForwardSpec, ModelConfig
from ondevice.training import train_streams
from tests.support.bundles import convert_bundle, copy_files, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.engines import running
from tests.support.sources import RandomWeights, tiny_config
from tests.support.stream_twin import StreamTwin

# A wheel whose shared libraries are missing fails to import too, and is as good as absent.
mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from ondevice.backends.mlx_float import FloatFeedForward, MlxFloatBackend  # noqa: E402
from ondevice.converters.training.activations import record_entering  # noqa: E402
from ondevice.converters.training.streams import train as training  # noqa: E402
from ondevice.converters.training.streams.loss import (  # noqa: E402
    STREAM_WEIGHT,
    ResidentBackend,
    TopLayers,
    TrainingWindow,
    acceptance,
    initial_parameters,
    load_top,
    right_draft_tokens,
    states,
    stream_loss,
)
from ondevice.converters.training.streams.options import MultiStreamOptions  # noqa: E402

pytestmark = pytest.mark.usefixtures("mlx_on_cpu")
Arrays = dict[str, NDArray[Any]]

COUNT, RUN = 3, range(9, 17)
CONFIG = tiny_config(attention_bias=True, qk_norm=True, hidden_act="relu", layer_windows=(0, 7))
FEW = {"steps": 12, "batch_tokens": 60, "run_tokens": 20, "learning_rate": 2e-2}
SENTENCE = "The cat sat on the mat and the dog lay by the door. "


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 layers, D 64, 4 heads, 192 ReLU neurons, q8."""
    folder = tmp_path_factory.mktemp("train-streams")
    shape = {"intermediate_size": 192, "hidden_act": "relu"}
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "plain", "q8")


def pieces_of(text: str = SENTENCE, count: int = 8, tokens: int = 96) -> list[list[int]]:
    """The text's bytes, over and over."""
    ids = (list(text.encode()) * (count * tokens // len(text) + 1))[: count * tokens]
    return [ids[start : start + tokens] for start in range(0, len(ids), tokens)]


def facts(
    config: ModelConfig, mode: Any = "lossless", first_layer: int = 0, count: int = COUNT
) -> MultiStreams:
    """Of streams of ranks 3 and 5."""
    shape = {"streams": count, "first_layer": first_layer, "attention_rank": 3, "feed_forward_rank": 5}
    text = {"trained_tokens": 0, "measured_tokens": 0, "acceptance": (0.0,) * count, "sha256": "", "crcs": ()}
    return MultiStreams(model="", mode=mode, bits=8, **shape, **text)  # type: ignore[arg-type]


def random_parameters(config: ModelConfig, streams: MultiStreams, seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"embeddings": (streams.streams, config.hidden_size)} | streams.matrices(config)
    return {
        name: mx.array(rng.standard_normal(shape) * (0.3 if name == "embeddings" else shape[1] ** -0.5))
        for name, shape in shapes.items()
    }


def random_top() -> tuple[TopLayers, TrainingWindow]:
    model = RandomWeights(CONFIG).load(MlxFloatBackend())
    tokens = np.random.default_rng(7).integers(0, CONFIG.vocab_size, 30).tolist()
    return TopLayers(CONFIG, model.weights), TrainingWindow(tokens, model.embedding(tokens))


@pytest.mark.fast("shared-1", "lossless-0", "lossless-4")
@pytest.mark.parametrize("resident_tokens", [0, 1, 4])
@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_gradients_equal_those_of_torch(mode: str, resident_tokens: int) -> None:
    """By every tensor, through keys and values of three streams, behind a prefix that has none."""
    top, window = random_top()
    streams = facts(CONFIG, mode)
    parameters = random_parameters(CONFIG, streams)
    assert len(parameters) == 1 + 2 * 6
    loss, gradients = mx.value_and_grad(stream_loss)(parameters, streams, top, window, RUN, resident_tokens)
    expected, theirs = StreamTwin(
        top, window, streams, RUN, resident_tokens, STREAM_WEIGHT
    ).loss_and_gradients(parameters)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for name, values in theirs.items():
        assert np.abs(values).max() > 1e-5, f"{name} has no gradient to speak of"
        assert np.abs(np.array(gradients[name]) - values).max() < 1e-4 * np.abs(values).max(), name


def test_masks_change_streams_and_nothing_else() -> None:
    rng = np.random.default_rng(2)
    gate, up, down = (rng.standard_normal((40, 8)).astype(np.float32) for _ in range(3))
    weight = FloatFeedForward(mx.array(gate), mx.array(up), mx.array(down))
    text, ends = (
        rng.standard_normal((7, 8)).astype(np.float32),
        rng.standard_normal((4, 8)).astype(np.float32),
    )
    plain, masked = MlxFloatBackend(), ResidentBackend(2)
    first = masked.feed_forward(mx.array(text[:5]), weight, FeedForwardSpec("relu"), ForwardBatch(range(5)))
    x = mx.array(np.concatenate([text[5:], ends]))
    second = np.array(
        masked.feed_forward(x, weight, FeedForwardSpec("relu"), ForwardBatch(range(2), stream_rows=4))
    )
    both = np.array(
        plain.feed_forward(mx.array(text), weight, FeedForwardSpec("relu"), ForwardBatch(range(7)))
    )
    np.testing.assert_allclose(np.concatenate([np.array(first), second[:2]]), both, atol=1e-5)
    fired = text @ gate.T > 0
    for row, end in enumerate(ends):
        token = 5 + row // 2
        hidden = np.maximum(end @ gate.T, 0) * (end @ up.T) * (fired[token] | fired[token - 1])
        np.testing.assert_allclose(second[2 + row], hidden @ down, atol=1e-4)


def test_streams_of_dense_models_are_masked_to_a_prefix_of_the_neurons() -> None:
    rng = np.random.default_rng(2)
    gate, up, down, x = (rng.standard_normal((rows, 8)).astype(np.float32) for rows in (40, 40, 40, 6))
    weight = FloatFeedForward(mx.array(gate), mx.array(up), mx.array(down))
    batch = ForwardBatch(range(2), stream_rows=4)
    found = np.array(ResidentBackend(0, 6).feed_forward(mx.array(x), weight, FeedForwardSpec("silu"), batch))
    # Six of 16 parts are 15 neurons.
    for row, used in ((row, 40 if row < 2 else 15) for row in range(6)):
        gates = x[row] @ gate[:used].T
        hidden = gates / (1 + np.exp(-gates)) * (x[row] @ up[:used].T)
        np.testing.assert_allclose(found[row], hidden @ down[:used], atol=1e-4)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_half_of_the_runs_are_masked_as_the_model_needs_it(
    activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, window = random_top()
    streams = facts(CONFIG, "lossless")
    spec = FeedForwardSpec("relu" if activation == "relu" else "silu")
    config = replace(CONFIG, layers=tuple(replace(layer, feed_forward=spec) for layer in CONFIG.layers))
    options = MultiStreamOptions(gamma=streams.streams, batch_tokens=80, run_tokens=4)
    run = training.StreamTraining(streams, top, config, options, tmp_path / "state")
    drawn = []

    def loss(parameters: Any, *arguments: Any, **resident: int) -> Any:
        drawn.append((resident.get("resident_tokens", 0), resident.get("resident_parts", 0)))
        return parameters["embeddings"].sum()

    monkeypatch.setattr(training, "stream_loss", loss)
    run.step([lambda: window])
    tokens, neurons = zip(*drawn, strict=True)
    masks, other = (tokens, neurons) if activation == "relu" else (neurons, tokens)
    assert not any(other)
    assert 4 <= sum(mask > 0 for mask in masks) <= 16
    assert max(masks) <= 16
    assert len(set(masks)) > 4


def test_runs_leave_the_states_that_one_pass_leaves() -> None:
    """However a text is cut, its own tokens become what they are without streams."""
    top, window = random_top()
    streams = facts(CONFIG)
    model = top.model(random_parameters(CONFIG, streams), streams)
    main, ends = states(model, window, [range(3, 8), range(8, 20)], 30)
    alone, _ = states(model, window, [range(29, 30)], 30)
    _, others = states(model, window, [range(5, 9)], 9)
    np.testing.assert_allclose(np.array(main), np.array(alone), atol=2e-5)
    np.testing.assert_allclose(np.array(ends[2:6]), np.array(others), atol=2e-5)
    shared = top.model(random_parameters(CONFIG, streams), facts(CONFIG, "shared"))
    changed, _ = states(shared, window, [range(5, 9)], 30)
    assert np.abs(np.array(changed) - np.array(alone)).max() > 0.1


def test_acceptance_is_of_what_all_streams_before_guessed_right() -> None:
    right = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0]], dtype=bool)
    assert acceptance([right[:2], right[2:]]) == pytest.approx((3 / 5, 2 / 3, 1 / 2))
    assert acceptance([np.zeros((4, 2), dtype=bool)]) == (0.0, 0.0)
    top, window = random_top()
    streams = facts(CONFIG)
    model = top.model(random_parameters(CONFIG, streams), streams)
    found = right_draft_tokens(model, window)
    main, ends = states(model, window, [range(27)], 30)
    said, guessed = (np.array(model.logits(x)).argmax(-1) for x in (main, ends))
    assert found.tolist() == [[guessed[t, j] == said[t + j + 1] for j in range(3)] for t in range(27)]


def test_what_enters_is_recorded_once(bundle: Path, tmp_path: Path) -> None:
    pieces, path = pieces_of(count=3, tokens=70), tmp_path / "x"
    opened, seen = Bundle.open(bundle), list[int]()
    record_entering(opened, pieces, path, 2, seen.append)
    whole = path.read_bytes()
    assert seen == [70, 140, 210]
    path.write_bytes(whole[: 150 * 64 * 4 + 3])
    seen.clear()
    record_entering(opened, pieces, path, 2, seen.append)
    assert (seen, path.read_bytes()) == ([210], whole)
    record_entering(opened, pieces, path, 2, seen.append)
    assert (seen, path.read_bytes()) == ([210], whole)
    record_entering(opened, pieces, tmp_path / "0", 0)
    with running(bundle) as model:
        embedded = np.concatenate([model.embedding(piece) for piece in pieces])
    np.testing.assert_array_equal(np.fromfile(tmp_path / "0", np.float32).reshape(-1, 64), embedded)


def losses_of(
    folder: Path, scratch: Path, **options: Any
) -> tuple[training.TrainedMultiStreams, list[float]]:
    losses: list[float] = []
    chosen = MultiStreamOptions(**(FEW | options))
    found = training.train_streams(
        Bundle.open(folder), pieces_of(), scratch, chosen, on_step=lambda tokens, loss: losses.append(loss)
    )
    return found, losses


@pytest.mark.parametrize(
    ("mode", "steps", "share", "accepted"),
    [
        ("shared", 12, 0.95, 0.0),
        pytest.param("shared", 40, 0.75, 0.5, marks=pytest.mark.slow),
        pytest.param("lossless", 40, 0.88, 0.05, marks=pytest.mark.slow),
    ],
)
def test_the_loss_falls_on_a_text_that_repeats_itself(
    bundle: Path, tmp_path: Path, mode: str, steps: int, share: float, accepted: float
) -> None:
    """share: of what the loss was in the beginning, its most in the end; accepted: of the first stream."""
    found, losses = losses_of(bundle, tmp_path / "left", mode=mode, steps=steps)
    # What the model itself isn't sure of stays: a lossless loss has its entropies for a floor.
    assert np.mean(losses[-4:]) < share * np.mean(losses[:2])
    assert found.facts.acceptance[0] > accepted
    untrained = initial_parameters(found.facts, Bundle.open(bundle).config, 0)
    assert all(np.abs(found.arrays[name] - np.array(of)).max() > 1e-3 for name, of in untrained.items())


def test_lossless_streams_leave_the_model_as_it_was(bundle: Path, tmp_path: Path) -> None:
    tokens = pieces_of()[3][:40]
    with load(bundle, threads=1) as model:
        before = model.logits(tokens)
    few: dict[str, Any] = FEW | {"mode": "lossless", "steps": 3}
    found = train_streams(bundle, pieces=pieces_of(), output=tmp_path / "made", **few)
    assert Bundle.open(tmp_path / "made").streams == found
    verify(tmp_path / "made")
    with load(tmp_path / "made", threads=1) as model:
        assert model.logits(tokens).tobytes() == before.tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]


class Stop(Exception):  # noqa: N818 - what ends a process is no error of ours
    pass


def stopping_at(step: int) -> Callable[[int, float], None]:
    calls = iter(range(1, step + 1))

    def stop(tokens: int, loss: float) -> None:
        if next(calls) == step:
            raise Stop

    return stop


@pytest.mark.parametrize("mode", [pytest.param("lossless", marks=pytest.mark.slow), "shared"])
def test_a_training_that_was_stopped_comes_to_the_same_numbers(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    options: dict[str, Any] = FEW | {"mode": mode, "steps": 6}
    whole, losses = losses_of(bundle, tmp_path / "whole", **options)
    chosen, scratch = MultiStreamOptions(**options), tmp_path / "left"
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    with pytest.raises(Stop):
        training.train_streams(Bundle.open(bundle), pieces_of(), scratch, chosen, on_step=stopping_at(3))
    # The next one stops two steps after it last saved.
    monkeypatch.setattr(training, "SAVE_SECONDS", 1e9)
    with pytest.raises(Stop):
        training.train_streams(Bundle.open(bundle), pieces_of(), scratch, chosen, on_step=stopping_at(2))
    again, rest = losses_of(bundle, scratch, **options)
    assert rest == losses[3:]
    assert again.facts == whole.facts
    assert all(again.arrays[name].tobytes() == values.tobytes() for name, values in whole.arrays.items())
    finished, none = losses_of(bundle, scratch, **options)
    assert (none, finished.facts) == ([], whole.facts)
    training.forget(scratch)
    assert not scratch.exists()


def test_what_is_left_of_another_training_is_not_gone_on_from(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"output": tmp_path / "made", "pieces": pieces_of()} | FEW | {"steps": 2}
    with pytest.raises(Stop):
        train_streams(bundle, on_step=stopping_at(1), **kept)  # type: ignore[arg-type]
    left = tmp_path / "made.streams.training"
    assert sorted(tmp_path.iterdir()) == [left]
    for changes in ({"seed": 1}, {"mode": "shared"}, {"pieces": pieces_of("Something else. ")}):
        with pytest.raises(UsageError, match="unfinished training of another"):
            train_streams(bundle, **(kept | changes))  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(training, "METHOD", training.METHOD + 1)
        with pytest.raises(UsageError, match="unfinished training of another"):
            train_streams(bundle, **kept)  # type: ignore[arg-type]
    descriptor = os.open(left, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(OndeviceError, match="another process"):
        train_streams(bundle, **kept)  # type: ignore[arg-type]
    os.close(descriptor)
    (left / training.STATE).write_bytes(b"not tensors")
    with pytest.raises(OndeviceError, match="can't be gone on from"):
        train_streams(bundle, **kept)  # type: ignore[arg-type]
    (left / training.STATE).unlink()
    train_streams(bundle, **kept)  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "made"]


def without(arrays: Arrays, name: str) -> Arrays:
    return {other: array for other, array in arrays.items() if other != name}


@pytest.mark.fast("*at step -1*", "*int32*", "*missing*")
@pytest.mark.parametrize(
    ("damaged", "match"),
    [
        (lambda arrays: without(arrays, "m/embeddings"), "m/embeddings is missing"),
        (lambda arrays: arrays | {"m/other": arrays["m/embeddings"]}, "m/other is float32"),
        (lambda arrays: arrays | {"v/embeddings": arrays["v/embeddings"][:, 1:]}, r"v/embeddings is .*63\)"),
        (lambda arrays: arrays | {"parameter/embeddings": arrays["counts"]}, "parameter/embeddings is int64"),
        (lambda arrays: arrays | {"counts": arrays["counts"].astype(np.int32)}, "counts is int32"),
        (lambda arrays: arrays | {"counts": arrays["counts"][:1]}, r"counts is int64 \(1,\)"),
        (lambda arrays: arrays | {"counts": -arrays["counts"]}, "at step -1 of 12"),
        (lambda arrays: arrays | {"counts": arrays["counts"] + 12}, "at step 13 of 12"),
    ],
)
def test_a_state_that_is_not_this_trainings_is_not_gone_on_from(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: Any, match: str
) -> None:
    """Files that safetensors reads, but nothing that could be trained further."""
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    with pytest.raises(Stop):
        training.train_streams(
            Bundle.open(bundle), pieces_of(), tmp_path, MultiStreamOptions(**FEW), on_step=stopping_at(1)
        )
    path = tmp_path / training.STATE
    save_file(damaged(load_file(path)), path)
    with pytest.raises(OndeviceError, match=f"can't be gone on from: .*{match}.*; delete"):
        losses_of(bundle, tmp_path)


@pytest.mark.slow
def test_adapters_are_a_small_part_of_the_model(bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    found, _ = losses_of(bundle, tmp_path / "left", steps=1)
    assert found.facts.first_layer == 2
    assert 0.03 * opened.parameters < found.facts.adapter_parameters(opened.config) < 0.04 * opened.parameters
    top = load_top(opened, 2)
    assert (top.config.num_layers, len(top.weights.layers)) == (1, 1)
    wide, _ = losses_of(bundle, tmp_path / "other", steps=1, most_of_model=1.0, layers=3, gamma=2)
    assert (wide.facts.attention_rank, wide.facts.feed_forward_rank, wide.facts.first_layer) == (32, 80, 0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "lossy"}, "'lossless' or 'shared'"),
        ({"gamma": 5}, "gamma is 5"),
        ({"layers": 4}, "layers is 4"),
        ({"run_tokens": 61}, "run_tokens is 61"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"rank": 8}, "no option 'rank'"),
        ({"pieces": pieces_of(count=1)}, "the text has 96 tokens"),
        ({"pieces": pieces_of(count=200, tokens=5)}, "shorter than 6 tokens"),
        ({"text": "either"}, "either"),
    ],
)
def test_what_cannot_be_trained_is_refused_first(
    bundle: Path, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    given: dict[str, Any] = {"pieces": pieces_of(), "output": tmp_path / "made"}
    with pytest.raises(UsageError, match=match):
        train_streams(bundle, **(given | options))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists"):
        train_streams(bundle, pieces=pieces_of(), output=tmp_path / "there")


def test_a_loss_that_is_not_a_number_is_an_error(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(parameters: Any, *_: object, **__: object) -> Any:
        return parameters["embeddings"].sum() * float("nan")

    monkeypatch.setattr(training, "stream_loss", loss)
    with pytest.raises(OndeviceError, match="the loss is nan at step 0"):
        losses_of(bundle, tmp_path / "left")


def test_without_mlx_there_is_no_training(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ondevice: Run
) -> None:
    import ondevice.converters.training.streams

    monkeypatch.delattr(ondevice.converters.training.streams, "train")
    monkeypatch.delitem(sys.modules, "ondevice.converters.training.streams.train")
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(BackendUnavailableError, match=r"ondevice\[mlx\]"):
        train_streams(bundle, pieces=pieces_of(), output=tmp_path / "made")


def test_the_command_adds_streams(ondevice: Run, bundle: Path, tmp_path: Path) -> None:
    copied = copy_files(bundle, tmp_path / "copied")
    command = ("train", "streams", "-m", copied, "--text", "-", "--steps", "1", "--tokens", "528")
    shown = ondevice(*command, "--mode", "shared", "--json", stdin=30 * SENTENCE)
    assert shown.code == 0, shown.err
    found = Bundle.open(copied).streams
    assert found is not None
    assert (found.mode, found.streams, found.first_layer) == ("shared", 4, 2)
    assert found.trained_tokens + found.measured_tokens == pytest.approx(528, abs=8)
    assert shown.json["acceptance"] == list(found.acceptance)
    assert shown.json["medusa_parameters"] > 50 * shown.json["embedding_parameters"]
    assert ondevice(*command, "--mode", "lossy", stdin=SENTENCE).code == 2
    again = ondevice(*command, "--mode", "lossless", stdin=30 * SENTENCE)
    assert again.code == 2
    assert f"trained on {found.trained_tokens} tokens, which new ones would replace" in again.err
    assert Bundle.open(copied).streams == found
    shape = {"gamma": 2, "layers": 2, "attention-rank": 3, "feed-forward-rank": 2}
    options = ["--mode", "lossless", *(f"--{name}={value}" for name, value in shape.items())]
    made = ondevice(*command, *options, "--replace", stdin=30 * SENTENCE)
    assert made.code == 0, made.err
    assert "heads of Medusa" in made.out
    assert "loss" in made.err
    lossless = Bundle.open(copied).streams
    assert lossless is not None
    assert (lossless.streams, lossless.first_layer) == (2, 1)
    assert (lossless.attention_rank, lossless.feed_forward_rank) == (3, 2)
    assert ondevice(*command, "--mode", "shared", "--replace", stdin=SENTENCE).code == 2
