"""Bounds the cost of a regular expression in a tokenizer's file, before a backtracking matcher compiles it.

`tokenizers` matches with Oniguruma, which tries one way after another: at every place of a text a pattern may
take time that is quadratic, cubic or exponential in the text. Here a pattern becomes a position automaton
(Glushkov's construction): it has one position for every character class, and an edge from one position to
another that may follow it. A match succeeds at the first position after which nothing more is needed, and no
earlier way is tried again, so only positions before that one count. If these have no loops, a bounded number
of ways is tried at each place. If a way has one loop, whose next step is unambiguous, the number is
proportional to the text's length. Any other pattern is refused, even if no text could make it slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import field

from ondevice.records import dataclass
from ondevice.tokenizer.pattern_syntax import Node, parse_pattern, refused

MAX_POSITIONS = 4096
MAX_EDGES = 1 << 15


@dataclass(frozen=True)
class Cost:
    """An upper bound of the steps at one place of a text of n characters: `fixed + linear * n`."""

    fixed: int = 0
    linear: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.fixed + other.fixed, self.linear + other.linear)


@dataclass(frozen=True)
class PatternCost(Cost):
    """The cost of a pattern, and whether it can match the empty text."""

    matches_empty: bool = False


def pattern_cost(source: str) -> PatternCost:
    """An upper bound of the cost of matching `source` (Oniguruma's Ruby syntax) at one place of a text.

    Raises UnsupportedModelError if no bound is known, and what `parse_pattern` raises.
    """
    node = parse_pattern(source)
    cost = _measured(node, source)
    return PatternCost(cost.fixed, cost.linear, matches_empty=node.consumes_nothing)


@dataclass
class _Fragment:
    """A part of an automaton: the positions at which a match in it may begin and end.

    empty: whether it can match the empty text.
    """

    empty: bool
    first: list[int]
    last: list[int]


@dataclass
class _Automaton:
    """An automaton: its positions, and how many ways lead from one to another (two in a nested
    repetition).
    """

    source: str
    costs: list[Cost] = field(default_factory=list)
    conditions: set[int] = field(default_factory=set)
    edges: defaultdict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _num_edges: int = 0

    def build(self, node: Node) -> _Fragment:
        match node.kind:
            case "character":
                return self._position(Cost(1))
            case "condition":
                body = _measured(node.parts[0], self.source, ahead=True) if node.parts else Cost()
                self.conditions.add(len(self.costs))
                return self._position(Cost(1) + body)
            case "sequence":
                fragment = _Fragment(True, [], [])
                for part in node.parts:
                    fragment = self._joined(fragment, self.build(part))
                return fragment
            case "choice":
                ways = [self.build(part) for part in node.parts]
                return _Fragment(
                    any(way.empty for way in ways),
                    [p for way in ways for p in way.first],
                    [p for way in ways for p in way.last],
                )
        return self._repeat(node)

    def _position(self, cost: Cost) -> _Fragment:
        if len(self.costs) == MAX_POSITIONS:
            raise refused(self.source, f"written out, it has more than {MAX_POSITIONS} characters")
        self.costs.append(cost)
        at = len(self.costs) - 1
        return _Fragment(False, [at], [at])

    def _link(self, sources: list[int], targets: list[int]) -> None:
        self._num_edges += len(sources) * len(targets)
        if self._num_edges > MAX_EDGES:
            raise refused(self.source, "it has too many ways to go on")
        for source in sources:
            self.edges[source].update(targets)

    def _joined(self, a: _Fragment, b: _Fragment) -> _Fragment:
        self._link(a.last, b.first)
        first = a.first + b.first if a.empty else a.first
        last = a.last + b.last if b.empty else b.last
        return _Fragment(a.empty and b.empty, first, last)

    def _repeat(self, node: Node) -> _Fragment:
        (part,) = node.parts
        if node.most is None:
            loop = self.build(part)
            self._link(loop.last, loop.first)
            if node.least == 0:
                loop.empty = True
            head = max(0, node.least - 1)
        else:
            # a{0,3} is (a(a(a)?)?)?: repetitions are left out at the end.
            loop, head = _Fragment(True, [], []), node.least
            for _ in range(node.most - node.least):
                loop = self._joined(self.build(part), loop)
                loop.empty = True
        for _ in range(head):
            loop = self._joined(self.build(part), loop)
        return loop


def _measured(node: Node, source: str, ahead: bool = False) -> Cost:
    """The cost of matching `node` at one place of a text.

    ahead: whether `node` is a look-around. That consumes no text, so other places match the same text again.
    """
    automaton = _Automaton(source)
    fragment = automaton.build(node)
    # A condition may fail even at the end, so it completes no match.
    final = frozenset(fragment.last) - automaton.conditions
    ways = _Ways(automaton, final)
    begun = ways.following(Counter(fragment.first))
    # After a position that completes a match, more is tried: once for every character that it consumes.
    ended = [ways.following(automaton.edges[position]) for position in final]
    going_on = Cost(
        max((cost.fixed for cost in ended), default=0), max((cost.linear for cost in ended), default=0)
    )
    if not ahead:
        return Cost(1) + begun + going_on
    if not _loops(automaton, frozenset()):
        most = len(automaton.costs)
        return Cost(1) + begun + Cost(most * going_on.fixed, most * going_on.linear)
    if going_on.linear:
        raise refused(source, "what it looks ahead for takes time that grows faster than the text")
    return Cost(1) + begun + Cost(0, going_on.fixed)


class _Ways:
    """Computes the cost of all ways on from a position, until each fails or completes a match."""

    def __init__(self, automaton: _Automaton, final: frozenset[int]) -> None:
        self._automaton = automaton
        self._final = final
        self._loop_of = _loops(automaton, final)
        self._known: dict[int, Cost] = {}

    def following(self, targets: Counter[int]) -> Cost:
        """The cost of going on to `targets`, each as often as its count says."""
        pending = [t for t in targets if t not in self._final]
        while pending:
            position = pending[-1]
            if position in self._known:
                pending.pop()
                continue
            missing = [w for w in self._exits(position) if w not in self._known]
            if missing:
                pending += missing
                continue
            self._measure(position)
            pending.pop()
        return self._sum(targets)

    def _members(self, position: int) -> frozenset[int]:
        """The positions of the loop that contains `position`; only `position` if no loop does."""
        return self._loop_of.get(position, frozenset({position}))

    def _exits(self, position: int) -> list[int]:
        members = self._members(position)
        return [
            target
            for member in members
            for target in self._automaton.edges[member]
            if target not in members and target not in self._final
        ]

    def _sum(self, targets: Counter[int]) -> Cost:
        total = Cost()
        for target, count in targets.items():
            cost = Cost(1) if target in self._final else self._known[target]
            total += Cost(count * cost.fixed, count * cost.linear)
        return total

    def _measure(self, position: int) -> None:
        members = self._members(position)
        once = Cost()
        for member in members:
            edges = self._automaton.edges[member]
            inside = sum(count for target, count in edges.items() if target in members)
            if position in self._loop_of and inside != 1:
                raise refused(self._automaton.source, "a repetition in it can match in more than one way")
            outside = Counter({t: count for t, count in edges.items() if t not in members})
            once += self._automaton.costs[member] + self._sum(outside)
        if position in self._loop_of:
            if once.linear:
                raise refused(
                    self._automaton.source, "its repetitions take time that grows faster than the text"
                )
            once = Cost(0, once.fixed)
        for member in members:
            self._known[member] = once


def _loops(automaton: _Automaton, final: frozenset[int]) -> dict[int, frozenset[int]]:
    """For every position in a loop, the loop's positions (a strongly connected set). Positions in `final` are
    left out.

    Tarjan's algorithm, iterative.
    """
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    loops: dict[int, frozenset[int]] = {}
    on_stack: set[int] = set()

    def inner(position: int) -> list[int]:
        return [t for t in automaton.edges[position] if t not in final]

    for root in range(len(automaton.costs)):
        if root in order or root in final:
            continue
        work = [(root, iter(inner(root)))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while work:
            position, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[position])
                if low[position] == order[position]:
                    members = set()
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        members.add(member)
                        if member == position:
                            break
                    if len(members) > 1 or position in automaton.edges[position]:
                        loops |= dict.fromkeys(members, frozenset(members))
            elif target not in order:
                order[target] = low[target] = len(order)
                stack.append(target)
                on_stack.add(target)
                work.append((target, iter(inner(target))))
            elif target in on_stack:
                low[position] = min(low[position], order[target])
    return loops
