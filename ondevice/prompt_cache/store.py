"""Stores the state after a text's beginning in a prompt cache, and reads it back into memory.

A text is stored in runs of `step` tokens, each with the state of its own positions. Two texts that begin
alike share the runs of their common beginning. If any split of a prompt gives equal bits, the last run may be
shorter, and a part of a run can be used too: a common prefix is reused to the last token. Otherwise only
complete chunks of a prompt are stored and used, so that what follows is computed in the same chunks as
without the cache. In models with recurrent layers, a run is as long as the distance between checkpoints, and
a shorter last run ends at the mark of the last prompt; it is used only completely.

Problems of the disk raise no errors here: a run that is damaged or missing is computed again, and a run that
can't be written isn't kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ondevice.backends.kv_layout import BLOCK_TOKENS
from ondevice.callbacks import IsCancelled
from ondevice.errors import BundleError, FlashReadError, OndeviceError
from ondevice.model.sequence_state import SequenceState, common_prefix
from ondevice.prompt_cache.entry import RunName, entry_bytes, read_entry, root_digest, run_name, write_entry
from ondevice.prompt_cache.folder import CacheFolder

log = logging.getLogger(__name__)

MAX_CANDIDATES = 64
"""Most runs compared token by token where a text diverges from the stored ones."""
PIECE_SECONDS = 0.2
"""Time for which runs are read, or a session's are written, while other texts that run together wait, but for
the rest of the last one.

