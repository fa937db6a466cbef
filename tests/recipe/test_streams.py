"""Streams of the recipe: what they see, what they leave alone, what is counted; tiny models, no training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recipe import continuations, multi_stream, stream_evaluation, stream_loss, stream_training  # noqa: E402
from recipe import streams as recipe_streams  # noqa: E402
from recipe.config import SIZES  # noqa: E402
from recipe.frozen import Frozen  # noqa: E402
from recipe.model import Llama, rotate  # noqa: E402

SHAPE = replace(SIZES["tiny"], num_hidden_layers=3)
STREAM_SIZES = multi_stream.MultiStreamSizes(layers=2, gamma=3, attention_rank=4, feed_forward_rank=6)
MARKS = continuations.Marks(begin=1, assistant=4, end=2)
TOKENS = 24


def random_ids(windows: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(5, SHAPE.vocab_size, (windows, tokens), generator=torch.Generator().manual_seed(3))


def all_positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1]).expand(ids.shape)


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(1)
    made = Llama(SHAPE)
    with torch.no_grad():
        for parameter in made.parameters():
            # Larger than at the beginning of training, so that what is seen makes a difference.
            parameter.mul_(4.0 if parameter.dim() == 2 else 1.0)
    return made


@pytest.fixture(scope="module")
def base(model: Llama) -> Frozen:
    return Frozen(model, torch.float32)


def made_streams(trained: bool) -> multi_stream.MultiStreams:
    """trained: with `up` matrices that do something."""
    torch.manual_seed(2)
    made = multi_stream.MultiStreams(SHAPE, STREAM_SIZES)
    for name, parameter in made.named_parameters():
        if trained and name.endswith(".up"):
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def test_names_shapes_and_count_of_what_a_bundle_gets() -> None:
    made = stream_training.arrays(multi_stream.MultiStreams(SIZES["small"], multi_stream.MultiStreamSizes()))
    width = 256
    expected = {"embeddings": (4, width)}
    for layer in (3, 4, 5):
        expected |= {
            f"layers.{layer}.qkv.down": (32, width),
            f"layers.{layer}.qkv.up": (3 * width, 32),
            f"layers.{layer}.out.down": (32, width),
            f"layers.{layer}.out.up": (width, 32),
            f"layers.{layer}.feed_forward.down": (80, width),
            f"layers.{layer}.feed_forward.up": (width, 80),
        }
    assert {name: array.shape for name, array in made.items()} == expected
    assert {array.dtype for array in made.values()} == {np.dtype(np.float32)}
    assert sum(array.size for array in made.values()) == 270_336 + 4 * width


def test_the_frozen_base_says_what_the_model_says_at_once_and_token_by_token(
    model: Llama, base: Frozen
) -> None:
    ids = random_ids()
    with torch.no_grad():
        expected, _ = model.logits_and_gates(ids)
    logits = base.trace(ids, 1).final @ base.head.t()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    caches = base.caches(*ids.shape)
    stepped = torch.stack([base.step(ids[:, at], at, caches) for at in range(TOKENS)], 1)
    torch.testing.assert_close(stepped, expected, rtol=1e-4, atol=1e-4)


def test_training_changes_streams_only_and_never_the_base(base: Frozen) -> None:
    ids, made = random_ids(), made_streams(trained=False)
    before = base.trace(ids, 1).final.clone()
    judge = stream_loss.Judge(base, made, "lossless")
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    batch = stream_loss.Batch(ids, all_positions(ids), 1, (0, 4))
    losses = []
    for _ in range(6):
        loss, _ = judge.loss(batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in made.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    torch.testing.assert_close(base.trace(ids, 1).final, before, rtol=0, atol=0)


def one_position(
    base: Frozen,
    made: multi_stream.MultiStreams,
    ids: torch.Tensor,
    at: int,
    allowed: list[torch.Tensor] | None,
) -> torch.Tensor:
    """Logits (G, V) of the streams of one token of (T,) ids: the maths as it is written down, row by row."""
    trace = base.trace(ids[None, : at + 1], made.first_layer)
    heads, size = SHAPE.num_attention_heads, SHAPE.head_dim
    rows = [trace.entering[0, at] + embedding for embedding in made.embeddings]
    for index, left in enumerate(trace.layers):
        layer = base.layers[made.first_layer + index]
        adapters = made.layers[str(made.first_layer + index)]
        seen_keys, seen_values, after = list(left.keys[0].unbind(1)), list(left.values[0].unbind(1)), []
        for number, row in enumerate(rows, 1):
            h = base.normed(row, layer.attention_norm)
            qkv = layer.qkv @ h + adapters.qkv.up @ (adapters.qkv.down @ h)
            q, k, v = qkv.view(3, heads, size)
            turn = base.cos[at + number], base.sin[at + number]
            q, k = rotate(q, *turn), rotate(k, *turn)
            seen_keys.append(k)
            seen_values.append(v)
            scores = torch.stack([(q * key).sum(-1) for key in seen_keys], -1) / math.sqrt(size)
            mixed = torch.einsum("hn,nhd->hd", torch.softmax(scores, -1), torch.stack(seen_values)).flatten()
            row = row + layer.out @ mixed + adapters.out.up @ (adapters.out.down @ mixed)
            g = base.normed(row, layer.feed_forward_norm)
            gate, up = (layer.gate_up @ g).chunk(2)
            active = base.activation(gate) * (1 if allowed is None else allowed[index])
            extra = adapters.feed_forward
            after.append(row + layer.down @ (active * up) + extra.up @ torch.relu(extra.down @ g))
        rows = after
    return torch.stack([base.head @ base.normed(row, base.final_norm) for row in rows])


@pytest.mark.fast("silu-3-3")
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("residency", [0, 3])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_streams_are_what_the_maths_says_position_by_position(
    model: Llama, activation: Any, stride: int, residency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_stream, "QUERY_BLOCK", 5)
    other = Llama(replace(SHAPE, hidden_act=activation))
    other.load_state_dict(model.state_dict())
    base = Frozen(other, torch.float32)
    made, ids = made_streams(trained=True).requires_grad_(False), random_ids()
    cells = torch.arange(0, TOKENS, stride)
    positions = torch.stack([cells, cells + stride - 1])
    trace = base.trace(ids, made.first_layer)
    batch = stream_loss.Batch(ids, positions, stride, (residency,) * 2)
    masks = stream_loss.residency_masks(trace, batch, base.zeros_gates)
    assert bool(masks) == bool(residency)
    if masks and activation == "silu":
        assert torch.equal(
            masks[0][0, 0], torch.arange(SHAPE.intermediate_size) < SHAPE.intermediate_size * 3 // 16
        )
    logits = made(base, trace, positions, stride, masks) @ base.head.t()
    for row in range(2):
        for place, at in enumerate(positions[row].tolist()):
            allowed = [mask[row, place] for mask in masks] or None
            expected = one_position(base, made, ids[row], at, allowed)
            torch.testing.assert_close(logits[row, place], expected, rtol=1e-3, atol=1e-3)


def test_a_stream_sees_the_base_up_to_its_token_and_earlier_streams_of_it_only(base: Frozen) -> None:
    made, ids = made_streams(trained=True).requires_grad_(False), random_ids(1)
    at = 9

    def run(ids: torch.Tensor) -> torch.Tensor:
        return made(base, base.trace(ids, made.first_layer), all_positions(ids))[0]

    plain, later, earlier = run(ids), ids.clone(), ids.clone()
    later[0, at + 1] += 1
    earlier[0, at - 4] += 1
    torch.testing.assert_close(run(later)[: at + 1], plain[: at + 1], rtol=0, atol=0)
    assert (run(earlier)[at] - plain[at]).abs().amax(-1).min() > 1e-4
    made.embeddings[1] += 1.0
    moved = run(ids)
    torch.testing.assert_close(moved[:, 0], plain[:, 0], rtol=0, atol=0)
    assert (moved[:, 1:] - plain[:, 1:]).abs().amax(-1).min() > 1e-4


def test_new_streams_are_plain_base_layers_at_later_positions(base: Frozen) -> None:
    made, ids = made_streams(trained=False).requires_grad_(False), random_ids(1)
    bare = made_streams(trained=False).requires_grad_(False)
    for adapter in bare.modules():
        if isinstance(adapter, multi_stream.Adapter):
            adapter.down.zero_()
    trace = base.trace(ids, made.first_layer)
    positions = all_positions(ids)
    torch.testing.assert_close(made(base, trace, positions), bare(base, trace, positions), rtol=0, atol=0)
    torch.testing.assert_close(made.main(base).trace(ids, 1).final, trace.final, rtol=1e-5, atol=1e-5)


def test_attention_has_the_gradients_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_stream, "QUERY_BLOCK", 2)
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    own = [numbers(1, 2, 3, 2, 4) for _ in range(3)]
    of_base = [numbers(1, 2, 6, 4) for _ in range(2)]
    inputs = (*own, *of_base, torch.tensor([[1, 2, 5]]), 2)
    weights = numbers(1, 2, 3, 2, 4).detach()
    out = multi_stream.MultiStreamAttention.apply(*inputs)
    found = torch.autograd.grad((out * weights).sum(), (*own, *of_base))
    q, k, v, (keys, values) = *own, of_base
    scores = torch.cat([torch.einsum("bhsgd,bhtd->bhsgt", q, keys), q @ k.transpose(3, 4)], -1)
    hidden = torch.zeros(3, 2, 8, dtype=torch.bool)
    for place, at in enumerate((1, 2, 5)):
        hidden[place, :, at + 1 : 6] = True
        hidden[place, 0, 7] = True
    chances = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    plain = torch.einsum("bhsgt,bhtd->bhsgd", chances[..., :6], values) + chances[..., 6:] @ v
    expected = torch.autograd.grad((plain * weights).sum(), (*own, *of_base))
    # Scores and gradients pass through float32 on their way.
    for left, right in zip((out, *found), (plain, *expected), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_neurons_of_the_last_tokens_are_resident() -> None:
    active = torch.rand(20, 7, generator=torch.Generator().manual_seed(4)) < 0.2
    for tokens in (1, 2, 5, 8, 16):
        expected = torch.stack([active[max(0, at - tokens + 1) : at + 1].any(0) for at in range(20)])
        assert torch.equal(multi_stream.recently_active(active, tokens), expected)


def test_the_loss_is_cross_entropy_with_the_bases_later_chances(base: Frozen) -> None:
    made, ids = made_streams(trained=True), random_ids()
    judge = stream_loss.Judge(base, made, "lossless")
    positions = all_positions(ids)
    loss, seen = judge.loss(stream_loss.Batch(ids, positions, 1, (0, 0)))
    trace = base.trace(ids, made.first_layer)
    said = torch.log_softmax(made(base, trace, positions) @ base.head.t(), -1)
    chances = torch.softmax(trace.final @ base.head.t(), -1)
    losses = [
        -(chances[:, stream:] * said[:, : TOKENS - stream, stream - 1]).sum(-1)
        for stream in range(1, STREAM_SIZES.gamma + 1)
    ]
    assert [seen[f"stream_{j}"] for j in (1, 2, 3)] == pytest.approx(
        [x.mean().item() for x in losses], rel=1e-3
    )
    mean = torch.cat([x.flatten() for x in losses]).mean().item()
    assert loss.item() == pytest.approx(mean, rel=1e-3)


def test_the_shared_mode_trains_the_main_stream_through_the_adapters(base: Frozen) -> None:
    made, ids = made_streams(trained=True), random_ids()
    judge = stream_loss.Judge(base, made, "shared")
    loss, seen = judge.loss(stream_loss.Batch(ids, all_positions(ids), 1, (0, 0)))
    final = made.main(base).trace(ids, made.first_layer).final
    chances = torch.log_softmax(final[:, :-1] @ base.head.t(), -1)
    assert seen["main"] == pytest.approx(-chances.gather(2, ids[:, 1:, None]).mean().item(), rel=1e-3)
    assert (final - base.trace(ids, 1).final).abs().max() > 1e-3
    streams = sum(seen[f"stream_{j}"] for j in (1, 2, 3))
    assert loss.item() == pytest.approx(0.1 * streams + seen["main"], rel=1e-3)
    loss.backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """Token streams of every domain, and windows with replies."""
    rng = np.random.default_rng(6)
    for domain in continuations.WANTED:
        rng.integers(5, SHAPE.vocab_size, 900).astype(np.uint16).tofile(tmp_path / f"{domain}.train.bin")
    folder = tmp_path / "multi-stream" / continuations.FOLDER
    folder.mkdir(parents=True)
    windows = rng.integers(5, SHAPE.vocab_size, (2, 6, SHAPE.max_position_embeddings)).astype(np.uint16)
    np.save(folder / "000.npy", windows)
    return tmp_path


@pytest.mark.fast("lossless")
@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_a_resumed_run_has_the_numbers_of_one_that_was_not_stopped(
    base: Frozen, build: Path, mode: stream_loss.Mode
) -> None:
    training = stream_training.StreamTraining(
        sizes=STREAM_SIZES, mode=mode, steps=2, windows=2, stride=2, warmup_steps=1
    )
    whole, halved = stream_training.start(training, base, build), stream_training.start(training, base, build)
    expected = [whole.update() for _ in range(2)]
    found = [halved.update()]
    folder = build / "multi-stream"
    stream_training.save_checkpoint(halved, folder)
    resumed = stream_training.resume(stream_training.load_checkpoint(folder), base, build)
    assert resumed.training == training
    assert [*found, resumed.update()] == expected
    for name, array in stream_training.arrays(whole.judge.streams).items():
        assert np.array_equal(array, stream_training.arrays(resumed.judge.streams)[name])


def test_a_run_may_begin_with_the_streams_of_another(base: Frozen, build: Path) -> None:
    folder, made = stream_training.run_folder(build, "lossless"), made_streams(trained=True)
    folder.mkdir()
    stream_training.write_arrays(folder / stream_training.ARRAYS, made)
    training = stream_training.StreamTraining(sizes=STREAM_SIZES, mode="shared", begun_with="lossless")
    run = stream_training.start(training, base, build)
    found = stream_training.arrays(run.judge.streams)
    assert all(np.array_equal(found[name], of) for name, of in stream_training.arrays(made).items())


def test_batches_have_a_position_in_every_cell_and_masks_on_half_their_windows(
    base: Frozen, build: Path
) -> None:
    training = stream_training.StreamTraining(sizes=STREAM_SIZES, windows=4, stride=4)
    run = stream_training.start(training, base, build)
    lengths = []
    for run.step in range(30):
        batch = run.draw()
        assert torch.equal(batch.positions // 4, torch.arange(16).expand(4, 16))
        assert sum(length > 0 for length in batch.residency) == 2
        lengths += batch.residency
    assert {min(lengths), max(lengths)} == {0, 16}
    assert 0 < run.continued_drawn < 120
    assert sum(run.batches.drawn.values()) == 120 - run.continued_drawn


def test_replies_are_the_bases_own_and_all_else_is_true(base: Frozen) -> None:
    document = np.array([1, 3, 10, 11, 2, 4, 12, 13, 2, 3, 14, 2, 4, 15, 2], np.uint16)
    segments = list(continuations.replies(document, MARKS))
    assert [segment.forced.tolist() for segment in segments] == [[1, 3, 10, 11, 2, 4], [3, 14, 2, 4]]
    assert all(segment.end == MARKS.end for segment in segments)
    forced = np.array([7, 8], np.uint16)
    row = continuations.Row(iter([continuations.Segment(forced, 3, end=2), continuations.Segment(forced, 5)]))
    said = [row.next(own) for own in (50, 51, 52, 2, 53, 54, 55)]
    assert said == [(7, False), (8, False), (52, True), (2, True), (7, False), (8, False), (55, True)]
    plans = [iter([continuations.Segment(np.array([9, 10, 11], np.uint16), 100)]) for _ in range(2)]
    windows, own = continuations.continued(base, plans, 12)
    assert own.tolist() == [[False] * 3 + [True] * 9] * 2
    ids = torch.from_numpy(windows.astype(np.int64))
    greedy = (base.trace(ids, 1).final @ base.head.t()).argmax(-1)
    assert torch.equal(greedy[:, 2:-1], ids[:, 3:])


def test_passes_are_counted_run_by_run() -> None:
    own = np.array([[False, True, True, True, True, False, False, True, True]])
    assert list(stream_evaluation.runs(own)) == [(0, 1, 5), (0, 7, 9)]
    nothing = np.zeros((1, 9), np.int64)
    assert stream_evaluation.tokens_per_pass(nothing, own) == 1
    assert stream_evaluation.tokens_per_pass(nothing + 4, own) == 3
    some = nothing.copy()
    some[0, 0] = 1
    assert stream_evaluation.tokens_per_pass(some, own) == pytest.approx(6 / 5)
    found = np.ones((1, 9, 2), np.bool_)
    found[0, 1, 0] = False
    counts = stream_evaluation.given_before(found, own)
    assert counts == {"right": [3, 1], "asked": [4, 1]}
    assert stream_evaluation.shares(counts) == [0.75, 1.0]
    assert stream_evaluation.shares({"right": [0], "asked": [0]}) == [0.0]


def test_a_bundle_gets_the_acceptance_of_all_chats_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream's draft tokens over those that were asked of it, in replies; a novel has none."""

    def figures(tokens: int, right: list[int], asked: list[int]) -> dict[str, Any]:
        return {"tokens": tokens, "all": {"counts": {"right": right, "asked": asked}}}

    found = {
        "replies": {
            "dialogue": figures(100, [80, 60, 10], [100, 80, 60]),
            "sql": figures(400, [40, 1, 0], [400, 40, 1]),
            "restaurants": figures(10, [0, 0, 0], [10, 0, 0]),
            "math": figures(20, [20, 19, 19], [20, 20, 19]),
            "novels": figures(900, [900, 900, 900], [900, 900, 900]),
        }
    }
    written: dict[str, Any] = {}
    monkeypatch.setattr(recipe_streams, "write_streams", lambda *_, **facts: written.update(facts))
    training = stream_training.StreamTraining(sizes=STREAM_SIZES)
    recipe_streams.write_sidecar(Path(), made_streams(trained=False), training, found)
    assert written["measured_tokens"] == 530
    assert written["acceptance"] == [round(140 / 530, 3), round(80 / 140, 3), round(29 / 80, 3)]


def test_the_best_tree_has_the_likeliest_products() -> None:
    likeliest = torch.tensor([[0.6, 0.3, 0.05], [0.5, 0.4, 0.1]]).expand(4, 2, 3)
    # Nodes: 0.6, 0.3, 0.6 * 0.5, 0.6 * 0.4; the next is 0.3 * 0.5.
    true = torch.tensor([[0.6, 0.4], [0.3, 0.5], [0.05, 0.5], [0.6, 0.1]])
    assert stream_evaluation._best_first(likeliest, true, 4).tolist() == [2, 1, 0, 1]
