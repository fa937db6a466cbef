"""The description of a rotary position embedding."""

from __future__ import annotations

from ondevice.errors import UnsupportedModelError
from ondevice.model_config.checks import check_factor
from ondevice.records import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (arXiv 2104.09864) of a head's dimension pairs (i, i + Dh / 2).

    frequencies: (Dh / 2,) angle of each pair in radians per position, already scaled for long contexts, as
        float32 values. A pair with frequency 0 isn't rotated.
    magnitude: factor of the cosine and sine of rotated pairs (YaRN, arXiv 2309.00071, section 3.4).
    long_frequencies: replace `frequencies` in contexts of more than `original_context` tokens (LongRoPE,
        arXiv 2402.13753); empty, with 0: `frequencies` serve every context. The context decides, not the
        text's length, so that a token's keys never change.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    long_frequencies: tuple[float, ...] = ()
    original_context: int = 0

    def __post_init__(self) -> None:
        if not all(0.0 <= frequency <= 1.0 for frequency in (*self.frequencies, *self.long_frequencies)):
            raise UnsupportedModelError("rotary frequencies must be from 0 to 1 radian per position")
        check_factor("rope magnitude", self.magnitude)
        turning = [frequency > 0 for frequency in self.frequencies]
        if self.long_frequencies and [it > 0 for it in self.long_frequencies] != turning:
            raise UnsupportedModelError("a rope's long_frequencies turn other pairs than its frequencies")
        if bool(self.long_frequencies) != (self.original_context > 0) or self.original_context < 0:
            raise UnsupportedModelError(
                f"a rope's original_context is {self.original_context}; it must be 1 or more with "
                "long_frequencies, and 0 without"
            )

    def within(self, context: int) -> RopeSpec:
        """The rotary embedding that a context of `context` tokens uses."""
        is_long = bool(self.long_frequencies) and context > self.original_context
        return RopeSpec(self.long_frequencies if is_long else self.frequencies, self.magnitude)

    @property
    def turning(self) -> int:
        """Number of a head's dimensions that are rotated."""
        return 2 * sum(frequency > 0 for frequency in self.frequencies)