It is about a pass of a 7B, so others go at half their speed meanwhile, however slow the disk is."""
NO_LIMIT = 1 << 62


class PromptCache:
    """The states of one model under one set of options, in a folder that several processes may share."""

    def __init__(
        self,
        folder: Path,
        binding: Mapping[str, Any],
        *,
        chunk: int = 0,
        marks: bool = False,
        limit_bytes: int = NO_LIMIT,
        io: Literal["auto", "direct", "buffered"] = "auto",
    ) -> None:
        """Args:
        folder: where files are, in folders by binding; made when something is written.
        binding: everything that the state depends on apart from the tokens: JSON of lists, texts and numbers.
        chunk: number of tokens in the complete chunks that are stored and used; 0: any number of tokens is
            stored.
        marks: whether the tokens between the last complete chunk and a mark of the last prompt are stored and
            used too.
        limit_bytes: most bytes of all files in `folder`.
        io: how files are read.
        """
        self.chunk = chunk
        self._marks = marks
        self._step = chunk or BLOCK_TOKENS
        self._binding = dict(binding)
        self._root = root_digest(self._binding)
        self._folder = CacheFolder(folder, self._root, limit_bytes)
        self._io: Literal["auto", "direct", "buffered"] = io
        self._loudness = logging.WARNING

    def restore(
        self, kv: SequenceState, tokens: Sequence[int], cancelled: IsCancelled | None = None
    ) -> Iterator[None]:
        """Extend kv, which holds a prefix of `tokens`, by the stored state of the tokens that follow.

        Yields between two pieces, each of complete runs. If the caller changes kv meanwhile, the rest isn't
        restored. At the end kv may hold fewer tokens than before, if a file is damaged.
        """
        held = kv.length
        chain = self._longest(tokens)
        if sum(matched for _, matched in chain) <= held:
            return
        # The rest of a run that is in memory in part is read with that part.
        kv.truncate(self._complete_runs(kv, min(held, kv.chunked) if self.chunk else held))
        try:
            yield from self._read_runs(kv, chain, cancelled)
        finally:
            # Of a session's runs some may lack what windowed layers see, even where reading them fails.
            if kv.windows is not None:
                kv.truncate(kv.length)
        self._folder.touch(name for name, _ in chain)

    def _complete_runs(self, kv: SequenceState, n_tokens: int) -> int:
        """The most tokens, at most n_tokens and in complete runs, that kv can go back to."""
        while (n_tokens := kv.nearest(n_tokens)) % self._step:
            n_tokens -= n_tokens % self._step
        return n_tokens

    def _read_runs(
        self, kv: SequenceState, chain: Sequence[tuple[RunName, int]], cancelled: IsCancelled | None
    ) -> Iterator[None]:
        """Append the following runs of `chain` to kv, which has complete runs. Yields between pieces, as
        `restore` does.
        """
        begun, first = time.monotonic(), kv.length // self._step
        for index, (name, matched) in enumerate(chain[first:], first):
            if index > first and time.monotonic() - begun >= PIECE_SECONDS:
                before = kv.length
                yield
                begun = time.monotonic()
                if kv.length != before:
                    break
            if cancelled is not None and cancelled():
                break
            try:
                self._read(kv, name, matched)
            except (FlashReadError, BundleError) as error:
                log.info("the prompt cache is damaged: %s", error)
                # What follows is computed now and written again, be it sound or not.
                for rest, _ in chain[index:]:
                    self._folder.remove(rest)
                break
            except (OndeviceError, MemoryError) as error:
                log.info("the prompt cache isn't used: %s", error)
                break

    def write_next(self, kv: SequenceState, at: int, gaps: bool = False) -> int:
        """Write the first run of kv, after `at` tokens, that isn't stored yet.

        gaps: whether runs are also written without the blocks of windowed layers, if kv doesn't hold these
        any more. They serve a text that goes on after later runs. A run stored without these blocks is
        written again if kv holds them, since a text may also go on after it.

        Returns the number of tokens that are on the disk now. It is `at` if nothing is left to write or the
        run can't be written.
        """
        runs = self._runs(kv)
        for index, (name, stop) in enumerate(runs):
            stored = stop <= at or self._folder.has(name)
            if stored and not (gaps and stop > at and self._gains_windows(kv, name, stop)):
                at = max(at, stop)
                continue
            if not gaps and not kv.holds_windows(stop - name.tokens, stop):
                break
            try:
                if self._write(kv, name, stop, {before for before, _ in runs[:index]}):
                    at = stop
            except OSError as error:
                # A full disk, or one that can't be written, costs a computation later, and nothing now.
                log.log(self._loudness, "the prompt cache can't be written: %s", error)
                self._loudness = logging.INFO
            break
        return at

    def write(self, kv: SequenceState) -> Iterator[None]:
        """Write all runs of kv that aren't stored, as far as there is room. Pauses between pieces, as
        `restore` does.
        """
        at, begun = 0, time.monotonic()
        self.touch(kv)
        while (written := self.write_next(kv, at, gaps=True)) > at:
            at = written
            if time.monotonic() - begun >= PIECE_SECONDS:
                yield
                begun = time.monotonic()

    def touch(self, kv: SequenceState) -> None:
        """Record that a text is in use, so that runs of other texts are removed before its runs."""
        self._folder.touch(name for name, _ in self._runs(kv))

    def names(self, kv: SequenceState) -> set[RunName]:
        """The names of the runs that `write` would write."""
        return {name for name, _ in self._runs(kv)}

    def keep_only(self, names: Collection[RunName]) -> None:
        """Remove all other runs."""
        for name in self._folder.runs_after(""):
            if name not in names:
                self._folder.remove(name)

    def _runs(self, kv: SequenceState) -> list[tuple[RunName, int]]:
        """The runs of kv to store, each with the number of tokens up to the run's end, ascending."""
        last = kv.chunked // self._step * self._step if self.chunk else kv.verified
        chain = self._chain(kv.tokens[:last])
        runs = [(name, index * self._step + name.tokens) for index, name in enumerate(chain)]
        for stop in self._marked(kv, last):
            count = stop // self._step
            parent = chain[count - 1].digest if count else self._root
            runs.insert(count, (run_name(parent, kv.tokens[count * self._step : stop]), stop))
        return runs

    def _marked(self, kv: SequenceState, last: int) -> list[int]:
        """The last mark at which a run may end, if complete chunks lead to it, as a list of one or none. kv
        has `last` tokens.
        """
        if not self._marks or kv.states is None:
            return []
        ends = [at for at in kv.states.ends if at // self._step * self._step <= last]
        return [at for at in ends[-1:] if at % self._step >= BLOCK_TOKENS]

    def _chain(self, tokens: Sequence[int]) -> list[RunName]:
        """The names of a text's consecutive runs. The last run may be short."""
        chain: list[RunName] = []
        parent = self._root
        for start in range(0, len(tokens), self._step):
            chain.append(run_name(parent, tokens[start : start + self._step]))
            parent = chain[-1].digest
        return chain

    def _longest(self, tokens: Sequence[int]) -> list[tuple[RunName, int]]:
        """The stored runs that `tokens` begin with, and how many tokens of each match."""
        runs: list[tuple[RunName, int]] = []
        parent = self._root
        for name in self._chain(tokens):
            if name.tokens < self._step or not self._folder.has(name):
                break
            runs.append((name, name.tokens))
            parent = name.digest
        start = len(runs) * self._step
        if not self.chunk:
            best = self._nearest(parent, tokens[start : start + self._step])
            runs += [] if best is None else [best]
        elif self._marks:
            runs += self._last_run(parent, tokens[start : start + self._step])
        return runs

    def _last_run(self, parent: str, tokens: Sequence[int]) -> list[tuple[RunName, int]]:
        """The longest run after `parent` that these tokens begin with, as a list of one or none."""
        runs = set(self._folder.runs_after(parent))
        lengths = {name.tokens for name in runs if name.tokens <= len(tokens)}
        fitting = runs.intersection(run_name(parent, tokens[:length]) for length in lengths)
        return [(name, name.tokens) for name in sorted(fitting, key=lambda it: it.tokens)[-1:]]

    def _nearest(self, parent: str, tokens: Sequence[int]) -> tuple[RunName, int] | None:
        """The run after `parent` that shares the most tokens with these, and how many; None if none shares
        any.
        """
        best, most = None, 0
        prefixes = [run_name(parent, tokens[:count]) for count in range(1, len(tokens) + 1)]
        runs = self._folder.runs_after(parent)
        for name in sorted(set(runs) & set(prefixes), key=lambda it: it.tokens)[-1:]:
            best, most = name, name.tokens
        for name in runs[:MAX_CANDIDATES]:
            if name.tokens > most and len(tokens) > most:
                entry = read_entry(self._folder.path, name, self._binding)
                if entry is None:
                    self._folder.remove(name)
                    continue
                common = common_prefix(list(entry.tokens), list(tokens))
                if common > most:
                    best, most = name, common
        return None if best is None else (best, most)

    def _read(self, kv: SequenceState, name: RunName, matched: int) -> None:
        """Append the first `matched` tokens of a run to kv.

        Raises FlashReadError and BundleError for damage, BudgetError and MemoryError if there is no room.
        """
        start, stop = kv.length, kv.length + name.tokens
        entry = read_entry(self._folder.path, name, self._binding)
        complete, partial_sizes = (tuple(kv.part_sizes(start, stop, it)) for it in (True, False))
        if entry is None or entry.sizes not in (complete, partial_sizes):
            raise BundleError(f"{name.file} isn't a sound file of this model")
        if self._marks and stop % self._step:
            kv.mark([stop])
        kv.reserve(stop)
        if entry.sizes != complete:
            kv.give_up_windows(start, stop)
        with entry.reader(self._io) as reader:
            self._io = reader.io
            for part in range(len(entry.sizes)):
                kv.load_part(part, start, stop, partial(entry.read, reader, part))
        kv.extend(entry.tokens[:matched])
        if self.chunk:
            kv.chunked = stop // self._step * self._step

    def _gains_windows(self, kv: SequenceState, name: RunName, stop: int) -> bool:
        """Whether a run that ends at `stop` is stored without the blocks of windowed layers, and kv holds
        these blocks.
        """
        start = stop - name.tokens
        if kv.windows is None or not kv.holds_windows(start, stop):
            return False
        entry = read_entry(self._folder.path, name, self._binding)
        return entry is not None and entry.sizes == tuple(kv.part_sizes(start, stop, False))

    def _write(self, kv: SequenceState, name: RunName, stop: int, before: Collection[RunName]) -> bool:
        """Write the run that ends at `stop` tokens. Raises OSError.

        Returns False if there is no room for it in addition to the runs in `before`.
        """
        start = stop - name.tokens
        tokens = kv.tokens[start:stop]
        sizes = kv.part_sizes(start, stop, kv.holds_windows(start, stop))
        parts = [partial(kv.part, part, start, stop) for part in range(len(sizes))]
        written = self._folder.write(
            name,
            entry_bytes(self._binding, name, tokens, sizes),
            before,
            lambda file: write_entry(file, self._binding, name, tokens, sizes, parts),
        )
        if written and not self.chunk:
            # What was the text's end before says nothing more than this run.
            shorter = {run_name(name.parent, tokens[:count]) for count in range(1, len(tokens))}
            for each in shorter.intersection(self._folder.runs_after(name.parent)):
                self._folder.remove(each)
        return written
