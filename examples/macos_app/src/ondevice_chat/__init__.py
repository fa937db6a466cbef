"""A chat window around `ondevice`: `chat` has the logic, `app` the widgets, the others one task each."""
