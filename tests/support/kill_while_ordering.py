"""A process that orders a bundle's neurons in forked children, kills them, and resumes; prints one JSON line.

    python kill_while_ordering.py SOURCE WORKDIR STEP

Children die before every STEP-th durable step, until one lives to the end.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.converters.training.activations import record_activations
from ondevice.converters.training.neuron_order import order_neurons
from tests.support.kill_and_resume import count_down, digest, killed

PIECE = [token * 7 % 250 for token in range(120)]


def order(source: Path, output: Path, prepare: Callable[[], None]) -> None:
    """As `train_predictors` with `order` does it, of a conversion that is resumed."""
    bundle = Bundle.open(convert(source, output, resume=True))
    if bundle.manifest.provenance.ordered_tokens is None:
        scratch = output.parent.with_name("scratch")
        scratch.mkdir(exist_ok=True)
        activations = record_activations(bundle, [PIECE], scratch)
        prepare()
        order_neurons(bundle, activations, len(PIECE))


def main() -> None:
    source, workdir, step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    output, plain = workdir / "bundle", workdir.with_name("plain")
    killed(lambda: convert(source, plain))
    shutil.copytree(plain, output)
    killed(lambda: order(source, output, lambda: None))
    valid = {digest(plain), digest(output)}
    expected = digest(output)
    report = {"killed": 0, "absent": 0, "invalid": 0, "different": 0, "left": 0}
    for calls in count(1, step):
        shutil.rmtree(output)
        shutil.copytree(plain, output)
        if not killed(partial(order, source, output, partial(count_down, calls, before=True))):
            break
        report["killed"] += 1
        if output.exists():
            report["invalid"] += digest(output) not in valid
        else:
            report["absent"] += 1
        killed(partial(order, source, output, lambda: None))
        report["different"] += digest(output) != expected
        report["left"] += [path.name for path in workdir.iterdir()] != ["bundle"]
    print(json.dumps(report))


main()
