"""What conversion refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.converters.convert import convert
from ondevice.errors import OndeviceError


def assert_refused(source: Path, error: type[OndeviceError], match: str, quant: str = "q4") -> None:
    """Conversion ends in exactly `error`, and leaves nothing that could be taken for a bundle."""
    output = source.parent / "output"
    with pytest.raises(error, match=match) as caught:
        convert(source, output, quant, force=True)
    assert type(caught.value) is error
    assert len(str(caught.value)) < 600
    assert not output.exists()
