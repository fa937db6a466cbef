"""Messages between ranks: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.token_tree import TokenTree
from ondevice.distributed.messages import Change, Message, PassMessage, SequenceTokens, pack, unpack
from ondevice.errors import RankError
from ondevice.model.layer_range import PassState
from ondevice.model_config.part import part_config
from tests.support.small_models import MODELS

CONFIG = part_config(MODELS["dense"], 3, 5, embeds=False, heads=False)
STREAMS = 2
BEHIND = ("drafted", "prompt", "streams")
"""Messages to a rank that has later stream layers than the first."""


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).random((count, CONFIG.hidden_size), np.float32)


TREE = ForwardBatch([7, 8, 9, 4], TokenTree([-1, 0, 0, 1]), drafted=range(1, 4))
CHANGES = (
    Change("cut", 3, 17),
    Change("fork", 3, 4),
    Change("expect", 4, 200),
    Change("keep", 3, 5, (0, 2)),
    Change("accept", 0, 0, (0, 3)),
    Change("mark", 3, 40),
)
MESSAGES = {
    "tree": Message(
        "pass",
        CHANGES,
        PassMessage((SequenceTokens(3, 12, TREE),), PassState([rows(4)], tapped=(rows(4),)), (0, 5), (1, 3)),
    ),
    "drafted": Message(
        "pass",
        (),
        PassMessage(
            (SequenceTokens(3, 12, TREE),),
            PassState([rows(6)], None, True, rows(8), (rows(4),)),
            (2, 3),
            (1,),
        ),
    ),
    "texts": Message(
        "pass",
        (),
        PassMessage(
            (SequenceTokens(0, 3, ForwardBatch([5, 6])), SequenceTokens(1, 0, ForwardBatch([9]))),
            PassState([rows(3)]),
        ),
    ),
    "prompt": Message(
        "pass",
        (),
        PassMessage(
            (SequenceTokens(0, 0, ForwardBatch([5, 6], last_only=True, silent=True)),),
            PassState([rows(2)], branches=rows(2)),
            (),
            None,
            True,
        ),
    ),
    "streams": Message(
        "pass",
        (),
        PassMessage(
            (SequenceTokens(0, 9, ForwardBatch((), stream_rows=STREAMS, resident_only=True)),),
            PassState([rows(2)]),
        ),
    ),
    "result": Message("result", (), None, PassState([rows(1)], tapped=(rows(3),))),
    "changes": Message("changes", CHANGES),
    "end": Message("end"),
}


def unpacked(name: str, header: bytes, arrays: list[Any]) -> Message:
    return unpack(header, arrays, CONFIG, STREAMS, name in BEHIND)


@pytest.mark.parametrize("name", MESSAGES)
def test_what_goes_in_comes_out(name: str) -> None:
    message = MESSAGES[name]
    found = unpacked(name, *pack(message))
    assert (found.kind, found.changes) == (message.kind, message.changes)
    assert pack(found)[0] == pack(message)[0]
    assert [it.tobytes() for it in pack(found)[1]] == [it.tobytes() for it in pack(message)[1]]
    if message.passed is not None and found.passed is not None:
        assert list(found.passed.batch.tokens) == list(message.passed.batch.tokens)
        assert found.passed.streamed == message.passed.streamed


def _set(*path: Any) -> Callable[[Any], None]:
    """Sets the value at a path of keys, the last of them."""

    def change(header: Any) -> None:
        *keys, last, value = path
        for key in keys:
            header = header[key]
        header[last] = value

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tree", _set("kind", "other")),
        ("tree", _set("extra", 1)),
        ("tree", _set("changes", 0, "kind", "drop")),
        ("tree", _set("changes", 0, "value", -1)),
        ("tree", _set("changes", 3, "rows", [2, 0])),
        ("tree", _set("changes", [{}])),
        ("tree", _set("changes", "none")),
        ("tree", _set("pass", "parts", [])),
        ("tree", _set("pass", "parts", 0, "tokens", 5)),
        ("tree", _set("pass", "parts", 0, "tokens", 3)),
        ("tree", _set("pass", "parts", 0, "tree", False)),
        ("tree", _set("pass", "parts", 0, "drafted", [4])),
        ("tree", _set("pass", "parts", 0, "drafted", [3, 1])),
        ("tree", _set("pass", "parts", 0, "position", 1.5)),
        ("tree", _set("pass", "taps", [5, 0])),
        ("tree", _set("pass", "stream_rows", 2)),
        ("tree", _set("pass", "streamed", "rows", [4])),
        ("tree", _set("pass", "streamed", "rows", [3, 1])),
        ("tree", _set("pass", "streamed", "extra", 1)),
        ("tree", _set("state", "copies", 2)),
        ("tree", _set("state", "copies", 0)),
        ("tree", _set("state", "inputs", True)),
        ("tree", _set("state", "tapped", 0)),
        ("tree", _set("state", "tapped", 9)),
        ("tree", _set("state", "entered", True)),
        ("tree", _set("pass", "taps", [0, 2])),
        ("tree", _set("pass", "taps", [3, 5])),
        ("prompt", _set("pass", "branches", False)),
        ("drafted", _set("pass", "taps", [3])),
        ("drafted", _set("pass", "taps", [1, 2])),
        ("drafted", _set("state", "entered", False)),
        ("drafted", _set("pass", "streamed", None)),
        ("drafted", _set("pass", "streamed", "rows", [])),
        ("drafted", _set("pass", "streamed", "rows", [1, 2])),
        ("texts", _set("pass", "taps", [1])),
        ("texts", _set("pass", "branches", True)),
        ("streams", _set("pass", "stream_rows", 1)),
        ("result", _set("pass", {})),
        ("end", _set("state", {})),
    ],
)  # fmt: skip
def test_a_header_that_says_what_can_not_be(name: str, change: Callable[[Any], None]) -> None:
    header, arrays = pack(MESSAGES[name])
    fields = json.loads(header)
    change(fields)
    with pytest.raises(RankError, match="another rank sent what it mustn't"):
        unpacked(name, json.dumps(fields).encode(), arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop(),
        lambda arrays: arrays.append(arrays[0]),
        lambda arrays: arrays.__setitem__(0, arrays[0].astype(np.float32)),
        lambda arrays: arrays.__setitem__(0, arrays[0] + CONFIG.vocab_size),
        lambda arrays: arrays.__setitem__(0, arrays[0] - 99),
        lambda arrays: arrays.__setitem__(1, arrays[1] + 9),
        lambda arrays: arrays.__setitem__(2, arrays[2][:, 1:]),
        lambda arrays: arrays.__setitem__(2, arrays[2][1:]),
        lambda arrays: arrays.__setitem__(2, arrays[2].astype(np.float16)),
        lambda arrays: arrays.__setitem__(2, arrays[2].reshape(-1)),
    ],
)
def test_arrays_that_the_model_can_not_have(change: Callable[[list[Any]], Any]) -> None:
    header, arrays = pack(MESSAGES["tree"])
    change(arrays)
    with pytest.raises(RankError, match="another rank sent what it mustn't"):
        unpacked("tree", header, arrays)


def test_states_that_earlier_ranks_must_have_added() -> None:
    """Rows of tapped states and of streams are compared where they come in, not where rank 0 reads them."""
    parts = (SequenceTokens(3, 12, TREE),)
    false = [
        (False, PassMessage(parts, PassState([rows(4)], tapped=(rows(3),)), (0,))),
        (False, PassMessage(parts, PassState([rows(6)], None, True, rows(8)), (), (1,))),
        (False, PassMessage(parts, PassState([rows(4)], branches=rows(2)), branches=True)),
        (True, PassMessage(parts, PassState([rows(4)], branches=rows(3)), branches=True)),
        (True, PassMessage(parts, PassState([rows(6)], None, True, rows(6)), (), (1,))),
        (True, PassMessage(parts, PassState([rows(6)], None, True, rows(8), (rows(3),)), (0,), (1,))),
        (True, PassMessage(parts, PassState([rows(4)]), (), (1,))),
    ]
    for entered, passed in false:
        with pytest.raises(RankError, match="another rank sent what it mustn't"):
            unpack(*pack(Message("pass", (), passed)), CONFIG, STREAMS, entered)
