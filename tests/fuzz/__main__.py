"""Fuzz everything that is read from outside, for so long: `python -m tests.fuzz --seconds 600`.

Every case follows from the seed, its kind and its number. A finding is kept, with what repeats it.
"""

from __future__ import annotations

import os
import sys

# Before numpy: a process with threads can't be forked from.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tests.fuzz.command import main

if __name__ == "__main__":
    sys.exit(main())
