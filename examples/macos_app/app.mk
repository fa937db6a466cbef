# The example app, from its sources.

.PHONY: app app-screenshot

APP := examples/macos_app
SCREENSHOT ?= $(APP)/screenshot.png

# The backend of this platform: Cocoa, or GTK, which needs what $(APP)/README.md lists.
$(STAMPS)/app: $(STAMPS)/installed
	@$(PIP) "toga~=0.5.0"
	@touch $@

app: $(STAMPS)/app
	@PYTHONPATH=$(APP)/src $(PY) -m ondevice_chat

app-screenshot: $(STAMPS)/app
	@PYTHONPATH=$(APP)/src $(PY) $(APP)/screenshot.py "$(SCREENSHOT)"
