"""Guesses change how many passes a text takes, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ondevice
from ondevice.api import Model, load
from ondevice.backends.base import Float32
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.config import RuntimeConfig, SamplingConfig, Speculation
from ondevice.errors import BundleError, UsageError
from ondevice.measure.ablation import ablation
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.runtime.state_pool import StatePool
from ondevice.sparsity.fetch import NeuronFetcher
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.drafters.combined import CHEAP_ROW_SHARE, Combined, WhileRowsAreCheap
from ondevice.speculation.drafters.lookup import Lookup
from ondevice.speculation.drafters.recycling import MATRIX_BYTES, MAX_CANDIDATES, Recycling, candidates
from ondevice.speculation.drafting import DraftRequest
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.registry import DRAFTERS
from ondevice.speculation.tree import DRAFT_NODES, Draft, Proposals, Root, grow, plain
from ondevice.speculation.verify import verify
from tests.support.bundles import EOS, convert_bundle, write_chat_checkpoint
from tests.support.chat import PROMPT, squeeze
from tests.support.engines import always_draft
from tests.support.made_up_streams import add_streams
from tests.support.paths import SHIPPED
from tests.support.scripted_drafts import STREAMS, draft_by, drafted

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repeat_last_n": 9},
    *({"temperature": 0.9, "top_p": 0.9, "seed": seed} for seed in range(2)),
    {"temperature": 1.2, "repetition_penalty": 1.2, "frequency_penalty": -0.5, "seed": 7},
]
LOGITS = np.zeros(1, dtype=np.float32)
"""Logits that say nothing."""
ALONE = [name for name, kind in DRAFTERS.items() if kind.needs == "nothing"]
QUESTION = "The cat sat on the mat. The cat sat on the hat. The cat sat on"


@pytest.fixture(scope="module")
def relu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relu")
    shape = {"num_hidden_layers": 4, "intermediate_size": 1500, "hidden_act": "relu"}
    bundle = convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "relu")
    add_streams(bundle, gamma=STREAMS, layers=2)
    return bundle


@pytest.fixture(scope="module")
def plain_texts(relu_bundle: Path) -> Iterator[list[tuple[int, ...]]]:
    with load(relu_bundle, sparsity="dense", speculation="off") as model:
        yield [write(model, **sampling) for sampling in SAMPLINGS]


def write(model: Model, count: int = 60, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=count, logit_bias={EOS: -math.inf}, **options).tokens


@pytest.mark.fast("exact-streams-True")
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("drafter", ["lookup", "streams"])
@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_any_tree_leaves_every_token_as_it_is(
    relu_bundle: Path, plain_texts: list[tuple[int, ...]], sparsity: str, drafter: str, resident: bool
) -> None:
    """With streams in the model, nodes are left out half-way and others get streams, too."""
    with load(relu_bundle, sparsity=sparsity, speculation=drafter, threads=2) as model:
        if not resident:
            squeeze(model, model.plan.segment.least + 1)
        for scripted, answer in drafted(model, PROMPT, SAMPLINGS, plain_texts, logit_bias={EOS: -math.inf}):
            assert max(scripted.sizes) > 6
            assert (scripted.streams > 10) == (drafter == "streams")
            assert answer.stats.accepted_tokens_per_pass > 1.2
            assert answer.stats.forward_passes < 60


@pytest.mark.fast("lookup-predicted")
@pytest.mark.parametrize(
    "sparsity", [*(pytest.param(mode, marks=pytest.mark.slow) for mode in ("dense", "exact")), "predicted"]
)
@pytest.mark.parametrize("drafter", ALONE)
def test_drafters_leave_every_token_of_the_shipped_model_as_it_is(
    drafter: str, sparsity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch, [DRAFT_NODES])
    with (
        load(SHIPPED, sparsity=sparsity, speculation="off") as plain,
        load(SHIPPED, sparsity=sparsity, speculation=drafter) as drafting,
        load(SHIPPED, sparsity=sparsity, speculation=drafter) as small,
    ):
        squeeze(small, small.plan.segment.least)
        for sampling in SAMPLINGS[::2]:
            expected = plain.generate(QUESTION, max_tokens=40, **sampling)
            for model in (drafting, small):
                found = model.generate(QUESTION, max_tokens=40, **sampling)
                assert (found.tokens, found.text) == (expected.tokens, expected.text)
                assert found.finish_reason == expected.finish_reason
                assert found.stats.speculation == drafter
        assert drafting.generate(QUESTION, max_tokens=40).stats.accepted_tokens_per_pass > 1.05


@pytest.mark.fast("off", "streams")
@pytest.mark.parametrize("drafter", ["off", "lookup", "streams"])
def test_count_penalties_count_what_was_generated_alone(
    relu_bundle: Path, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the model's own logits for each text, and a count of the tokens behind the prompt."""
    always_draft(monkeypatch, [DRAFT_NODES])
    with load(relu_bundle, speculation=drafter) as model:
        prompt, expected = model.tokenizer.encode(PROMPT), list[int]()
        options: dict[str, Any] = {"frequency_penalty": 0.8, "presence_penalty": 0.4}
        while len(expected) < 30:
            scores = model.logits([*prompt, *expected])[-1].astype(np.float64)
            scores[EOS] = -math.inf
            for token in set(expected):
                scores[token] -= 0.8 * expected.count(token) + 0.4
            expected.append(int(np.argmax(scores)))
        assert write(model, 30, **options) == tuple(expected)
        assert write(model, 30) != tuple(expected)


