"""Checks of models: their bytes match their hashes, and each backend still writes the recorded tokens.

The recording is in the folder of the model that ships, where `recipe.recorded_tokens` makes it. This module
knows nothing of how a backend multiplies, only how far its logits may be from the recorded ones of `cpu`.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.backends.row_invariance import MAX_ROWS
from ondevice.config import BackendName
from ondevice.doctor.check import Check
from ondevice.errors import BackendUnavailableError, BudgetError, BundleError, ModelNotFoundError
from ondevice.records import dataclass
from ondevice.units import format_bytes

if TYPE_CHECKING:
    from ondevice.api import Model

RECORDED = "recorded_tokens.json"
RECORDED_VERSION = 1
MAX_TOKENS = 256
CONTEXT = 128
"""Tokens of context while a model is tested: few, to take little memory."""
GENERATION_SECONDS = 8.0
"""Longest wait in seconds for the tokens."""
WRONG_REMEDY = "this build computes wrongly here: install one made for this machine, or use another --backend"
TOLERANCES = {"cpu": 0.0}
OTHER_TOLERANCE = 0.25
"""Tolerance, in logits, of the backends not in TOLERANCES. A token may differ if its margin is below it.

`cpu` has equal bits on every machine. The others multiply activations that aren't rounded to 8 bits: on the
model that ships, `reference` moves the difference of two logits by 0.02 in the median and by 0.11 at most."""


@dataclass(frozen=True)
class Recorded:
    """A model's recorded greedy reply to one message on the `cpu` backend.

    prompt: the ids of the message in the model's chat template. margins: for each token, how much its logit
    exceeds the second highest.
    """

    message: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


def read_recorded(folder: Path) -> Recorded:
    """The recording in a model's folder. Raises BundleError if it is missing, damaged or another model's."""
    from ondevice.bundle.files import contained, read_file
    from ondevice.bundle.layout import MANIFEST
    from ondevice.bundle.strict_json import MAX_JSON_BYTES, Section, parse_json

    data = read_file(contained(folder.resolve(), RECORDED), MAX_JSON_BYTES)
    section = Section(parse_json(data, RECORDED), RECORDED)
    section.equal("version", RECORDED_VERSION)
    manifest = sha256(read_file(folder / MANIFEST, MAX_JSON_BYTES)).hexdigest()
    if section.text("manifest_sha256", 64) != manifest:
        raise BundleError(f"{RECORDED} was recorded with another model than {folder} holds; record it anew")
    recorded = Recorded(
        section.text("message", 1000),
        section.integers("prompt", MAX_TOKENS, 0, 1 << 30),
        section.integers("tokens", MAX_TOKENS, 0, 1 << 30),
        section.numbers("margins", MAX_TOKENS, 0.0, 1e6),
    )
    section.close()
    if not recorded.tokens or len(recorded.tokens) != len(recorded.margins):
        raise BundleError(
            f"{RECORDED} has {len(recorded.tokens)} tokens and {len(recorded.margins)} margins; record it "
            "anew"
        )
    return recorded


def shipped_model(folder: Path | None) -> Check:
    """Check that every byte of the model that ships matches its hashes. Raises BundleError for damage."""
    name = "shipped model"
    if folder is None:
        remedy = "install ondevice again; an app that leaves the model out can ignore this"
        return Check(name, "warning", "there is none, so no backend can be tested", remedy)
    from ondevice import api

    verified = api.verify(folder)
    figures = {"path": str(folder), "files": len(verified.files), "bytes": verified.nbytes}
    value = f"{folder.name}: {len(verified.files)} files, {format_bytes(verified.nbytes)}, all hashes right"
    return Check(name, "ok", value, figures=figures)


def named_model(model: str | os.PathLike[str]) -> Check:
    """Check that a model can be opened and would fit. Raises what `load` raises before it reads a weight."""
    from ondevice import api
    from ondevice.config import RuntimeConfig

    resolved = api.open_model(model, RuntimeConfig())
    resolved.require_fit()
    least = resolved.smallest_plan.plan.minimum_budget_bytes
    nbytes = resolved.bundle.bundle_bytes
    figures = {"path": str(resolved.bundle.path), "bytes": nbytes, "minimum_budget_bytes": least}
    value = f"{resolved.bundle.name}: {format_bytes(nbytes)}, runs in {format_bytes(least)} and more"
    warnings = (*resolved.warnings, *resolved.budget_warnings)
    if warnings:
        return Check("model", "warning", "; ".join((value, *warnings)), figures=figures)
    return Check("model", "ok", f"{value}; `ondevice verify` reads all of it", figures=figures)


def generation(backend: BackendName, folder: Path | None) -> Check:
    """Check that a backend writes the recorded tokens with the model in the folder, within the backend's
    tolerance.

    Raises what loading the model and reading the recording raise.
    """
    name = f"generation {backend}"
    if folder is None:
        return Check(name, "skipped", "no model ships with this installation")
    from ondevice import api

    recorded = read_recorded(folder)
    try:
        with api.load(folder, backend=backend, max_context=CONTEXT) as model:
            return compare(name, model, recorded, TOLERANCES.get(backend, OTHER_TOLERANCE))
    except BackendUnavailableError as error:
        return Check(name, "skipped", str(error))
    except BudgetError as error:
        # The reference is an oracle. Memory that is too short for it says nothing about the others.
        if backend != "reference":
            raise
        needed = format_bytes(error.required_bytes)
        return Check(name, "skipped", f"it takes {needed}, more than there is; it is for comparison alone")


def rows(name: str, folder: Path | None) -> Check:
    """Check how many tokens MLX can compute together while each keeps the bits that it would have alone.

    Drafts, and texts that share passes, keep to that number.
    """
    if folder is None:
        return Check(name, "skipped", "no model ships with this installation")
    from ondevice.bundle.reader import Bundle
    from ondevice.config import RuntimeConfig
    from ondevice.runtime.backend_choice import check_backend, row_invariance

    runtime, bundle, begun = RuntimeConfig(backend="mlx"), Bundle.open(folder), time.monotonic()
    try:
        check_backend(runtime)
    except BackendUnavailableError as error:
        return Check(name, "skipped", str(error))
    invariance = row_invariance(bundle.config, bundle.quant, runtime, bundle.predictors, bundle.streams)
    widths, narrowest = invariance.widths, invariance.narrowest
    figures = {
        "device": invariance.device,
        "draft_tokens": widths.nodes,
        "drafts_branch": widths.branches,
        "shared_rows": widths.chain,
        "skips_zeros": invariance.skips_zeros,
        "rows_by_operation": dict(invariance.ops),
        "seconds": time.monotonic() - begun,
    }
    shape = "tree" if widths.branches else "chain"
    value = f"drafts of {bundle.name} on {invariance.device}: a {shape} of up to {widths.nodes} tokens"
    if widths.nodes < 2:
        value = (
            f"nothing drafts for {bundle.name} on {invariance.device}: beside others, a row has other bits"
        )
    if invariance.ops.get(narrowest, widths.nodes) < MAX_ROWS:
        value += f" (in its {narrowest})"
    return Check(name, "ok", value, figures=figures)


def compare(name: str, model: Model, recorded: Recorded, tolerance: float) -> Check:
    """Check that a loaded model writes the recorded tokens. tolerance: in logits; 0 allows no difference.

    After a difference within the tolerance, the texts diverge. Then each later token is predicted from the
    recorded tokens before it.
    """
    from ondevice.model.sequence_state import common_prefix

    begun, count = time.monotonic(), len(recorded.tokens)
    prompt = model.chat_ids([{"role": "user", "content": recorded.message}])
    if tuple(prompt) != recorded.prompt:
        return Check(name, "failed", "the prompt's token ids aren't the recorded ones", WRONG_REMEDY)
    written, in_time = _written(model, prompt, count)
    same = common_prefix(written, recorded.tokens)
    different = [same] if same < (count if in_time else len(written)) else []
    if different and recorded.margins[same] < tolerance:
        logits = model.logits([*prompt, *recorded.tokens])[len(prompt) - 1 : -1]
        likeliest = logits.argmax(axis=1).tolist()
        different += [i for i in range(same + 1, count) if likeliest[i] != recorded.tokens[i]]
    figures = {
        "tokens": count,
        "written_tokens": len(written),
        "different_tokens": different,
        "tolerance_logits": tolerance,
        "kernel_target": model.kernel_target,
        "seconds": time.monotonic() - begun,
    }
    wrong = next((i for i in different if recorded.margins[i] >= tolerance), None)
    if wrong is not None:
        forgiven = f"below {tolerance} logits it would be forgiven" if tolerance else "none is forgiven"
        margin = f"by a margin of {recorded.margins[wrong]:.2f}; {forgiven}"
        value = f"token {wrong + 1} of {count} isn't the recorded one, which won {margin}"
        return Check(name, "failed", value, WRONG_REMEDY, figures)
    if not different and same < count:
        value = f"{same} of {count} tokens within {GENERATION_SECONDS:.0f} s, those as recorded"
        remedy = "try again when nothing else keeps the disk and the processor busy"
        return Check(name, "warning", value, remedy, figures)
    value = f"{count} tokens as recorded ({model.kernel_target})"
    if different:
        value += f", but for {len(different)} with margins below {tolerance} logits"
    return Check(name, "ok", value, figures=figures)


def _written(model: Model, prompt: list[int], count: int) -> tuple[tuple[int, ...], bool]:
    """The first tokens of a reply, and whether `count` of them, or the reply's end, came within
    GENERATION_SECONDS.
    """
    tokens, end = [], time.monotonic() + GENERATION_SECONDS
    events = model.stream(tokens=prompt, max_tokens=count)
    with closing(events):  # type: ignore[type-var]
        for event in events:
            if event.token is not None:
                tokens.append(event.token)
            elif event.finish_reason is not None:
                return tuple(tokens), True
            if time.monotonic() > end:
                break
    return tuple(tokens), len(tokens) == count


def shipped_bundle() -> Path | None:
    """The folder of the model that ships; None if there is none."""
    from ondevice.runtime.models import find_model

    try:
        return find_model()
    except ModelNotFoundError:
        return None
