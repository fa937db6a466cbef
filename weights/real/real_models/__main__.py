"""`python -m real_models [--optional] [NAME ...]`: fetches the named models, or all; paths go to stdout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from real_models.cache import models_folder
from real_models.fetch import FetchError, fetch
from real_models.table import REAL_MODELS

INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Fetch models, and return the exit code: 1 if one can't be had."""
    parser = argparse.ArgumentParser(prog="python -m real_models", description=__doc__)
    parser.add_argument("--optional", action="store_true", help="what can't be had is said, and no error")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(REAL_MODELS)}; all of them if none is named")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in REAL_MODELS]:
        say(f"no real model is called {', '.join(unknown)}; there are {', '.join(REAL_MODELS)}")
        return 2
    folder, code = models_folder(), 0
    for name in dict.fromkeys(options.names or REAL_MODELS):
        try:
            path = fetch(REAL_MODELS[name], folder, say, verify=not options.optional)
        except FetchError as error:
            say(f"{name} isn't here: {error}")
            code = 0 if options.optional else 1
        else:
            if not options.optional:
                print(f"{path}  ({REAL_MODELS[name].licence})", flush=True)
    return code


def say(line: str) -> None:
    """Show a line on stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
