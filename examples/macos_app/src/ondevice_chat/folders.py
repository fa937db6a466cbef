"""Where the app keeps what outlives it: Application Support, never its own bundle, which is read-only.

It knows no model but by its folder's name, and makes nothing but folders.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import platformdirs

NAME = "OnDevice Chat"
BUILT_IN = "Built-in model"
"""What the small model is called that ships inside `ondevice`."""


@dataclass(frozen=True)
class Folders:
    """`data` holds the transcript, and a folder of models that `ondevice convert` made."""

    data: Path

    @classmethod
    def of_this_user(cls) -> Folders:
        """~/Library/Application Support on macOS, and what other platforms have in its place."""
        return cls(platformdirs.user_data_path(NAME, appauthor=False))

    @property
    def models(self) -> Path:
        return self.data / "models"

    @property
    def transcript(self) -> Path:
        return self.data / "transcript.json"

    def prepare(self) -> str:
        """Make the folders, so that they can be found; what hinders that, in words, or nothing."""
        try:
            self.models.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"Nothing will be saved: {self.data} can't be written ({error.strerror})."
        return ""

    def model_names(self) -> list[str]:
        """What there is to choose from, the built-in model first."""
        try:
            found = sorted(path.parent.name for path in self.models.glob("*/bundle.json"))
        except OSError:
            found = []
        return [BUILT_IN, *found]

    def model(self, name: str) -> Path | None:
        """What `ondevice.load` takes for a name; None is the model that ships."""
        return None if name == BUILT_IN else self.models / name
