"""A second model drafts: the text stays the target's, with the same vocabulary or another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.api import load
from ondevice.backends.base import Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import Cancelled
from ondevice.config import SamplingConfig
from ondevice.errors import (
    BackendUnavailableError,
    BudgetError,
    BundleError,
    FlashReadError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from ondevice.model.sequence_state import common_prefix
from ondevice.runtime.opening import open_tokenizer
from ondevice.speculation.drafted_text import PassOutcome
from ondevice.speculation.drafters import intersection
from ondevice.speculation.drafters.intersection import MIN_SHARED, IntersectionDrafter, SharedTokens
from ondevice.speculation.drafters.lookup import Lookup
from ondevice.speculation.drafters.model import DraftContext
from ondevice.speculation.drafters.other_vocabulary import (
    OtherVocabularyDrafter,
    _ends_character,
    same_vocabulary,
)
from ondevice.speculation.drafting import DraftRequest
from ondevice.speculation.tree import DRAFT_NODES, Draft
from ondevice.tokenizer import Tokenizer
from tests.support.bundles import EOS, convert_bundle, copy_files, write_chat_checkpoint
from tests.support.chat import PROMPT, squeeze
from tests.support.engines import always_draft
from tests.support.paths import SHIPPED

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"temperature": 1.2, "repetition_penalty": 1.2, "seed": 7},
]
STATELESS = SimpleNamespace(states=None)
SAID = "The café was closed; the cat sat on the mat. The cat sat on the hat, and naïve dogs barked: 犬!"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", hidden_act="relu"), folder / "target")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    checkpoint = write_chat_checkpoint(folder / "checkpoint", num_hidden_layers=1, intermediate_size=256)
    return convert_bundle(checkpoint, folder / "draft")


@pytest.fixture
def largest_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is worth."""
    always_draft(monkeypatch, [DRAFT_NODES])


