"""Messages between ranks: a pass between two layers, its result, and changes of sequences' states.

A message is a small JSON header, parsed strictly, and arrays whose bits are preserved. Data from another
machine may be hostile: its sizes are compared with the model before anything is used. Legend as in
`model/layer_range.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.forward_batch import ForwardBatch, joint_batch
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.strict_json import Rule, Section, canonical_json, parse_json
from ondevice.distributed.place import MAX_RANKS
from ondevice.errors import BundleError, RankError
from ondevice.model.layer_range import PassState
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass
from ondevice.stats import HopStats, RankStats

MAX_CHANGES = 1024
"""Most changes of a message; before there are more, they are sent in a message of their own."""
MAX_PARTS = 256
"""Most sequences of a pass."""
MAX_ROWS = 1 << 16
"""Most tokens of a pass."""
MAX_NUMBER = 1 << 53
MAX_TAPS = 64

ChangeKind = Literal["cut", "fork", "expect", "keep", "accept", "mark"]
Kind = Literal["pass", "result", "changes", "stats", "end"]


class Change(NamedTuple):
    """A change of a sequence's state on rank 0, which the other ranks repeat.

    The kinds are: cut: keep only `value` tokens. fork: copy the state to sequence `value`. expect: a text of
    `value` tokens begins. keep: keep only the nodes `rows` of the tree stored from position `value` on.
    accept: the rows of the last pass's batch that were accepted, of all sequences. mark: a prompt of `value`
    tokens begins.
    """

    kind: ChangeKind
    sequence: int
    value: int = 0
    rows: tuple[int, ...] = ()


class SequenceTokens(NamedTuple):
    """The tokens of one sequence in a pass. They follow `position` tokens in its state."""

    sequence: int
    position: int
    batch: ForwardBatch


@dataclass(frozen=True)
class PassMessage:
    """A pass between two layers. Its state's arrays are float32 in host memory."""

    parts: tuple[SequenceTokens, ...]
    state: PassState
    taps: tuple[int, ...] = ()
    streamed: tuple[int, ...] | None = None
    branches: bool = False

    @property
    def batch(self) -> ForwardBatch:
        """The batch of the pass, made of the tokens of all sequences."""
        return self.parts[0].batch if len(self.parts) == 1 else joint_batch(it.batch for it in self.parts)


@dataclass(frozen=True)
class Message:
    """A message: the changes to make first, and then a pass, or the state after one."""

    kind: Kind
    changes: tuple[Change, ...] = ()
    passed: PassMessage | None = None
    result: PassState | None = None
    stats: tuple[RankStats, ...] = ()
    """What ranks have counted so far, in a `stats` message: each rank adds its entry."""


Array = NDArray[Any]
Packed = tuple[bytes, list[Array]]


def pack(message: Message) -> Packed:
    """The header and the arrays that a message is sent as."""
    header: dict[str, Any] = {"kind": message.kind, "changes": [it._asdict() for it in message.changes]}
    arrays: list[Array] = []
    if message.kind == "stats":
        header["stats"] = [it.to_dict() for it in message.stats]
    if message.passed is not None:
        header["pass"] = _pass_header(message.passed, arrays)
        header["state"] = _state_header(message.passed.state, arrays)
    if message.result is not None:
        header["state"] = _state_header(message.result, arrays)
    return canonical_json(header), arrays


def _pass_header(passed: PassMessage, arrays: list[Array]) -> dict[str, Any]:
    ids = [token for part in passed.parts for token in part.batch.tokens]
    trees = [part.batch.tree for part in passed.parts]
    parents = [tree.parents for tree in trees if tree is not None]
    arrays += [np.array(ids, dtype=np.int32), np.concatenate([*parents, np.empty(0, np.int32)])]
    first = passed.parts[0].batch
    return {
        "parts": [
            {
                "sequence": part.sequence,
                "position": part.position,
                "tokens": len(part.batch.tokens),
                "tree": part.batch.tree is not None,
                "drafted": list(part.batch.drafted),
            }
            for part in passed.parts
        ],
        "stream_rows": first.stream_rows,
        "resident_only": first.resident_only,
        "last_only": first.last_only,
        "silent": first.silent,
        "taps": list(passed.taps),
        "branches": passed.branches,
        "streamed": None if passed.streamed is None else {"rows": list(passed.streamed)},
    }


