"""The types of what `_native` has to run kernels and to time them."""

class Runner:
    """What runs kernels: threads, the kernels of one instruction set, and their scratch memory."""

    def __init__(self, threads: int, target: str = "auto") -> None: ...
    @property
    def target(self) -> str: ...
    def trim(self) -> None:
        """Free the scratch memory; later calls allocate what they need."""

    def time_steps(self, counts: bool) -> None:
        """Count the time of steps from now on, from zero, or no longer."""

    def step_times(self) -> list[tuple[str, float, int, int]]:
        """Totals of each step: its name, seconds, multiplications, and bytes of weights, keys and values."""

    def name_products(self, name: str) -> None:
        """Let products of matrices be part of the step `name` from now on."""

def seconds_in_cache(runner: Runner, rows: int, cols: int, tokens: int, rounds: int) -> float:
    """Seconds of `rounds` products of a 4-bit matrix with `tokens` tokens, on each thread at once."""
