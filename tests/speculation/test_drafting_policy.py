"""When drafts grow, how far, and when they don't: on a clock of our own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.config import SamplingConfig
from ondevice.speculation.back_off import (
    FIRST_PLAIN,
    MAX_BACK_OFF,
    MIN_BACK_OFF,
    PLAIN_EVERY,
    BackOff,
)
from ondevice.speculation.drafted_text import DraftedText, PassOutcome
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.drafting import Drafting, DraftRequest
from ondevice.speculation.pass_time import PassTime
from ondevice.speculation.policy import STALE_PASSES, TRIAL_NODES, TreePolicy
from ondevice.speculation.tree import DRAFT_NODES, Draft, Proposals, Root, grow

KV: Any = SimpleNamespace(room=64, length=0)
"""Keys and values with room for any draft."""


def outcome(draft: Draft, seconds: float) -> PassOutcome:
    """A pass of which nothing but the root was right."""
    output: Any = None
    return PassOutcome(draft, [0], output, seconds, ended=False)


def proposed(drafting: Drafting, text: DraftedText, root: int, nodes: int) -> Draft:
    """The draft of a pass of one text."""
    (draft,) = drafting.propose([DraftRequest(text, root, KV, nodes, 99)], nodes)
    assert isinstance(draft, Draft)
    return draft


class Simulation:
    """Passes by a policy: chains of draft tokens, each with one claimed chance and another of being right."""

    def __init__(self, seed: int = 0) -> None:
        self.policy = TreePolicy(DRAFT_NODES)
        self.sizes: list[int] = []
        self.tokens = 0
        self.seconds = 0.0
        self._random = np.random.default_rng(seed)

    def run(
        self,
        passes: int,
        *,
        plain: float = 1.0,
        node: float = 0.1,
        claimed: float = 0.5,
        right: float | None = None,
        propose: float = 0.0,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> list[int]:
        """Sizes of the drafts of `passes` passes. plain, node, propose: seconds."""
        right = claimed if right is None else right
        for _ in range(passes):
            asked, nodes = 0, self.policy.begin()
            size = 1
            if nodes > 1:

                def proposals(path: object) -> list[tuple[int, float]]:
                    nonlocal asked
                    asked += 1
                    return [(1, claimed)]

                self.policy.prepared(0.0)
                adding, asking = self.policy.is_worth_adding, self.policy.is_worth_asking
                (draft,) = grow([Root(0, proposals, nodes, 99)], adding, nodes, asking)
                size = len(draft)
                self.policy.grown(asked * propose, asked)
            tokens = 1
            while tokens < size and self._random.random() < right:
                tokens += 1
            drafting = asked * propose
            seconds = (plain + node * (size - 1)) * noise() + drafting
            self.policy.record(size, tokens, seconds, drafting)
            self.sizes.append(size)
            self.tokens += tokens
            self.seconds += seconds
        return self.sizes[-passes:]


def test_free_draft_tokens_fill_the_draft() -> None:
    sizes = Simulation().run(400, node=0.0, claimed=0.9)
    assert sizes[:FIRST_PLAIN] == [1] * FIRST_PLAIN
    assert sizes[FIRST_PLAIN] == TRIAL_NODES
    assert set(sizes[20:]) == {1, DRAFT_NODES}
    assert sizes[80:].count(1) == pytest.approx(320 / PLAIN_EVERY, abs=1)


def test_plain_passes_are_timed_often_at_first() -> None:
    """They are slow while memory fills; drafts that lose would seem to win until the next one."""
    sizes = Simulation().run(400, node=0.0, claimed=0.9)
    plain = [place for place, size in enumerate(sizes) if size == 1]
    between = [b - a - 1 for a, b in pairwise(plain) if b - a > 1]
    assert between[:6] == [4, 8, 16, 32, 64, 64]
    assert set(between[6:]) == {64}


@pytest.mark.parametrize(("node", "chance"), [(0.1, 0.9), (0.3, 0.8), (0.1, 0.5), (0.02, 0.95)])
def test_a_draft_is_as_large_as_pays(node: float, chance: float) -> None:
    rates = [sum(chance**depth for depth in range(n)) / (1 + node * (n - 1)) for n in range(1, 17)]
    found = Simulation().run(300, node=node, claimed=chance)[-100:]
    assert np.median(found) == 1 + int(np.argmax(rates))


@pytest.mark.parametrize("node", [0.02, 0.1, 0.25])
def test_nodes_go_where_they_bring_most_over_all_texts(node: float) -> None:
    """Texts whose draft tokens are right with other chances share a pass: the best sizes by trying all."""
    chances, random = (0.95, 0.7, 0.3), np.random.default_rng(1)

    def tokens(sizes: Sequence[int]) -> float:
        return sum(sum(chance**depth for depth in range(n)) for chance, n in zip(chances, sizes, strict=True))

    def rate(sizes: Sequence[int]) -> float:
        return tokens(sizes) / (1 + node * (sum(sizes) - len(sizes)))

    every = (sizes for sizes in product(range(1, 15), repeat=3) if sum(sizes) <= DRAFT_NODES)
    best = max(every, key=rate)
    policy, found = TreePolicy(DRAFT_NODES, texts=3), list[tuple[int, ...]]()
    for _ in range(400):
        sizes, limit = (1, 1, 1), policy.begin()
        if limit > 3:
            roots = [Root(0, lambda path, chance=chance: [(1, chance)], 14, 99) for chance in chances]  # type: ignore[misc]
            policy.prepared(0.0)
            drafts = grow(roots, policy.is_worth_adding, limit, policy.is_worth_asking)
            sizes = tuple(map(len, drafts))
        right = (random.random(n - 1) < chance for chance, n in zip(chances, sizes, strict=True))
        drawn = sum(1 + int(np.cumprod(its).sum()) for its in right)
        policy.record(sum(sizes), drawn, 1 + node * (sum(sizes) - 3))
        found.append(sizes)
    often = Counter(sizes for sizes in found[100:] if sizes != (1, 1, 1)).most_common(1)[0][0]
    assert rate(often) > 0.97 * rate(best)
    assert rate(often) > 1.05 * rate((1, 1, 1))
    assert often[0] > often[2]
    assert "over 3 texts" in policy.decision


def test_no_draft_takes_more_than_its_own_room() -> None:
    roots = [Root(at, lambda path: [(1, 0.9), (2, 0.1)], most, 3) for at, most in enumerate((4, 1, 2))]
    drafts = grow(roots, lambda nodes, chance: True, 16)
    assert [len(draft) for draft in drafts] == [4, 1, 2]
    assert [draft.tokens[0] for draft in drafts] == [0, 1, 2]
    assert [len(it) for it in grow(roots, lambda nodes, chance: True, 4)] == [2, 1, 1]


def test_asking_the_drafter_costs_too() -> None:
    free = Simulation().run(200, node=0.02, claimed=0.9)[-50:]
    dear = Simulation().run(200, node=0.02, claimed=0.9, propose=0.15)[-50:]
    assert 2 < np.median(dear) < np.median(free)
    hopeless = Simulation()
    assert hopeless.run(400, node=0.02, claimed=0.05, propose=0.3)[50:].count(1) > 300
    assert hopeless.seconds < 1.1 * 400


def test_drafts_that_lose_end_within_a_few_tokens() -> None:
    simulation = Simulation()
    simulation.run(100, claimed=0.9)
    before = simulation.seconds
    found = simulation.run(200, claimed=0.9, right=0.0)
    # What is claimed is never right: only the clock says so.
    assert sum(size > 1 for size in found[:48]) < 12
    assert simulation.seconds - before < 1.12 * 200


def test_back_offs_double_while_trials_lose_and_shorten_when_one_wins() -> None:
    simulation = Simulation()
    found = simulation.run(9000, claimed=0.8, node=0.3, right=0.0)
    drafts = [place for place, size in enumerate(found) if size > 1]
    lengths = [b - a - 1 for a, b in pairwise(drafts) if b - a > 2]
    # Later ones alternate with drafts that measure the time of a node.
    assert lengths[:4] == [48, 96, 192, 384]
    assert max(lengths) == MAX_BACK_OFF
    assert simulation.seconds < 1.005 * 9000
    simulation.run(2 * MAX_BACK_OFF, claimed=0.9, node=0.1)
    found = simulation.run(2 * STALE_PASSES, claimed=0.9, node=0.1, right=0.0)
    assert max(found[60:]) > 1, "the next back-off is short again"


def test_hopeless_drafts_are_hardly_ever_tried() -> None:
    """The drafter knows how unlikely its draft tokens are."""
    simulation = Simulation()
    found = simulation.run(4000, claimed=0.02, node=0.5, propose=0.001)
    assert sum(size > 1 for size in found) <= 4000 // STALE_PASSES + 1
    assert simulation.seconds < 1.01 * 4000
    assert simulation.policy.is_throttling
    simulation = Simulation()
    found = simulation.run(4000, claimed=0.15, node=0.5)
    assert sum(size > 1 for size in found) <= 4000 // STALE_PASSES + 1
    assert simulation.seconds < 1.005 * 4000


def test_another_regime_is_found_out() -> None:
    """Nodes were dear and become cheap, as when a budget shrinks and passes wait for flash; and back."""
    simulation = Simulation()
    assert max(simulation.run(200, node=1.0, claimed=0.6)[60:]) <= 2
    cheap = simulation.run(STALE_PASSES + 100, plain=10.0, node=0.1, claimed=0.6)
    assert np.median(cheap[-50:]) >= 6
    dear = simulation.run(3 * PLAIN_EVERY, plain=1.0, node=1.0, claimed=0.6)
    assert sum(size > 2 for size in dear[-PLAIN_EVERY:]) < 6


def test_slow_passes_now_and_then_change_nothing() -> None:
    random = np.random.default_rng(3)
    simulation = Simulation()
    found = simulation.run(600, node=0.1, claimed=0.9, noise=lambda: 30.0 if random.random() < 0.02 else 1.0)
    assert np.median(found[100:]) > 5
    assert sum(size > 1 for size in found[100:]) > 300


def test_pass_times_are_a_line() -> None:
    times = PassTime()
    for size in [1, 4, 8, 1, 2, 5] * 20:
        times.record(size, 2.0 + 0.25 * (size - 1))
    assert times.seconds(1) == pytest.approx(2.0)
    assert times.node_seconds == pytest.approx(0.25)
    for _ in range(500):
        times.record(1, 2.0)
    assert times.node_seconds == pytest.approx(0.25), "what can't be seen stays as it was"
    times.record(1, 100.0)
    assert times.seconds(1) < 2.5
    for _ in range(3):
        times.record(1, 20.0)
        times.record(1, 2.0)
    assert times.seconds(1) < 2.5, "outliers that don't stay"
    for _ in range(8):
        times.record(1, 20.0)
    assert times.seconds(1) == pytest.approx(20.0, rel=0.2)
    assert times.node_seconds > 1.0, "all passes are slower, these included"
    for _ in range(100):
        times.record(1, 20.0)
        times.record(3, 20.0)
    assert times.node_seconds < 0.5
    for _ in range(8):
        times.record(1, 2.0)
    assert times.seconds(1) == pytest.approx(2.0, rel=0.2)


def test_a_back_off_knows_nothing_before_it_has_seen_plain_passes() -> None:
    back_off = BackOff()
    assert back_off.is_active
    for _ in range(FIRST_PLAIN):
        assert not back_off.allows_draft
        back_off.record_plain(1.0)
    assert back_off.allows_draft
    assert back_off.is_on_trial
    for _ in range(MIN_BACK_OFF):
        back_off.record_draft(3, 1.5)
    assert not back_off.is_on_trial
    assert not back_off.is_active


def test_looking_for_draft_tokens_is_rare_where_it_costs_and_finds_nothing() -> None:
    """At most a two-hundredth of the time, or one pass of sixteen where that is more."""
    for asking, every in ((0.0001, 1), (0.02, 4), (0.14, 16)):
        simulation = Simulation()
        for _ in range(600):
            if not simulation.policy.throttle():
                simulation.run(1, claimed=0.01, propose=asking)
        looked = 0
        for _ in range(240):
            if not simulation.policy.throttle():
                simulation.run(1, claimed=0.01, propose=asking)
                looked += 1
        assert looked == pytest.approx(240 / every, abs=8)
    simulation = Simulation()
    simulation.run(100, claimed=0.9, node=0.05)
    assert not any(simulation.policy.throttle() for _ in range(20)), "not while drafts pay"


def test_a_back_off_ends_without_looking() -> None:
    simulation = Simulation()
    simulation.run(60, claimed=0.9, right=0.0, node=0.5, propose=0.1)
    assert simulation.policy.is_backing_off
    passes = 0
    while simulation.policy.is_backing_off:
        passes += 1
        if not simulation.policy.throttle():
            simulation.run(1, claimed=0.9, right=0.0, node=0.5)
    assert passes <= 2 * MIN_BACK_OFF
    assert max(simulation.run(8, claimed=0.9, node=0.05)) > 1


def test_throttling_is_not_backing_off() -> None:
    simulation = Simulation()
    simulation.run(FIRST_PLAIN + 10, claimed=0.01, propose=0.02)
    assert simulation.policy.is_throttling
    assert not simulation.policy.is_backing_off
    assert max(simulation.run(5, claimed=0.95, node=0.05)) > 1
    assert not simulation.policy.is_throttling


def test_chances_are_calibrated() -> None:
    """An overconfident drafter gets shorter drafts, an underconfident one longer drafts."""
    calibrated = np.median(Simulation().run(400, node=0.1, claimed=0.6)[-100:])
    overconfident = np.median(Simulation().run(400, node=0.1, claimed=0.9, right=0.6)[-100:])
    underconfident = np.median(Simulation().run(400, node=0.1, claimed=0.35, right=0.6)[-100:])
    assert overconfident < np.median(Simulation().run(400, node=0.1, claimed=0.9)[-100:])
    assert underconfident > np.median(Simulation().run(400, node=0.1, claimed=0.35)[-100:])
    assert abs(calibrated - overconfident) < 6


def test_a_drafter_hears_the_whole_text_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it misses while nothing is asked of it, it hears before it is asked again."""

    class Listening(Drafter):
        def __init__(self) -> None:
            self.text: list[int] = []

        def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
            self.text = list(text)

        def observe(self, token: int, logits: Float32 | None) -> None:
            self.text.append(token)

        def propose(self, path: Sequence[int]) -> Proposals:
            assert self.text == written
            asked.append(len(written))
            return []

    throttled = np.random.default_rng(0).random(400) < 0.6
    monkeypatch.setattr(TreePolicy, "throttle", lambda policy: bool(throttled[len(written)]))
    monkeypatch.setattr(TreePolicy, "begin", lambda policy: 4)
    drafting, asked = Drafting(Listening(), DRAFT_NODES), list[int]()
    for start in (2, 150):
        written = list(range(start))
        text = drafting.begin(written, SamplingConfig())
        assert text is not None
        for token in range(100):
            draft = proposed(drafting, text, written[-1], 16)
            text.drew(token, np.zeros(4, np.float32))
            written.append(token)
            drafting.observe(text, outcome(draft, 1.0))
        drafting.end(text)
    assert len(asked) > 50


