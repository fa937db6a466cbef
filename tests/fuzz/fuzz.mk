# Fuzzing by seeds, and many threads on one model. FUZZ_SECONDS: how long.

FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 0

GUIDED := build/guided
GUIDED_TARGETS := manifest sidecars tokenizer pattern sentencepiece template settings checkpoint config

.PHONY: fuzz fuzz-guided stress stress-tsan

# What it finds is kept in build/fuzz/findings, each with the command that repeats it.
fuzz: $(STAMPS)/test
	@$(PY) -m tests.fuzz --families --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

# Guided by coverage, a tenth of the time for each parser in Python, in a copy of the package that atheris's import
# hook sees; and the flash reader under AddressSanitizer and UBSan. Corpora and findings stay in build/fuzz/guided.
$(STAMPS)/atheris: $(STAMPS)/test
	@$(PIP) atheris
	@touch $@

fuzz-guided: $(STAMPS)/atheris $(STAMPS)/native
	@mkdir -p build/native build/fuzz/guided
	@$(call NATIVE_BUILD,build/native/asan,-DONDEVICE_SANITIZE=address$(comma)undefined -DONDEVICE_PYTHON=ON \
		-DPython_EXECUTABLE=$(abspath $(PY)))
	@rm -rf $(GUIDED) && mkdir -p $(GUIDED)
	@cp -r ondevice tests pyproject.toml $(GUIDED)
	@cp -r converters cli.py $(GUIDED)/ondevice
	@cp "$$($(PY) -c 'from ondevice.kernels import _native; print(_native.__file__)')" $(GUIDED)/ondevice/kernels
	@packages="$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; cd $(GUIDED); \
		for target in $(GUIDED_TARGETS); do echo "== $$target"; \
		PYTHONPATH="$$packages" $(abspath $(PY)) -S -m tests.fuzz.guided $$target \
			--corpus $(abspath build/fuzz/guided)/$$target -max_total_time=$$(($(FUZZ_SECONDS) / 10)) -timeout=10 \
			-rss_limit_mb=2048 -artifact_prefix=$(abspath build/fuzz/guided)/$$target- \
			> $(abspath build/fuzz/guided)/$$target.log 2>&1 \
			|| { grep -v "^INFO" $(abspath build/fuzz/guided)/$$target.log | tail -n 40; exit 1; }; \
		tail -n 1 $(abspath build/fuzz/guided)/$$target.log; done
	@UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/native/asan/flash_fuzz build/native \
		$$(($(FUZZ_SECONDS) / 10)) $(FUZZ_SEED)

stress: $(STAMPS)/test
	@$(PY) -m tests.support.thread_stress --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

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
		$(abspath $(PY)) -S -m tests.support.thread_stress --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)
