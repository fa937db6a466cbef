"""The decode loop over models whose next token is known in closed form, and a byte tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import ReferenceBackend
from ondevice.config import SamplingConfig
from ondevice.errors import BudgetError, BundleError, ContextOverflowError, UsageError
from ondevice.generate import Event, Generator
from ondevice.meter import Counters
from ondevice.model.sequence_state import KVLayout, SequenceState, allocate_block, common_prefix
from ondevice.model.transformer import Transformer
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.drafting import Drafting
from ondevice.speculation.tree import Draft, Proposals, plain
from ondevice.stats import GenerationStats
from ondevice.tokenizer import LeadingSpace
from tests.support.engines import always_draft
from tests.support.sources import RandomWeights, tiny_config

EOS = 256
CONFIG = tiny_config(hidden_size=257, vocab_size=257, num_layers=3)


class ByteTokenizer:
    """One token per byte; 256 ends the text. An opening space is dropped, as sentencepiece does."""

    vocab_size = 257
    bos_id = None
    eos_ids = (EOS,)
    add_bos = False
    leading_space: LeadingSpace = "one"

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, at_start: bool = True) -> str:
        text = b"".join(map(self.token_bytes, ids)).decode(errors="replace")
        return text.removeprefix(" ") if at_start else text

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == EOS else bytes([token])

    def begins_word(self, token: int) -> bool:
        return token == ord(" ")

    def piece(self, token: int) -> str:
        return repr(self.token_bytes(token))

    def special_spans(self, text: str) -> list[tuple[int, int, int]]:
        return []


def successor_model(after: dict[int, int], broken: int | None = None) -> Transformer:
    """A real model whose likeliest next token depends on the last one alone: after[t], else t + 1.

    Embeddings are unit vectors, attention and feed-forward contribute nothing, the head is a permutation.
    """
    weights = RandomWeights(CONFIG)
    for name, matrix in weights.matrices.items():
        if name not in ("embedding", "head"):
            matrix[:] = 0
    weights.vectors["final_norm"][:] = 1
    weights.matrices["embedding"][:] = np.eye(257)
    weights.matrices["head"][:] = 0
    for token in range(257):
        weights.matrices["head"][after.get(token, (token + 1) % 257), token] = 1
    if broken is not None:
        # Beyond float32 once it is multiplied, and only behind that token.
        weights.vectors["final_norm"][broken] = 3e38
    return weights.load(ReferenceBackend())


class CountingTransformer:
    """Passes on to a model and remembers how many tokens each pass had."""

    def __init__(self, inner: Transformer) -> None:
        self.config = inner.config
        self.backend = inner.backend
        self.checked_logits = inner.checked_logits
        self.logits = inner.logits
        self.accept = inner.accept
        self.keep = inner.keep
        self.check_finite = inner.check_finite
        self.lengths: list[int] = []
        self._inner = inner

    def run(self, batch: ForwardBatch, *rest: Any, **more: Any) -> Any:
        self.lengths.append(len(batch.tokens))
        return self._inner.run(batch, *rest, **more)

    def every_logits(self, batch: ForwardBatch, *rest: Any) -> Any:
        self.lengths.append(len(batch.tokens))
        return self._inner.every_logits(batch, *rest)


def generator(after: dict[int, int] | None = None, **changes: Any) -> Generator:
    model: Any = CountingTransformer(successor_model(after or {}))
    plain = Generator(model, ByteTokenizer(), frozenset({EOS}), max_context=256)
    return replace(plain, **changes)


def cache() -> SequenceState:
    return SequenceState(KVLayout(CONFIG))


def passes(generator: Generator) -> list[int]:
    model: Any = generator.transformer
    lengths: list[int] = model.lengths
    return lengths


def run(
    generator: Generator, prompt: str | list[int], kv: SequenceState | None = None, **sampling: Any
) -> tuple[str, list[int], Event]:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    events = list(generator.stream(ids, cache() if kv is None else kv, SamplingConfig(**sampling)))
    assert all(event.token is not None and event.finish_reason is None for event in events[:-1])
    assert events[-1].token is None
    tokens = [event.token for event in events[:-1] if event.token is not None]
    return "".join(event.text for event in events), tokens, events[-1]


def stats(event: Event) -> GenerationStats:
    assert event.stats is not None
    return event.stats


def test_greedy_text_is_the_alphabet() -> None:
    text, tokens, last = run(generator(), "xyza", max_tokens=5)
    assert (text, tokens, last.finish_reason) == ("bcdef", list(b"bcdef"), "length")
    assert stats(last).generated_tokens == 5


def test_end_of_text_is_not_part_of_the_text() -> None:
    text, tokens, last = run(generator({ord("c"): EOS}), "a", max_tokens=50)
    assert (text, tokens, last.finish_reason) == ("bc", list(b"bc"), "stop")
    assert (stats(last).generated_tokens, stats(last).accepted_tokens_per_pass) == (2, 1.0)


def test_a_stop_string_cuts_the_text_before_it() -> None:
    engine = generator()
    text, tokens, last = run(engine, "a", max_tokens=50, stop=("ef", "zz"))
    assert (text, last.finish_reason) == ("bcd", "stop")
    assert bytes(tokens) == b"bcdef"
    assert len(passes(engine)) == 5


def test_a_beginning_of_a_stop_string_is_held_back_and_then_given_out() -> None:
    events = list(generator().stream(list(b"a"), cache(), SamplingConfig(max_tokens=4, stop=("dez",))))
    assert [event.text for event in events] == ["b", "c", "", "", "de"]


def test_characters_of_several_bytes_are_whole() -> None:
    after = {ord("a"): 0xC3, 0xC3: 0xA9, 0xA9: ord("!")}
    events = list(generator(after).stream(list(b"a"), cache(), SamplingConfig(max_tokens=3)))
    assert [event.text for event in events] == ["", "é", "!", ""]
    cut = list(generator(after).stream(list(b"a"), cache(), SamplingConfig(max_tokens=1)))
    assert "".join(event.text for event in cut) == "\N{REPLACEMENT CHARACTER}"


def test_a_space_is_dropped_where_a_text_opens_and_kept_where_one_goes_on() -> None:
    after = {ord("a"): ord(" "), EOS: ord(" "), ord(" "): ord("!")}
    assert run(generator(after), "a", max_tokens=2)[0] == " !"
    assert run(generator(after), [EOS], max_tokens=2)[0] == "!"


def test_the_prompt_runs_in_fixed_chunks() -> None:
    engine = generator(prefill_chunk=7)
    kv = cache()
    run(engine, "a" * 21, kv, max_tokens=3)
    assert passes(engine) == [7, 7, 7, 1, 1]
    assert kv.tokens == list(b"a" * 21 + b"bc")


def test_the_next_turn_reuses_the_common_prefix() -> None:
    engine, kv = generator(prefill_chunk=4), cache()
    first, *_ = run(engine, "hello", kv, max_tokens=3)
    passes(engine).clear()
    again, _, last = run(engine, "hello" + first + "wxyz", kv, max_tokens=3)
    assert passes(engine) == [4, 1, 1, 1]
    assert stats(last).prompt_tokens == len("hello" + first + "wxyz")
    assert again == "{|}"
    passes(engine).clear()
    run(engine, "help", kv, max_tokens=1)
    assert (passes(engine), kv.tokens) == ([1], list(b"help"))
    passes(engine).clear()
    run(engine, "help", kv, max_tokens=1)
    assert (passes(engine), kv.tokens) == ([1], list(b"help"))


def test_reuse_does_not_change_the_tokens() -> None:
    weights = RandomWeights(CONFIG, seed=5)
    plain = Generator(weights.load(ReferenceBackend()), None, frozenset(), 256)
    prompt = np.random.default_rng(1).integers(0, 257, 40).tolist()
    kv = cache()
    _, first, _ = run(plain, prompt[:20], kv, max_tokens=5)
    assert run(plain, prompt, kv, max_tokens=9)[1] == run(plain, prompt, max_tokens=9)[1]
    assert first != run(plain, prompt, max_tokens=5)[1]


def test_a_full_context_ends_with_length() -> None:
    text, tokens, last = run(generator(max_context=8), "abcde", max_tokens=50)
    assert (text, len(tokens), last.finish_reason) == ("fgh", 3, "length")
    text, tokens, last = run(generator(max_context=5), "abcde", max_tokens=50)
    assert (text, tokens, last.finish_reason) == ("", [], "length")


def test_no_tokens_wanted_still_fills_the_cache() -> None:
    kv = cache()
    _, tokens, last = run(generator(), "abc", kv, max_tokens=0)
    assert (tokens, last.finish_reason, kv.tokens) == ([], "length", list(b"abc"))


def test_a_prompt_longer_than_the_context_is_refused_before_any_pass() -> None:
    engine = generator(max_context=4)
    with pytest.raises(ContextOverflowError, match="at least 5 tokens and the context holds 4"):
        engine.stream(list(b"abcde"), cache(), SamplingConfig())
    with pytest.raises(UsageError, match="no tokens"):
        engine.stream([], cache(), SamplingConfig())
    assert passes(engine) == []


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    text, tokens, _ = run(generator(tokenizer=None), "a", max_tokens=3)
    assert (text, tokens) == ("", list(b"bcd"))
    with pytest.raises(UsageError, match="tokenizer"):
        generator(tokenizer=None).stream([1], cache(), SamplingConfig(stop=("x",)))


def after_asking(times: int) -> Callable[[], bool]:
    asked: Iterator[int] = iter(range(1, 10**6))
    return lambda: next(asked) >= times


@pytest.mark.parametrize(
    ("asked", "stored", "tokens"), [(1, 0, 0), (2, 0, 0), (4, 4, 0), (7, 8, 0), (10, 9, 1)]
)
def test_cancellation_takes_effect_within_a_layer(asked: int, stored: int, tokens: int) -> None:
    """Three layers, chunks of 4: asked once per layer, so 3 times per pass."""
    kv, engine = cache(), generator(prefill_chunk=4)
    events = list(engine.stream(list(b"abcdefghi"), kv, SamplingConfig(), after_asking(asked)))
    assert (events[-1].finish_reason, kv.length, len(events) - 1) == ("cancelled", stored, tokens)
    assert events[-1].stats is not None
    text, *_ = run(engine, "abcdefghi", kv, max_tokens=2)
    assert text == "jk"


def test_closing_the_stream_leaves_a_usable_cache() -> None:
    engine, kv = generator(), cache()
    stream: Any = engine.stream(list(b"abc"), kv, SamplingConfig())
    assert next(stream).text == "d"
    assert next(stream).text == "e"
    stream.close()
    assert kv.tokens == list(b"abcd")
    assert run(engine, "abcde", kv, max_tokens=2)[0] == "fg"


def test_an_error_in_a_pass_comes_through_and_the_cache_survives() -> None:
    blocks: list[int] = []

    def allocate(nbytes: int) -> Any:
        if len(blocks) == 1:
            raise BudgetError("no more blocks", required_bytes=2 * nbytes)
        blocks.append(nbytes)
        return allocate_block(nbytes)

    kv = SequenceState(KVLayout(CONFIG), allocate)
    events = generator().stream([1] * 62, kv, SamplingConfig())
    assert [next(events).token for _ in range(3)] == [2, 3, 4]
    with pytest.raises(BudgetError):
        next(events)
    assert kv.length == 64


def test_stats_count_passes_and_what_the_counters_rose_by() -> None:
    totals = iter([Counters(100, 1.0, 0.5, 10, 20, 2, 30, 7), Counters(150, 1.5, 0.75, 16, 28, 3, 50, 9)])
    labels = GenerationStats(backend="reference", io="buffered")
    engine = generator(prefill_chunk=4, counters=lambda: next(totals), labels=labels)
    *_, last = run(engine, "abcdefghij", max_tokens=6)
    figures = stats(last)
    assert (figures.prompt_tokens, figures.generated_tokens, figures.forward_passes) == (10, 6, 3 + 5)
    assert (figures.flash_bytes_read, figures.peak_memory_bytes) == (50, 9)
    assert (figures.flash_read_seconds, figures.flash_cpu_seconds) == (0.5, 0.25)
    assert (figures.neuron_cache_hit_rate, figures.prefetch_recall, figures.prefetch_wasted_bytes) == (
        0.75,
        0.5,
        20,
    )
    assert figures.accepted_tokens_per_pass == 1.0
    assert (figures.backend, figures.io) == ("reference", "buffered")
    assert figures.time_to_first_token_seconds > 0
    assert figures.prefill_tokens_per_second > 0
    assert figures.decode_tokens_per_second > 0


def test_time_with_the_consumer_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    monkeypatch.setattr("ondevice.generate.time.perf_counter", clock)
    last = Event("")
    for event in generator().stream(list(b"a"), cache(), SamplingConfig(max_tokens=11)):
        now += 1000.0
        last = event
    assert stats(last).decode_tokens_per_second > 1.0


def test_sampling_sees_the_absolute_position_and_the_whole_history(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[int], int]] = []

    def sample(
        logits: np.ndarray,
        config: SamplingConfig,
        position: int,
        history: Sequence[int],
        allowed: None,
        prompt_tokens: int,
    ) -> int:
        seen.append((position, list(history), prompt_tokens))
        return int(logits.argmax())

    monkeypatch.setattr("ondevice.generate.sample", sample)
    run(generator(prefill_chunk=2), "xyz", max_tokens=2)
    assert seen == [(3, list(b"xyz"), 3), (4, list(b"xyz{"), 3)]


def test_logits_in_chunks_are_the_logits_in_one_pass() -> None:
    tokens = list(b"hello world")
    whole = np.concatenate(list(generator().logits(tokens, cache(), 100)))
    engine, kv = generator(prefill_chunk=8), cache()
    parts = list(engine.logits(tokens, kv, 5))
    assert passes(engine) == [8, 3]
    assert [part.shape for part in parts] == [(5, 257), (3, 257), (3, 257)]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)
    assert kv.tokens == tokens
    with pytest.raises(ContextOverflowError, match="257 tokens"):
        next(engine.logits([1] * (257 - len(tokens)), kv, 4))


def test_the_common_prefix_ends_at_the_first_difference() -> None:
    assert [common_prefix([1, 2, 3], other) for other in ([1, 2, 3, 4], [1, 2], [1, 9], [], [2])] == [
        3,
        2,
        1,
        0,
        0,
    ]


class OneToken(Drafter):
    """The same draft token with a chance of 1, behind whatever comes."""

    def __init__(self, token: int) -> None:
        self._token = token

    def propose(self, path: Sequence[int]) -> Proposals:
        return [(self._token, 0.99)]


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_what_is_broken_behind_a_wrong_draft_token_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits behind draft tokens come along with those asked for; plain decoding never sees them."""
    always_draft(monkeypatch, [4])
    broken = 200
    model: Any = CountingTransformer(successor_model({}, broken))
    alone = Generator(model, ByteTokenizer(), frozenset({EOS}), max_context=256)
    sampling = SamplingConfig(max_tokens=8)
    expected = [event.token for event in alone.stream([10], cache(), sampling)]
    drafting = replace(alone, drafting=Drafting(OneToken(broken), 4))
    assert [event.token for event in drafting.stream([10], cache(), sampling)] == expected
    with pytest.raises(BundleError, match="not finite"):
        list(drafting.stream([broken], cache(), sampling))


def test_the_path_that_a_text_likely_takes() -> None:
    draft = Draft((9, 1, 2, 3, 4), (-1, 0, 0, 2, 3), (1.0, 0.3, 0.6, 0.4, 0.1))
    assert draft.likely_path(0, 8) == [0, 2, 3]
    assert draft.likely_path(0, 2) == [0, 2]
    assert draft.likely_path(3, 8) == [3]
    assert plain(5).likely_path(0, 8) == [0]