def test_a_drafter_computes_while_that_is_worth_its_time() -> None:
    """A pass of 1 s; a computed token is right with 0.8, and worth a draft's pass of up to 0.8 s."""
    for seconds, worth in ((0.05, [True, True, True]), (0.6, [True, False, False]), (0.9, [False] * 3)):
        policy = TreePolicy(DRAFT_NODES)
        for _ in range(FIRST_PLAIN):
            policy.begin()
            policy.record(1, 1, 1.0)
        policy.computed(3 * seconds, 3)
        policy.begin()
        decided = []
        for depth in range(3):
            decided.append(policy.is_worth_computing(1 + depth, 0.8 ** (depth + 1)))
            policy.is_worth_adding(1 + depth, 0.8 ** (depth + 1))
        assert decided == worth, seconds


def test_it_says_what_it_decided_and_why() -> None:
    simulation = Simulation()
    assert simulation.policy.decision == "no drafts: no pass was timed"
    simulation.run(FIRST_PLAIN, plain=0.002)
    assert simulation.policy.decision == "no drafts: no draft token was likely enough"
    simulation.run(200, plain=0.002, node=0.0002, claimed=0.8)
    assert re.fullmatch(
        r"drafts of [4-9]\.\d tokens; a draft token takes 10 % of a plain pass of 2\.00 ms",
        simulation.policy.decision,
    )
    simulation.run(40, plain=0.002, node=0.0018, claimed=0.8, right=0.3)
    assert re.fullmatch(
        r"drafts back off: they gave 0\.\d\d times plain decoding's tokens per second; "
        r"a draft token takes \d\d % of a plain pass of \d\.\d\d ms",
        simulation.policy.decision,
    )


