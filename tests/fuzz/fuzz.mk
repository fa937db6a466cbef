# Fuzzing by seeds, and many threads on one model. FUZZ_SECONDS: how long.

FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 0

.PHONY: fuzz stress stress-tsan

# What it finds is kept in build/fuzz/findings, each with the command that repeats it.
fuzz: $(STAMPS)/test
	@$(PY) -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

stress: $(STAMPS)/test
	@$(PY) -m tests.thread_stress --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

# The same over an extension built with ThreadSanitizer, beside a copy of the package, as test-sanitize does.
# The interpreter isn't instrumented: what is suppressed, and why, is in tsan_suppressions.txt.
TSAN := build/tsan
stress-tsan: $(STAMPS)/test $(STAMPS)/native
	@mkdir -p build/native
	@$(call NATIVE_BUILD,build/native/tsan-python,-DONDEVICE_SANITIZE=thread -DONDEVICE_PYTHON=ON \
		-DPython_EXECUTABLE=$(abspath $(PY)))
	@rm -rf $(TSAN) && mkdir -p $(TSAN)
	@cp -r ondevice tests pyproject.toml $(TSAN)
	@cp -r converters cli.py $(TSAN)/ondevice
	@cp build/native/tsan-python/core/_native*.so $(TSAN)/ondevice/kernels
	@packages="$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; cd $(TSAN); \
		LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" PYTHONPATH="$$packages" OPENBLAS_NUM_THREADS=1 \
		TSAN_OPTIONS="suppressions=tests/fuzz/tsan_suppressions.txt:halt_on_error=1" \
		$(abspath $(PY)) -S -m tests.thread_stress --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)
