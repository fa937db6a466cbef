"""Latent attention: keys and values of all heads come from one short vector for each token."""

from __future__ import annotations

from ondevice.errors import UnsupportedModelError
from ondevice.model_config.checks import SIZE_LIMITS, check_integer
from ondevice.records import dataclass

LATENT_LANES = 16
"""Latent and value widths are multiples of this, the number of values that a kernel takes at a time."""


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1).

    A token has one latent, the norm of `rank` values, and one rotary key part of `turning` values. Both are
    stored, for all heads. A head h has matrices K_h (key_dim, rank) and V_h (value_dim, rank): its key is
    [K_h latent | rotary part], its value V_h latent.

    Stored tokens aren't multiplied by K_h and V_h: a score is the product of K_h^T query with the latent, and
    a head's output is V_h times the weighted latents. This "absorbed" form is used for any number of tokens,
    so that a token's bits never depend on how many are computed together.

    Args:
        rank: width of a latent.
        turning: width of the rotary part of a query and of a key.
        key_dim: width of the part of a head's query that is multiplied by K_h^T.
        value_dim: width of a head's value.
        query_rank: if not 0, the width of the normed low-rank input of queries.
        eps: the eps of both norms.
    """

    rank: int
    turning: int
    key_dim: int
    value_dim: int
    query_rank: int = 0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("rank", "turning", "key_dim", "value_dim"):
            check_integer(f"latent attention: {name}", getattr(self, name), 1, SIZE_LIMITS["head_dim"])
        check_integer("latent attention: query_rank", self.query_rank, 0, SIZE_LIMITS["hidden_size"])
        for name in ("rank", "value_dim"):
            if getattr(self, name) % LATENT_LANES:
                raise UnsupportedModelError(
                    f"latent attention: {name} is {getattr(self, name)}; it must be a multiple of "
                    f"{LATENT_LANES}"
                )
        if self.turning % 2:
            raise UnsupportedModelError(
                f"latent attention: turning is {self.turning}; rotary embedding needs pairs"
            )
        check_integer("latent attention: rank and turning together", self.width, 1, SIZE_LIMITS["head_dim"])
        if not 0.0 < self.eps < 1.0:
            raise UnsupportedModelError(
                f"latent attention: eps is {self.eps}; it must be above 0 and below 1"
            )

    @property
    def width(self) -> int:
        """Floats that are stored for a token."""
        return self.rank + self.turning

    @property
    def query_width(self) -> int:
        """Width of a head's query before it is multiplied by K_h^T."""
        return self.key_dim + self.turning
