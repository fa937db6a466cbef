"""The window: widgets that show what a `Chat` says and tell it what was pressed. Nothing is decided here."""

from __future__ import annotations

from typing import Any

import toga
from toga.style import Pack

import ondevice
from ondevice_chat import wording
from ondevice_chat.chat import Chat
from ondevice_chat.folders import NAME, Folders

APP_ID = "org.example.ondevice-chat"
GAP = 8
"""Pixels between widgets."""
BELOW, BELOW_BYTES = 1 / 10, 2_000_000
"""What the slider has below its useful part, as a share of that, and in bytes at least: who asks for too
little is told the least that works."""


class ChatApp(toga.App):
    """The app; `folders` and what else a Chat takes are given in tests."""

    def __init__(self, folders: Folders | None = None, **options: Any) -> None:
        self._folders = folders or Folders.of_this_user()
        self._options = options
        super().__init__(NAME, APP_ID, app_name="ondevice_chat")

    def startup(self) -> None:
        """Make the window. Loading begins once it is shown."""
        self.chat = Chat(self._folders, self.refresh, **self._options)
        self._refreshing = False
        self._shown = ""
        self._shown_plan: ondevice.Plan | None = None
        self.models = toga.Selection(
            items=self.chat.model_names, on_change=self.change_model, style=Pack(flex=1)
        )
        self.new_button = toga.Button("New chat", on_press=self.new_chat, style=Pack(margin_left=GAP))
        self.conversation = toga.MultilineTextInput(readonly=True, style=Pack(flex=1, margin=(GAP, 0)))
        self.entry = toga.TextInput(
            placeholder="Say something", on_confirm=self.send, style=Pack(flex=1, margin_right=GAP)
        )
        self.send_button = toga.Button("Send", on_press=self.send)
        self.stop_button = toga.Button("Stop", on_press=self.stop, style=Pack(margin_left=GAP))
        self.slider = toga.Slider(on_change=self.change_budget, enabled=False, style=Pack(margin_top=GAP))
        self.budget_label, self.division_label, self.figures_label = (
            toga.Label("", style=Pack(font_size=9)) for _ in range(3)
        )
        self.main_window = toga.MainWindow(title=NAME, size=(760, 600))
        self.main_window.content = toga.Box(
            style=Pack(direction="column", margin=GAP),
            children=[
                toga.Box(children=[self.models, self.new_button]),
                self.conversation,
                toga.Box(children=[self.entry, self.send_button, self.stop_button]),
                self.slider,
                self.budget_label,
                self.division_label,
                self.figures_label,
            ],
        )
        self.refresh()
        self.main_window.show()

    async def on_running(self) -> None:
        """The window is there: load the model."""
        await self.chat.open()
        self.entry.focus()

    async def on_exit(self) -> bool:
        """Before the window goes, so do the reply and the model."""
        await self.chat.close()
        return True

    async def send(self, widget: toga.Widget, **_: Any) -> None:
        """Send what was typed; it returns to where it was typed if it couldn't be answered."""
        text, self.entry.value = self.entry.value, ""
        if not await self.chat.send(text) and not self.entry.value:
            self.entry.value = text

    def stop(self, widget: toga.Widget, **_: Any) -> None:
        self.chat.stop()

    async def new_chat(self, widget: toga.Widget, **_: Any) -> None:
        await self.chat.new_chat()

    # These two are also called by what `refresh` changes, and begun as tasks they would no longer know.
    def change_model(self, widget: toga.Selection, **_: Any) -> None:
        if not self._refreshing:
            self.loop.create_task(self.chat.open(str(widget.value)))

    def change_budget(self, widget: toga.Slider, **_: Any) -> None:
        if not self._refreshing:
            self.loop.create_task(self.chat.set_budget(round(widget.value)))

    def refresh(self) -> None:
        """Show the chat as it is now."""
        self._refreshing = True
        try:
            text = self.chat.text
            if text != self._shown:
                self.conversation.value = self._shown = text
                self.conversation.scroll_to_bottom()
            self.send_button.enabled = self.chat.ready
            self.stop_button.enabled = self.chat.answering
            self.models.enabled = self.new_button.enabled = not self.chat.answering
            if self.models.value != self.chat.choice:
                self.models.value = self.chat.choice
            self.figures_label.text = self.chat.figures
            if self.chat.plan is not self._shown_plan:
                self._show_plan(self.chat.plan)
        finally:
            self._refreshing = False

    def _show_plan(self, plan: ondevice.Plan | None) -> None:
        self._shown_plan = plan
        self.slider.enabled = plan is not None
        if plan is None:
            self.budget_label.text = self.division_label.text = ""
            return
        least, full = plan.minimum_budget_bytes, plan.full_bytes
        lowest = least - max(BELOW_BYTES, round(BELOW * (full - least)))
        if (self.slider.min, self.slider.max) != (lowest, full):
            self.slider.min, self.slider.max = lowest, full
        self.slider.value = plan.budget_bytes
        self.budget_label.text = wording.budget(plan, self.chat.yielding)
        self.division_label.text = wording.division(plan)