def test_short_passes_are_left_alone_until_they_are_longer() -> None:
    """Nothing but every eighth pass's time is looked at, and the drafter begins with all of the text."""

    class Listening(Drafter):
        text: tuple[int, ...] = ()

        def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
            self.text = tuple(text)

        def propose(self, path: Sequence[int]) -> Proposals:
            return []

    drafter = Listening()
    drafting, written = Drafting(drafter, 8, min_pass_seconds=0.001), [1, 2]

    def decode(seconds: float) -> None:
        draft = proposed(drafting, text, written[-1], 8)
        text.drew(3, np.zeros(4, np.float32))
        written.append(3)
        drafting.observe(text, outcome(draft, seconds))

    def decision() -> str:
        return drafting.stats(text).decision

    def is_disabled() -> bool:
        return decision().startswith("no drafts: a plain pass takes")

    begun = drafting.begin(written, SamplingConfig())
    assert begun is not None
    text = begun
    for _ in range(20):
        assert is_disabled()
        decode(0.0005)
    assert drafter.text == ()
    assert decision() == "no drafts: a plain pass takes 0.50 ms, and drafting pays from 1.00 ms on"
    passes = 0
    while is_disabled():
        decode(0.01)
        passes += 1
    assert passes < 80
    before = tuple(written)
    decode(0.01)
    assert drafter.text == before
    while not is_disabled():
        decode(0.0005)
