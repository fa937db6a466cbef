"""Checks the values of a model's description, and raises errors for those out of range."""

from __future__ import annotations

from ondevice.errors import UnsupportedModelError

MAX_FACTOR = 1e6
"""Largest multiplier and soft cap."""
MIN_FACTOR = 1e-6
SIZE_LIMITS = {
    "hidden_size": 1 << 17,
    "num_layers": 1 << 10,
    "num_heads": 1 << 10,
    "num_kv_heads": 1 << 10,
    "head_dim": 1 << 10,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "max_context": 1 << 24,
}


def check_factor(name: str, value: float) -> None:
    """Check a factor. Raises UnsupportedModelError if it is out of range."""
    if not MIN_FACTOR <= value <= MAX_FACTOR:
        raise UnsupportedModelError(f"{name} is {value}; it must be from {MIN_FACTOR:g} to {MAX_FACTOR:g}")


def check_integer(name: str, value: object, minimum: int, maximum: int) -> None:
    """Check that `value` is an integer from `minimum` to `maximum`. Raises UnsupportedModelError if not."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise UnsupportedModelError(f"{name} is {value!r}; it must be an integer from {minimum} to {maximum}")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Check that a value is one of those allowed. Raises UnsupportedModelError if not."""
    if value not in allowed:
        raise UnsupportedModelError(f"{name} {value!r} is not one of {', '.join(allowed)}")
