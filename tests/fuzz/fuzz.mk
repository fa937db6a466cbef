# Fuzzing by seeds. FUZZ_SECONDS: how long.

FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 0

.PHONY: fuzz

# What it finds is kept in build/fuzz/findings, each with the command that repeats it.
fuzz: $(STAMPS)/test
	@$(PY) -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)
