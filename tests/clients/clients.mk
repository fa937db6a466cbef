# The programs that people point at a local model, from packages. CLIENTS names some; AGENT_MODEL, SOAK_MINUTES.

CLIENTS ?=
AGENT_MODEL ?= qwen2.5-coder-1.5b
SOAK_MINUTES ?= 30

.PHONY: clients test-clients soak-clients record-clients

clients: $(STAMPS)/test
	@$(PY) -m tests.clients.install $(CLIENTS)

# Each on a real server: agents with AGENT_MODEL and one task, the others with SmolLM2 and one question.
test-clients: clients
	@$(REAL_MODELS) smollm2 $(AGENT_MODEL)
	@AGENT_MODEL=$(AGENT_MODEL) $(PY) -m pytest -q -m clients --timeout 3600 $(TEST_ARGS) tests/clients

# Four agents at once for SOAK_MINUTES, by what was recorded of them; ends with one JSON line.
soak-clients: $(STAMPS)/test
	@$(REAL_MODELS) smollm2
	@PYTHONPATH="weights/real$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -m tests.clients.soak --minutes $(SOAK_MINUTES)

# What programs of other versions send, for the fast tests: tests/clients/recorded.
record-clients: clients
	@$(PY) -m tests.clients.record $(CLIENTS)