@pytest.mark.fast("itself")
@pytest.mark.parametrize("drafts", ["another", "itself", "other vocabulary", "shared tokens"])
def test_a_second_model_leaves_every_token_as_it_is(
    target: Path, draft: Path, drafts: str, largest_trees: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = {"another": draft, "itself": target}.get(drafts, SHIPPED)
    # However many tokens are shared.
    monkeypatch.setattr(intersection, "MIN_SHARED", 0.0 if drafts == "shared tokens" else 2.0)
    with (
        load(target, speculation="off") as plain,
        load(target, speculation="model", draft_model=second) as drafting,
        load(target, draft_model=str(second), sparsity="dense") as small,
    ):
        squeeze(small, small.plan.segment.least + 1)
        drafter = drafting._engine._drafting
        assert drafter is not None
        assert isinstance(drafter._drafter, IntersectionDrafter) == (drafts == "shared tokens")
        for sampling in SAMPLINGS:
            expected = plain.generate(PROMPT, max_tokens=40, logit_bias={EOS: -math.inf}, **sampling)
            for model in (drafting, small):
                found = model.generate(PROMPT, max_tokens=40, logit_bias={EOS: -math.inf}, **sampling)
                assert (found.tokens, found.text) == (expected.tokens, expected.text)
                assert found.stats.speculation == "model"
            if drafts == "itself" and not sampling:
                assert found.stats.accepted_tokens_per_pass > 2
        conversations = []
        for model in (plain, drafting):
            session = model.session()
            conversations.append([session.respond(words, max_tokens=8).tokens for words in ("A?", "And b?")])
        assert conversations[0] == conversations[1]


@pytest.mark.parametrize("drafter", ["model", "resident", "streams"])
def test_a_draft_can_be_cancelled_and_leaves_nothing_behind(
    target: Path, drafter: str, largest_trees: None
) -> None:
    """Within a layer of a draft, too; the second model's prompt is the longest."""
    folder = SHIPPED if drafter == "streams" else target
    second = {"draft_model": target} if drafter == "model" else {}
    prompt = [5 + index % 40 for index in range(200)]
    with load(folder, speculation="off") as plain:
        expected = plain.generate(tokens=prompt, max_tokens=12).tokens
    with load(folder, speculation=drafter, **second) as model:
        drafting = model._engine._drafting
        assert drafting is not None
        kv, asked = model._engine.kv.state_of(model._host.new_key()), 0

        def cancelled() -> bool:
            nonlocal asked
            asked += 1
            return asked > 1

        def draft() -> None:
            text = drafting.begin(prompt, SamplingConfig())
            assert text is not None
            batch = ForwardBatch(prompt[:-1], last_only=True)
            output = model._engine._generator.transformer.run(batch, kv)
            drafting.observe(text, PassOutcome(Draft((prompt[-2],), (-1,)), [0], output, None, False))
            (found,) = drafting.propose([DraftRequest(text, prompt[-1], kv, 8, 8, cancelled)], 8)
            assert isinstance(found, Cancelled)
            drafting.end(text)

        # What the engine does ahead when it is idle runs on its owner's thread, and may run there only.
        model._owner.call(draft)
        assert asked == 2
        assert model.generate(tokens=prompt, max_tokens=12).tokens == expected


@pytest.mark.parametrize("where", ["prepare", "propose"])
def test_a_drafter_that_fails_drafts_no_more_and_the_text_goes_on(
    target: Path, where: str, largest_trees: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with load(target, speculation="off") as plain:
        expected = plain.generate(PROMPT, max_tokens=30).tokens
    with load(target, speculation="lookup") as model:
        asked = 0

        def failing(*arguments: Any) -> None:
            nonlocal asked
            asked += 1
            raise FlashReadError("its file is gone")

        monkeypatch.setattr(Lookup, where, failing)
        answer = model.generate(PROMPT, max_tokens=30)
        assert answer.tokens == expected
        assert asked == 1
        assert answer.stats.drafting.decision == "no drafts: its file is gone"
        assert [record.getMessage() for record in caplog.records] == ["no more drafts: its file is gone"]
        assert model.generate(PROMPT, max_tokens=30).tokens == expected


def test_the_shipped_model_may_be_drafted_for_in_another_vocabulary(draft: Path, largest_trees: None) -> None:
    with (
        load(SHIPPED, speculation="off") as plain,
        load(SHIPPED, speculation="model", draft_model=draft) as drafting,
    ):
        for sampling in SAMPLINGS[::2]:
            expected = plain.generate("The cat sat on", max_tokens=30, **sampling)
            assert drafting.generate("The cat sat on", max_tokens=30, **sampling).tokens == expected.tokens


@pytest.mark.usefixtures("steady_process")
def test_the_plan_counts_the_second_model(target: Path, draft: Path) -> None:
    alone = ondevice.inspect(target, speculation="off", sparsity="dense")
    both = ondevice.inspect(target, draft_model=draft, sparsity="dense")
    second = ondevice.inspect(draft, sparsity="dense", speculation="off")
    everything = second.full_bytes - second.process_bytes
    assert both.draft_bytes == pytest.approx(everything, rel=0.05)
    needed = both.minimum_budget_bytes
    assert needed - both.process_bytes >= alone.minimum_budget_bytes - alone.process_bytes + everything
    with pytest.raises(BudgetError, match=r'drafting .*speculation="off"') as caught:
        load(target, draft_model=draft, sparsity="dense", dram_budget=needed - both.draft_bytes // 2)
    assert caught.value.required_bytes == pytest.approx(needed, rel=0.02)
    with load(target, draft_model=draft, sparsity="dense") as model:
        assert model.stream(PROMPT, max_tokens=1)


@pytest.mark.usefixtures("steady_process")
@pytest.mark.parametrize("budget", ["1MB", "20MB"])
def test_a_budget_that_is_far_too_small_names_one_with_the_second_model(
    target: Path, draft: Path, budget: str
) -> None:
    """Before tokenizers are read, and so before vocabularies can be compared."""
    options: dict[str, Any] = {"draft_model": draft, "sparsity": "dense", "threads": 1}
    with pytest.raises(BudgetError, match="not read yet") as refused:
        load(target, **options, dram_budget=budget)
    with load(target, **options, dram_budget=refused.value.required_bytes) as model:
        assert model.plan.draft_bytes > 0
        assert model.generate(PROMPT, max_tokens=4).tokens


def test_what_cannot_draft_is_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="draft_model"):
        ondevice.inspect(target, speculation="model")
    with pytest.raises(ModelNotFoundError, match="draft_model nowhere: no model called nowhere"):
        ondevice.inspect(target, speculation="model", draft_model="nowhere")
    damaged = copy_files(draft, tmp_path / "damaged")
    (damaged / "resident.safetensors").write_bytes(b"short")
    with pytest.raises(BundleError, match=r"draft_model .*damaged: resident\.safetensors has 5 bytes"):
        ondevice.inspect(target, speculation="model", draft_model=damaged)
    for speculation in ("model", "auto"):
        with pytest.raises(BackendUnavailableError, match='backend="cpu"'):
            ondevice.inspect(target, speculation=speculation, draft_model=draft, backend="reference")
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    mute = convert_bundle(checkpoint, tmp_path / "mute")
    for model, second, words in ((target, mute, "mute: .*and it was"), (mute, target, "and the model was")):
        with pytest.raises(UnsupportedModelError, match=words):
            ondevice.inspect(model, speculation="model", draft_model=second)
    with pytest.raises(UsageError, match='draft_model has no meaning without speculation="model"'):
        ondevice.inspect(target, speculation="off", draft_model="nowhere")


def test_vocabularies_are_compared_piece_by_piece(target: Path, draft: Path) -> None:
    own, same, other = (open_tokenizer(Bundle.open(bundle)) for bundle in (target, draft, SHIPPED))
    assert own is not None
    assert same is not None
    assert other is not None
    assert same_vocabulary(own, same)
    assert not same_vocabulary(own, other)


class ScriptedContext:
    """A second model that knows a text by heart."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._tokens = list(tokens)
        self._vocab_size = vocab_size

    def logits(self, tokens: Sequence[int], text: int, cancelled: Any = None) -> Float32 | None:
        logits = np.zeros(self._vocab_size, np.float32)
        if list(tokens) != self._tokens[: len(tokens)] or len(tokens) == len(self._tokens):
            return None
        logits[self._tokens[len(tokens)]] = 12.0
        return logits


@pytest.mark.parametrize("direction", ["bytes draft pieces", "pieces draft bytes"])
def test_drafted_text_becomes_the_targets_tokens(target: Path, direction: str) -> None:
    tokenizers = [open_tokenizer(Bundle.open(bundle)) for bundle in (target, SHIPPED)]
    own, theirs = tokenizers if direction == "bytes draft pieces" else tokenizers[::-1]
    assert own is not None
    assert theirs is not None
    model: Any = SimpleNamespace(tokenizer=own, target_tokenizer=theirs, kv=STATELESS, close=lambda: None)
    text, vocab_size = theirs.encode(SAID), max(own.encode(SAID)) + 1
    drafted = right = 0
    for length in range(1, len(text)):
        drafter = OtherVocabularyDrafter(model)
        drafter._context = ScriptedContext(own.encode(SAID), vocab_size)  # type: ignore[assignment]
        drafter.begin(text[:length], SamplingConfig())
        drafter.prepare(None, 16, lambda: False)  # type: ignore[arg-type]
        path: list[int] = []
        while found := list(drafter.propose(path)):
            ((token, chance),) = found
            assert 0.5 < chance <= 1.0
            path.append(token)
        drafted += len(path)
        right += common_prefix(path, text[length:], len(path))
    # Where a token of the second model spans the text's end it says nothing; a draft may end within a word.
    assert drafted > 2 * len(text)
    assert right > 0.9 * drafted


class TextContext:
    """A model that surely says how `said` goes on, whatever tokens the text up to there consists of."""

    def __init__(self, tokenizer: Tokenizer, said: str) -> None:
        self.tokenizer, self.said = tokenizer, tokenizer.encode(said)

    def logits(self, tokens: Sequence[int], text: int, cancelled: Any = None) -> Float32 | None:
        assert list(tokens) == self.said[: len(tokens)]
        logits = np.zeros(self.tokenizer.vocab_size, np.float32)
        logits[self.said[len(tokens)]] = 20
        return logits


def test_shared_tokens_are_drafted_as_they_are(target: Path) -> None:
    """The second model has all of the target's tokens but two, under other numbers."""
    theirs = _tokenizer(SHIPPED)
    missing = theirs.encode(SAID)[20]

    class Shifted:
        """The same pieces behind seven without bytes; one token is another one."""

        vocab_size, eos_ids, leading_space = theirs.vocab_size + 7, (), theirs.leading_space

        def token_bytes(self, token: int) -> bytes:
            if token < 7:
                return b""
            return b"~~~~" if token - 7 == missing else theirs.token_bytes(token - 7)

        def begins_word(self, token: int) -> bool:
            return token >= 7 and theirs.begins_word(token - 7)

        def encode(self, text: str, **options: Any) -> list[int]:
            return [token + 7 for token in theirs.encode(text, **options)]

    own: Any = Shifted()
    model: Any = SimpleNamespace(tokenizer=own, target_tokenizer=theirs, kv=STATELESS, close=lambda: None)
    shared = SharedTokens.of(model)
    assert MIN_SHARED < shared.share < 1
    for ours, others in shared.ids.tolist():
        assert theirs.token_bytes(ours) == own.token_bytes(others)
    assert missing not in shared.ids[:, 0]
    drafter = IntersectionDrafter(model, shared)
    drafter._context = TextContext(own, SAID)  # type: ignore[assignment]
    text = theirs.encode(SAID)
    at = 1
    drafter.begin(text[:at], SamplingConfig(temperature=0.8, seed=3))
    right = 0
    while at < len(text) - 4:
        drafter.prepare(None, 16, lambda: False)  # type: ignore[arg-type]
        assert drafter._tokens == own.encode(SAID)[:at]
        path: list[int] = []
        while len(path) < 3 and text[at + len(path)] != missing:
            proposed = [token for token, _ in drafter.propose(path)]
            assert missing not in proposed
            assert len(set(proposed)) == len(proposed)
            right += proposed[0] == text[at + len(path)]
            path.append(text[at + len(path)])
        for token in text[at : at + max(1, len(path))]:
            drafter.observe(token, np.zeros(1, np.float32))
        at += max(1, len(path))
    assert right > 0.95 * (len(text) - 8)


def test_the_second_model_follows_the_text(target: Path) -> None:
    """Accepted drafts are its own tokens; the rest is encoded behind a seam, as if all had been at once."""
    own, theirs = (_tokenizer(bundle) for bundle in (target, SHIPPED))
    model: Any = SimpleNamespace(tokenizer=theirs, target_tokenizer=own, kv=STATELESS, close=lambda: None)
    drafter = OtherVocabularyDrafter(model)
    said = SAID.encode() * 3
    text = own.encode(SAID * 3, add_bos=False)
    drafter.begin(text[:5], SamplingConfig())
    for place in range(5, len(text), 3):
        drafter.prepare(None, 16, lambda: False)  # type: ignore[arg-type]
        if _ends_character(said[:place]):
            assert theirs.decode(drafter._tokens) == said[:place].decode()
        for token in text[place : place + 3]:
            drafter.observe(token, None)
    drafter.begin(text[:9], SamplingConfig())
    drafter.prepare(None, 16, lambda: False)  # type: ignore[arg-type]
    assert drafter._tokens == theirs.encode(said[:9].decode())


def _tokenizer(bundle: Path) -> Tokenizer:
    tokenizer = open_tokenizer(Bundle.open(bundle))
    assert tokenizer is not None
    return tokenizer


def test_the_second_models_cache_keeps_what_it_can(target: Path) -> None:
    with load(target, draft_model=target) as model:
        drafting = model._engine._drafting
        assert drafting is not None
        second: Any = drafting._drafter
        context: DraftContext = second._context

        def logits(tokens: list[int]) -> Any:
            """On the thread that a model may run on."""
            return model._owner.call(lambda: context.logits(tokens, len(tokens)))

        whole = logits([1, 2, 3, 4, 5, 6])
        assert second._model.kv.tokens == [1, 2, 3, 4, 5, 6]
        again = logits([1, 2, 3, 9])
        assert second._model.kv.tokens == [1, 2, 3, 9]
        logits([7])
        assert logits([1, 2, 3, 9]).tobytes() == again.tobytes()
        assert logits([1, 2, 3, 4, 5, 6]).tobytes() == whole.tobytes()
        assert logits([]) is None
        assert logits([10**6]) is None
        assert logits([1] * 10_000) is None


def test_the_common_prefix_ends_at_the_first_difference_or_the_limit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        a = rng.integers(0, 2, rng.integers(0, 12)).tolist()
        b = rng.integers(0, 2, rng.integers(0, 12)).tolist()
        most = int(rng.integers(0, 12))
        shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_prefix(a, b, most) == min(shared, most)