def _state_header(state: PassState, arrays: list[Array]) -> dict[str, Any]:
    others = [it for it in (state.inputs, state.branches) if it is not None]
    arrays += [*state.residual_streams, *others, *state.tapped]
    return {
        "copies": len(state.residual_streams),
        "inputs": state.inputs is not None,
        "branches": state.branches is not None,
        "tapped": len(state.tapped),
        "entered": state.entered,
    }


def unpack(
    header: bytes, arrays: Sequence[Array], config: ModelConfig, streams: int, entered: bool = False
) -> Message:
    """The message that was sent as a header and arrays. Raises RankError if it doesn't fit this model.

    config: the receiver's layers. streams: number of streams of a token. entered: whether an earlier rank has
    the layer that streams enter.
    """
    reader = _MessageReader(arrays, config, streams, entered)
    try:
        return reader.message(Section(parse_json(header, "a message"), "a message"))
    except BundleError as error:
        raise RankError(f"another rank sent what it mustn't: {error.for_command_line}") from error


_HOPS: dict[str, Rule] = {
    **dict.fromkeys(("messages", "sent_bytes", "received_bytes"), (Section.integer, 0, MAX_NUMBER)),
    **dict.fromkeys(("sent_seconds", "waited_seconds"), (Section.number, 0, MAX_NUMBER)),
}
_CHANGE: dict[str, Rule] = {
    "kind": (Section.one_of, get_args(ChangeKind)),
    **dict.fromkeys(("sequence", "value"), (Section.integer, 0, MAX_NUMBER)),
    "rows": (Section.integers, MAX_ROWS, 0, MAX_ROWS),
}
_COUNTS = ("rank", "first_layer", "layers", "budget_bytes", "peak_memory_bytes", "flash_bytes_read")
_RANK_STATS: dict[str, Rule] = {
    **dict.fromkeys(_COUNTS, (Section.integer, 0, 1 << 62)),
    "hops": (Section.entry, HopStats, _HOPS),
}
"""Rules of a rank's stats. Its counts never reach MAX_NUMBER."""


