"""What events tell beside text: log-probabilities, with drafts as without, and the stop string."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import ondevice
from ondevice.api import Model, load
from ondevice.sampling import log_probabilities

REPEATED = "the cat sat on the mat, the dog sat on the mat, the cat sat on"


def test_they_are_the_log_softmax_likeliest_first_ties_to_the_lower_id() -> None:
    logits = np.array([1.0, 3.0, -np.inf, 3.0, 0.5], dtype=np.float32)
    own, top = log_probabilities(logits, 0, 3)
    total = np.log(np.exp(logits.astype(np.float64)).sum())
    assert own == pytest.approx(1.0 - total, abs=1e-14)
    assert [token for token, _ in top] == [1, 3, 0]
    assert [value for _, value in top] == pytest.approx([3.0 - total, 3.0 - total, 1.0 - total], abs=1e-14)
    assert log_probabilities(logits, 2, 0) == (-np.inf, ())
    assert len(log_probabilities(logits, 0, 20)[1]) == 5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_they_have_the_same_bits_with_drafts(model: Model, chat_bundle: Path, temperature: float) -> None:
    options = {"max_tokens": 24, "temperature": temperature, "seed": 4, "top_logprobs": 2}
    plain = list(model.stream(REPEATED, **options))
    with load(chat_bundle, threads=1, speculation="lookup") as drafting:
        drafted = list(drafting.stream(REPEATED, **options))
    told = [(event.token, event.logprob, event.top_logprobs) for event in plain]
    assert [(event.token, event.logprob, event.top_logprobs) for event in drafted] == told
    assert all(event.logprob is not None and len(event.top_logprobs) == 2 for event in plain[:-1])


def test_events_have_none_unless_they_are_asked_for(model: Model) -> None:
    events = list(model.stream("Once", max_tokens=3))
    assert all(event.logprob is None and event.top_logprobs == () for event in events)


@pytest.mark.parametrize("value", [-1, 21, 1.5, True, "2"])
def test_a_number_of_them_out_of_range_is_refused(model: Model, value: object) -> None:
    with pytest.raises(ondevice.UsageError, match="top_logprobs"):
        model.stream("Once", top_logprobs=value)  # type: ignore[arg-type]


def test_the_last_event_names_the_stop_string_that_ended_the_text(model: Model) -> None:
    text = model.generate("Once", max_tokens=16).text
    stop = text[4:6]
    events = list(model.stream("Once", max_tokens=16, stop=["never written", stop]))
    assert events[-1].stop == stop
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    assert list(model.stream("Once", max_tokens=4))[-1].stop is None


def test_a_session_answers_a_whole_transcript(model: Model) -> None:
    """As one that came to it turn by turn, and goes on from there."""
    grown = model.session("Be brief.")
    first = grown.respond("Hello", max_tokens=6).text
    messages = [*grown.transcript, {"role": "user", "content": "More"}]
    told = model.session()

    async def main() -> str:
        return "".join([event.text async for event in told.astream_messages(messages, max_tokens=6)])

    assert asyncio.run(main()) == grown.respond("More", max_tokens=6).text
    assert told.transcript == grown.transcript
    assert told.transcript[2]["content"] == first