def test_streams_draft_after_a_throttled_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their initial states come from the pass before, whether or not it was throttled."""
    always_draft(monkeypatch, [DRAFT_NODES])
    turns = cycle([True, True, False])
    monkeypatch.setattr(TreePolicy, "throttle", lambda policy: next(turns))
    with (
        load(SHIPPED, speculation="off") as plain,
        load(SHIPPED, speculation="streams") as drafting,
    ):
        expected = plain.generate(QUESTION, max_tokens=40)
        found = drafting.generate(QUESTION, max_tokens=40)
    assert found.tokens == expected.tokens
    assert found.stats.drafting.drafts > 5
    assert found.stats.accepted_tokens_per_pass > 1.05


def test_a_stop_string_ends_the_text_inside_an_accepted_path(relu_bundle: Path) -> None:
    with load(relu_bundle, speculation="lookup") as model:
        whole = model.generate(PROMPT, max_tokens=40)
        known = [*model.tokenizer.encode(PROMPT), *whole.tokens]
        for count in range(1, 30, 4):
            for seed in range(3):
                draft_by(model, known, seed)
                assert model.generate(PROMPT, max_tokens=count).tokens == whole.tokens[:count]
        stop = whole.text[12:15]
        scripted = draft_by(model, [], 0)
        scripted.propose = lambda asked, rows: [plain(asked[0].root)]  # type: ignore[method-assign]
        expected = model.generate(PROMPT, max_tokens=40, stop=[stop])
        assert expected.text == whole.text[: whole.text.index(stop)]
        # No token after the stop string is drawn, although drafts go on behind it.
        for seed in range(8):
            draft_by(model, known, seed)
            answer = model.generate(PROMPT, max_tokens=40, stop=[stop])
            assert (answer.tokens, answer.text) == (expected.tokens, expected.text)
            assert answer.finish_reason == expected.finish_reason == "stop"


def test_a_conversation_goes_on_behind_what_was_accepted(relu_bundle: Path) -> None:
    said = ["Tell me.", "More.", "And then?"]
    with load(relu_bundle, speculation="off") as model:
        plain = model.session()
        expected = [plain.respond(words, max_tokens=12).tokens for words in said]
    with load(relu_bundle, speculation="lookup") as model:
        session = model.session()
        for words, tokens in zip(said, expected, strict=True):
            draft_by(model, [], len(words))
            assert session.respond(words, max_tokens=12).tokens == tokens
            kv = next(iter(model._engine.kv.of_sessions.values()))
            assert kv.length == len(kv.tokens) <= len(kv.blocks) * 64


def test_only_what_was_accepted_counts_for_the_neuron_cache(
    relu_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[list[Float32]] = [[]]
    observe = NeuronCache.observe

    def note(cache: NeuronCache, layer: int, gates: Float32) -> None:
        if layer == 1:
            observed[-1] += list(gates.copy())
        observe(cache, layer, gates)

    monkeypatch.setattr(NeuronCache, "observe", note)
    with load(relu_bundle, sparsity="exact", speculation="lookup") as model:
        squeeze(model, model.plan.segment.least + 1)
        assert isinstance(model._engine._neurons, NeuronFetcher)
        # No draft tokens at all.
        scripted = draft_by(model, [], 0)
        scripted.propose = lambda asked, rows: [Draft((asked[0].root,), (-1,))]  # type: ignore[method-assign]
        tokens = write(model, 40)
        observed.append([])
        draft_by(model, [*model.tokenizer.encode(PROMPT), *tokens], 1)
        assert write(model, 40) == tokens
    plain, drafted = (np.array(rows) for rows in observed)
    assert plain.shape == drafted.shape
    # Those held back were kept in half precision.
    np.testing.assert_allclose(drafted, plain, rtol=1e-3, atol=1e-6)
    assert ((drafted > 0) == (plain > 0))[np.abs(plain) > 1e-6].all()


def test_guesses_take_no_block_that_the_text_does_not_need(
    relu_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    allocate = StatePool._allocate

    def note(memory: StatePool, nbytes: int) -> Any:
        taken[-1] += 1
        return allocate(memory, nbytes)

    monkeypatch.setattr(StatePool, "_allocate", note)
    with load(relu_bundle, speculation="lookup") as model:
        for seed in range(2):
            draft_by(model, [], seed)
            taken.append(0)
            tokens = write(model, 120)
            draft_by(model, [*model.tokenizer.encode(PROMPT), *tokens], seed)
            taken.append(0)
            assert write(model, 120) == tokens
    assert len(set(taken)) == 1


def test_a_draft_ends_where_the_context_does(relu_bundle: Path) -> None:
    """Blocks of keys and values have room for more, but a model may have no position there."""
    ends: list[int] = []
    with load(relu_bundle, speculation="lookup", max_context=90) as model:
        prompt = model.tokenizer.encode(PROMPT)
        draft_by(model, [], 0)
        tokens = write(model, 90)
        assert len(prompt) + len(tokens) == 90
        for seed in range(3):
            scripted = draft_by(model, [*prompt, *tokens], seed)
            propose = scripted.propose

            def note(asked: Sequence[DraftRequest], rows: int, propose: Any = propose) -> list[Draft]:
                ends.append(asked[0].kv.length + asked[0].max_nodes)
                drafts: list[Draft] = propose(asked, rows)
                return drafts

            scripted.propose = note  # type: ignore[method-assign]
            assert write(model, 90) == tokens
    assert set(ends) == {90}


def test_what_was_drawn_before_an_error_is_the_text(
    relu_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def failing(transformer: Transformer, logits: Float32) -> None:
        calls.append(1)
        if len(calls) == 25:
            raise BundleError("damaged")

    with load(relu_bundle, speculation="lookup") as model:
        tokens = write(model, 60)
        monkeypatch.setattr(Transformer, "check_finite", failing)
        draft_by(model, [*model.tokenizer.encode(PROMPT), *tokens], 3)
        session = model.stream(PROMPT, max_tokens=60, logit_bias={EOS: -math.inf})
        said: list[int | None] = []
        with pytest.raises(BundleError, match="damaged"):
            said.extend(event.token for event in session)
        assert tuple(said) == tokens[:24]
        assert write(model, 60) == tokens


def test_an_ablation_is_of_single_tokens(relu_bundle: Path) -> None:
    with pytest.raises(UsageError, match="leave it off"):
        ablation(
            relu_bundle, RuntimeConfig(speculation="lookup"), prompt_tokens=4, max_tokens=2, warm_up_tokens=1
        )


def test_a_plan_counts_what_drafting_holds() -> None:
    plans = {name: ondevice.inspect(SHIPPED, sparsity="exact", speculation=name) for name in ("off", *ALONE)}
    assert plans["off"].draft_bytes == 0
    assert all(plans[name].draft_bytes > 0 for name in ALONE)
    assert plans["auto"].draft_bytes > plans["lookup"].draft_bytes
    needed = {name: plan.minimum_budget_bytes - plan.process_bytes for name, plan in plans.items()}
    for name, plan in plans.items():
        assert needed[name] == needed["off"] + plan.draft_bytes


def test_every_value_of_speculation_but_off_names_a_drafter() -> None:
    assert {"off", *DRAFTERS} == {*get_args(Speculation)}


def test_verification_follows_the_target() -> None:
    draft = Draft((5, 7, 8, 9, 6), (-1, 0, 0, 2, 3))
    target = {0: 8, 2: 9, 3: 1}
    asked: list[int] = []

    def draw(node: int) -> int | None:
        asked.append(node)
        return target[node]

    assert verify(draft, draw) == [0, 2, 3] == asked
    assert verify(draft, lambda node: None) == [0]
    assert verify(draft, lambda node: 4) == [0]
    # The root's own token is no guess.
    assert draft.child(-1, 5) is None


def test_a_draft_grows_where_acceptance_is_likeliest() -> None:
    guesses = {(): [(1, 0.6), (2, 0.3)], (1,): [(3, 0.9), (4, 0.1)], (2,): [(5, 0.9)], (1, 3): [(6, 0.2)]}

    def tree(worth: float = 0.0, nodes: int = 16, depth: int = 8) -> Draft:
        root = Root(9, lambda path: guesses.get(tuple(path), []), nodes, depth)
        return grow([root], lambda n, chance: chance > worth, nodes)[0]

    # 0.6, 0.54, 0.3, 0.27, 0.108, 0.06
    whole = tree()
    assert (whole.tokens, whole.parents) == ((9, 1, 3, 2, 5, 6, 4), (-1, 0, 1, 0, 3, 2, 1))
    assert whole.chances == pytest.approx((1.0, 0.6, 0.54, 0.3, 0.27, 0.108, 0.06))
    assert [tree(worth=0.28).tokens, tree(nodes=2).tokens] == [(9, 1, 3, 2), (9, 1)]
    assert tree(depth=1) == Draft((9, 1, 2), (-1, 0, 0), (1.0, 0.6, 0.3))
    assert tree(depth=0) == Draft((9,), (-1,))
    # What follows a guess is asked for once no likelier guess is left, and where it may be worth it.
    asked: list[tuple[int, ...]] = []

    def propose(path: Sequence[int]) -> list[tuple[int, float]]:
        asked.append(tuple(path))
        return guesses.get(tuple(path), [])

    grow([Root(9, propose, 4, 8)], lambda n, chance: True, 4)
    assert asked == [(), (1,), (1, 3)]
    asked.clear()
    root = Root(9, propose, 16, 8)
    (drafted,) = grow([root], lambda n, chance: True, 16, lambda n, chance: chance > 0.5)
    assert (drafted.tokens, asked) == ((9, 1, 3, 2, 6, 4), [(), (1,), (1, 3)])


@settings(max_examples=60)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=3),
    st.integers(1, 16),
    st.booleans(),
)
def test_drafts_are_the_likeliest_nodes_that_all_limits_allow(
    seed: int, limits: list[tuple[int, int]], most: int, branches: bool
) -> None:
    """Against every node of two tokens after each, likeliest first. limits: nodes and depth of each text."""
    chances: dict[tuple[int, ...], float] = {}

    def propose(text: int, path: Sequence[int]) -> list[tuple[int, float]]:
        own = np.random.default_rng([seed, text, *path]).uniform(0.1, 0.5, 2)
        return list(zip((1, 2), own.tolist(), strict=True))

    def follow(text: int, path: tuple[int, ...], reached: float) -> None:
        for token, chance in propose(text, path) if len(path) < limits[text][1] else ():
            chances[text, *path, token] = reached * chance
            follow(text, (*path, token), reached * chance)

    roots, expected = [], [[(0,)] for _ in limits]
    for text, (nodes, depth) in enumerate(limits):
        roots.append(Root(0, partial(propose, text), nodes, depth))
        follow(text, (), 1.0)
    for text, *path in sorted(chances, key=lambda it: -chances[it]):
        own = expected[text]
        goes_on = branches or own[-1] == (0, *path[:-1])
        if len(own) < limits[text][0] and sum(map(len, expected)) < max(most, len(limits)) and goes_on:
            own.append((0, *path))
    drafts = grow(roots, lambda nodes, chance: True, most, branches=branches)
    for text, (draft, own) in enumerate(zip(drafts, expected, strict=True)):
        paths = [tuple(draft.tokens[at] for at in draft.tree.path(node)) for node in range(len(draft))]
        assert paths == own
        assert draft.chances == pytest.approx([1.0, *(chances[text, *path[1:]] for path in own[1:])])


def test_a_draft_computes_where_its_proposals_are_unlikely() -> None:
    """Each pass is asked for at the gain over what is proposed; a token that both give is there once."""
    proposed = {(): [(1, 0.9)], (1,): [(3, 0.1)], (1, 2): [(4, 0.8)]}
    computed, paths = (
        {(): [(7, 1.0)], (1,): [(2, 0.7), (3, 0.2)], (1, 2): [(4, 0.75)]},
        list[tuple[int, ...]](),
    )

    def compute(path: Sequence[int]) -> list[tuple[int, float]]:
        paths.append(tuple(path))
        return computed.get(tuple(path), [])

    def drafted(gain: float, chance: float = 0.8, least: float = 0.15) -> Draft:
        paths.clear()
        root = Root(9, lambda path: proposed.get(tuple(path), []), 16, 8, compute, chance)
        adding = lambda nodes, chance: chance > least  # noqa: E731
        return grow([root], adding, 16, is_worth_computing=lambda nodes, more: more > gain)[0]

    # After 1, a computed token comes in the place of an unlikely one with 0.9 * 0.8 * (1 - 0.1).
    tree = drafted(gain=0.6)
    assert drafted(gain=0.6, least=0.05) == tree
    assert (tree.tokens, tree.parents, paths) == ((9, 1, 2, 4, 3), (-1, 0, 1, 2, 1), [(1,)])
    assert tree.chances == pytest.approx((1.0, 0.9, 0.63, 0.504, 0.18))
    assert (drafted(gain=0.65).tokens, paths) == ((9, 1), [])
    assert (drafted(gain=0.0, chance=0.0).tokens, paths) == ((9, 1), [])


def test_lookup_says_what_followed_the_longest_run() -> None:
    lookup = Lookup()
    lookup.begin([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], SamplingConfig())
    assert [token for token, _ in lookup.propose(())] == [4]
    assert [token for token, _ in lookup.propose((5,))] == [1]
    lookup.begin([7, 8], SamplingConfig())
    assert list(lookup.propose(())) == []
    lookup.begin([7, 8, 7], SamplingConfig())
    (token, before), *_ = lookup.propose(())
    assert token == 8
    lookup.observe(8, LOGITS)
    lookup.begin([7, 8, 7], SamplingConfig())
    ((_, after),) = lookup.propose(())
    assert after > before
    for _ in range(100):
        lookup.observe(3, LOGITS)
        lookup.begin([7, 8, 7], SamplingConfig())
    ((_, never),) = lookup.propose(())
    assert never < 0.05


def test_combined_drafts_are_the_likeliest_of_all() -> None:
    class Fixed(Drafter):
        def __init__(self, *proposals: tuple[int, float]) -> None:
            self._proposals = proposals
            self.observed: list[int] = []

        def propose(self, path: Sequence[int]) -> Proposals:
            return self._proposals

        def observe(self, token: int, logits: Float32 | None) -> None:
            self.observed.append(token)

    members = Fixed((1, 0.5), (2, 0.2)), Fixed((2, 0.6), (3, 0.1)), Fixed()
    combined = Combined(members)
    assert combined.propose(()) == [(2, 0.6), (1, 0.5), (3, 0.1)]
    combined.observe(3, LOGITS)
    assert [member.observed for member in members] == [[3]] * 3
    many = Combined([Fixed(*((token, 0.9 - token / 100) for token in range(20)))])
    assert [token for token, _ in many.propose(())] == list(range(8))


def test_streams_are_asked_in_auto_while_a_row_takes_little_of_a_pass() -> None:
    asked: list[str] = []

    class Streams(Drafter):
        def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
            asked.append("prepare")

        def propose(self, path: Sequence[int]) -> Proposals:
            return [(1, 0.5)]

        def observe(self, token: int, logits: Float32 | None) -> None:
            asked.append("judge" if logits is not None else "add")

        def streamed(self, draft: Draft, row_share: float) -> Sequence[int] | None:
            asked.append("streams")
            return None

    drafter = WhileRowsAreCheap(Streams())
    kv = cast(SequenceState, None)
    for row_share, expected in (
        (0.0, ["prepare", "streams", "judge"]),
        (2 * CHEAP_ROW_SHARE, ["prepare", "judge"]),
        (2 * CHEAP_ROW_SHARE, ["add"]),
        (CHEAP_ROW_SHARE, ["streams", "add"]),
        (CHEAP_ROW_SHARE, ["prepare", "streams", "judge"]),
    ):
        asked.clear()
        drafter.prepare(kv, 4, never_cancelled)
        drafts = list(drafter.propose(()))
        drafter.streamed(plain(1), row_share)
        drafter.observe(1, LOGITS)
        assert (asked, bool(drafts)) == (expected, "prepare" in expected)


def test_recycling_keeps_what_the_model_said_last() -> None:
    recycling, logits = Recycling(50), np.zeros(50, dtype=np.float32)
    recycling.begin([3], SamplingConfig())
    assert list(recycling.propose(())) == []
    logits[[10, 20, 30]] = 3, 5, 4
    recycling.observe(3, logits)
    assert [token for token, _ in recycling.propose(())][:3] == [20, 30, 10]
    assert [token for token, _ in recycling.propose((9, 3))][:3] == [20, 30, 10]
    for _ in range(100):
        recycling.observe(30, logits)
        recycling.observe(3, None)
    chances = [chance for _, chance in recycling.propose(())]
    assert chances[1] > 0.9
    assert chances[0] < 0.1
    assert candidates(4096) == MAX_CANDIDATES
    for vocab_size in (32_000, 128_256, 256_000, 2):
        assert 4 * vocab_size * candidates(vocab_size) <= MATRIX_BYTES
        assert candidates(vocab_size) >= 1