class _MessageReader:
    """Reads the arrays of one message, in order."""

    def __init__(self, arrays: Sequence[Array], config: ModelConfig, streams: int, entered: bool) -> None:
        self._arrays = list(arrays)
        self._config = config
        self._streams = streams
        self._entered = entered and streams > 0

    def message(self, top: Section) -> Message:
        kind: Any = top.one_of("kind", get_args(Kind))
        changes = top.entries("changes", MAX_CHANGES, Change, _CHANGE)
        for change in changes:
            _require_ascending(change.rows, "rows of a change")
        passed, result, stats = None, None, tuple[RankStats, ...]()
        if kind == "pass":
            passed = self._pass(top.section("pass"), top)
        elif kind == "result":
            result = self._state(top.section("state"))
        elif kind == "stats":
            stats = top.entries("stats", MAX_RANKS, RankStats, _RANK_STATS)
        top.close()
        if self._arrays:
            raise BundleError(f"a message has {len(self._arrays)} arrays more than it says")
        return Message(kind, changes, passed, result, stats)

    def _pass(self, section: Section, top: Section) -> PassMessage:
        ids, parents = self._next(np.int32, 1), self._next(np.int32, 1)
        flags: Any = {name: section.boolean(name) for name in ("resident_only", "last_only", "silent")}
        stream_rows = section.integer("stream_rows", 0, MAX_ROWS)
        parts, taken, parents_taken = [], 0, 0
        for each in section.sections("parts", MAX_PARTS):
            count = each.integer("tokens", 0, MAX_ROWS)
            tokens = ids[taken : taken + count].tolist()
            tree, taken = None, taken + count
            if each.boolean("tree"):
                tree = _tree(parents[parents_taken : parents_taken + count].tolist())
                parents_taken += count
            drafted = list(each.integers("drafted", count, 0, max(0, count - 1)))
            batch = ForwardBatch(tokens, tree, drafted, stream_rows, **flags)
            sequence, position = (each.integer(it, 0, MAX_NUMBER) for it in ("sequence", "position"))
            parts.append(SequenceTokens(sequence, position, batch))
            each.close()
            _require_ascending(drafted, "drafted rows")
        if not parts or taken != len(ids) or parents_taken != len(parents):
            raise BundleError(f"a pass of {len(parts)} sequences has {taken} of {len(ids)} tokens")
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._config.vocab_size:
            raise BundleError(f"a token id is not from 0 to {self._config.vocab_size - 1}")
        taps = section.integers("taps", MAX_TAPS, 0, MAX_ROWS)
        _require_ascending(taps, "taps")
        branches, streamed = section.boolean("branches"), section.nullable("streamed", Section.section)
        rows = None if streamed is None else _streamed_rows(streamed, len(ids))
        section.close()
        state = self._state(top.section("state"))
        message = PassMessage(tuple(parts), state, taps, rows, branches)
        self._check_state(message)
        return message

    def _check_state(self, message: PassMessage) -> None:
        """Check that the state in a message has the rows of its pass. Raises BundleError if not."""
        batch, state = message.batch, message.state
        rows = tokens = len(batch.tokens)
        streamed = message.streamed
        if state.entered != (self._entered and streamed is not None):
            raise BundleError("a pass has streams where they can't be, or lacks them")
        if state.entered and streamed is not None:
            rows += self._streams * len(streamed)
        alone = len(message.parts) == 1
        if not alone and (message.taps or streamed is not None or message.branches or batch.stream_rows):
            raise BundleError("a pass of several sequences has no streams and taps")
        if not tokens and batch.stream_rows != self._streams:
            raise BundleError(f"a pass has {batch.stream_rows} rows of streams; a token has {self._streams}")
        for copy in state.residual_streams:
            if len(copy) != rows + batch.stream_rows:
                raise BundleError(f"a pass of {rows + batch.stream_rows} rows has a state of {len(copy)}")
        self._check_results(message, tokens)
        if len(state.residual_streams) != self._config.residual_copies or (state.inputs is None) == bool(
            self._config.per_layer_width
        ):
            raise BundleError("a pass has not the copies and inputs of this model")
        if state.inputs is not None and (
            len(state.inputs) != tokens or state.inputs.shape[1] < self._inputs_width
        ):
            raise BundleError(f"per-layer inputs are {state.inputs.shape}; they must be of {tokens} tokens")

    def _check_results(self, message: PassMessage, tokens: int) -> None:
        """Check that earlier ranks added the results that rank 0 wants from them. Raises
        BundleError if not.
        """
        state, first = message.state, self._config.part.first
        taps = sum(tap < first for tap in message.taps)
        if [len(it) for it in state.tapped] != [tokens] * taps:
            raise BundleError(f"a pass has not the {taps} tapped states of its {tokens} tokens")
        branches = None
        if state.entered:
            branches = self._streams * tokens
        elif self._entered and message.branches:
            branches = self._streams
        if branches != (None if state.branches is None else len(state.branches)):
            raise BundleError(f"a pass has not {branches or 'no'} states of streams to begin with")

    @property
    def _inputs_width(self) -> int:
        return self._config.per_layer_width * self._config.num_layers

    def _state(self, section: Section) -> PassState:
        size = self._config.hidden_size
        residual_streams = [self._values(size) for _ in range(section.integer("copies", 1, 16))]
        inputs = self._next(np.float32, 2) if section.boolean("inputs") else None
        branches = self._values(size) if section.boolean("branches") else None
        tapped = tuple(self._values(size) for _ in range(section.integer("tapped", 0, MAX_TAPS)))
        entered = section.boolean("entered")
        section.close()
        if len({len(copy) for copy in residual_streams}) > 1:
            raise BundleError("copies of the residual have different rows")
        return PassState(residual_streams, inputs, entered, branches, tapped)

    def _values(self, columns: int) -> Array:
        values = self._next(np.float32, 2)
        if values.shape[1] != columns:
            raise BundleError(f"an array has {values.shape[1]} columns; this model's have {columns}")
        return values

    def _next(self, dtype: Any, dimensions: int) -> Array:
        if not self._arrays:
            raise BundleError("a message has fewer arrays than it says")
        array = self._arrays.pop(0)
        if array.dtype != dtype or array.ndim != dimensions:
            raise BundleError(f"an array is {array.dtype} {array.shape}; it must be {np.dtype(dtype)}")
        return array


def _tree(parents: list[int]) -> TokenTree:
    try:
        return TokenTree(parents)
    except ValueError as error:
        raise BundleError(f"a pass's tree is none: {error}") from error


def _streamed_rows(section: Section, tokens: int) -> tuple[int, ...]:
    """The rows with streams in a pass of `tokens` tokens. Raises BundleError for invalid ones."""
    rows = section.integers("rows", tokens, 0, max(0, tokens - 1))
    section.close()
    _require_ascending(rows, "tokens with streams")
    return rows


def _require_ascending(values: Sequence[int], what: str) -> None:
    if any(after <= before for before, after in pairwise(values)):
        raise BundleError(f"{what} aren't ascending")
