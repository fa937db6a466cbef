"""`python -m real_models.chat`: `ondevice chat` with SmolLM2, which is fetched and converted on first use.

`CHAT_MODEL` in the environment names another model. Where SmolLM2 can't be had, the model that ships answers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ondevice.api import open_model
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.errors import OndeviceError
from ondevice.runtime.models import model_home
from real_models.cache import models_folder
from real_models.fetch import FetchError, Say, fetch
from real_models.table import SMOLLM2

BUNDLE, SHIPPED = "smollm2-135m", "small-relu"
SETTINGS = {
    "ONDEVICE_MODEL": BUNDLE,
    # The model's authors recommend these two; the penalty keeps so small a model from repeating itself.
    "ONDEVICE_TEMP": "0.2",
    "ONDEVICE_TOP_P": "0.9",
    "ONDEVICE_REPETITION_PENALTY": "1.1",
}
ONDEVICE = (sys.executable, "-m", "ondevice")


class ConversionError(Exception):
    """Says in one line why the file can't be converted."""


def settings(arguments: Sequence[str], environment: Mapping[str, str], say: Say) -> dict[str, str]:
    """The options of `ondevice chat`, as environment variables, which its arguments may override.

    A model that the arguments or the environment name has none. Else SmolLM2 is fetched and converted.
    """
    chosen = environment.get("CHAT_MODEL") or BUNDLE
    if chosen != BUNDLE:
        return {"ONDEVICE_MODEL": chosen}
    if not environment.get("CHAT_MODEL") and ("ONDEVICE_MODEL" in environment or _names_model(arguments)):
        return {}
    try:
        prepare(model_home() / BUNDLE, say)
    except (FetchError, ConversionError) as error:
        say(f"{SMOLLM2.title.split(',')[0]} isn't here, so this is {SHIPPED}, which ships: {error}")
        return {"ONDEVICE_MODEL": SHIPPED}
    ours = SETTINGS | {"ONDEVICE_DRAM_BUDGET": f"{budget_bytes(model_home() / BUNDLE) // 10**6}MB"}
    return {name: value for name, value in ours.items() if name not in environment} | {
        "ONDEVICE_MODEL": BUNDLE
    }


def budget_bytes(bundle: Path) -> int:
    """A budget that works and in which a short text needs weights from flash.

    It is an eighth of the way from what a text takes first, with everything in memory, to the smallest that
    works: what the process itself takes differs between machines, and a little from run to run.
    """
    resolved = open_model(bundle, RuntimeConfig())
    return (resolved.smallest_plan.plan.minimum_budget_bytes + 7 * resolved.plan.start_bytes) // 8


def _names_model(arguments: Sequence[str]) -> bool:
    """True if arguments of `ondevice chat` name a model, or ask for help."""
    if arguments and not arguments[0].startswith("-"):
        return True
    return any(it.startswith(("--model", "-m", "--help", "-h")) for it in arguments)


def prepare(bundle: Path, say: Say) -> None:
    """Fetch SmolLM2 and convert it to `bundle`, unless a bundle that can be read is there.

    Raises FetchError and ConversionError.
    """
    try:
        Bundle.open(bundle)
        return
    except OndeviceError:
        pass
    source = fetch(SMOLLM2, models_folder(), say)
    say(
        f"converting {source} once, to {bundle}, {SMOLLM2.nbytes / 1e6:.0f} MB; "
        f"`ondevice remove {BUNDLE}` removes it"
    )
    done = subprocess.run(
        [*ONDEVICE, "convert", source, "--output", bundle, "--force"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConversionError(f"converting it failed: {lines[-1].removeprefix('error: ')}")


def main(arguments: Sequence[str]) -> None:
    """Become `ondevice chat`."""
    environment = dict(os.environ)
    environment |= settings(arguments, environment, lambda line: print(line, file=sys.stderr, flush=True))
    sys.stderr.flush()
    os.execve(sys.executable, [*ONDEVICE, "chat", *arguments], environment)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
