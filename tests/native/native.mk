# The native test programs here, under an aarch64 emulator, and under sanitizers.

NATIVE_BUILD = $(VENV)/bin/cmake -S tests/native -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja \
	-DCMAKE_BUILD_TYPE=Release $(2) > $(1).log 2>&1 && $(VENV)/bin/cmake --build $(1) >> $(1).log 2>&1 \
	|| { tail -n 40 $(1).log; exit 1; }
NEON_CXX ?= aarch64-linux-gnu-g++
NEON_RUN ?= qemu-aarch64 -cpu max
VECTORS := build/native/vectors.bin

# One build's programs beside kernel_vectors.
NATIVE_RUN = $(1)/allocations build/native; $(1)/pool_stress; $(1)/read_ahead_stress build/native; \
	$(1)/range_stress build/native; $(1)/record_stress build/native; $(1)/flash_fuzz build/native 5

.PHONY: test-native test-neon test-sanitize test-tsan bench-products count-products

$(STAMPS)/native: $(STAMPS)/venv
	@$(PIP) cmake ninja
	@touch $@

test-native: $(STAMPS)/native
	@mkdir -p build/native
	@$(call NATIVE_BUILD,build/native/plain,)
	@build/native/plain/kernel_vectors --write $(VECTORS)
	@$(call NATIVE_RUN,build/native/plain)

# GMAC/s of each format on each of this machine's targets, for 256 tokens, 4 and 1.
bench-products: $(STAMPS)/native
	@mkdir -p build/native
	@$(call NATIVE_BUILD,build/native/plain,)
	@for tokens in 256 4 1; do echo "tokens: $$tokens"; build/native/plain/product_rates $$tokens; done

# The NEON build's programs, for the emulator.
define NEON_BUILD
	@command -v $(firstword $(NEON_CXX)) >/dev/null && command -v $(firstword $(NEON_RUN)) >/dev/null || { \
		echo "$@ needs $(firstword $(NEON_CXX)) and $(firstword $(NEON_RUN))" \
		"(Debian packages g++-aarch64-linux-gnu and qemu-user)." >&2; exit 1; }
	@$(call NATIVE_BUILD,build/native/neon,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=$(NEON_CXX) -DCMAKE_EXE_LINKER_FLAGS=-static)
endef

# Bit for bit: the emulated NEON build against the vectors that this machine's build wrote.
test-neon: test-native
	$(NEON_BUILD)
	@$(NEON_RUN) build/native/neon/kernel_vectors --compare $(VECTORS)

# Instructions of products on NEON and i8mm, which no machine here can time.
count-products: $(STAMPS)/native
	@mkdir -p build/native
	$(NEON_BUILD)
	@$(PY) tests/native/count_products.py build/native/neon/product_rates $(NEON_RUN)

test-tsan: $(STAMPS)/native
	@mkdir -p build/native
	@$(call NATIVE_BUILD,build/native/tsan,-DONDEVICE_SANITIZE=thread)
	@export TSAN_OPTIONS=halt_on_error=1; build/native/tsan/kernel_vectors; $(call NATIVE_RUN,build/native/tsan)

# The native tests, and the Python tests of kernels and flash over an extension built with both sanitizers.
# They run beside a copy of the package that has the instrumented extension; -S keeps the editable install's
# import hook out. Left out: what preloads a library of its own.
SANITIZED := build/sanitize
SANITIZED_TESTS := tests/kernels/test_kernels.py tests/kernels/test_wide_kernels.py tests/kernels/test_gathered.py \
	tests/kernels/test_planes.py \
	tests/kernels/test_narrow_values.py tests/kernels/test_tiled_matrix.py \
	tests/tokenizer/test_byte_pairs.py tests/backends/test_cpu.py $(filter-out %_faults.py %_cost_model.py,$(wildcard tests/flash/test_*.py))
test-sanitize: $(STAMPS)/test
	@mkdir -p build/native
	@$(call NATIVE_BUILD,build/native/asan,-DONDEVICE_SANITIZE=address$(comma)undefined -DONDEVICE_PYTHON=ON \
		-DPython_EXECUTABLE=$(abspath $(PY)))
	@export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1; \
		build/native/asan/kernel_vectors; $(call NATIVE_RUN,build/native/asan)
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	@cp -r ondevice tests pyproject.toml $(SANITIZED)
	@cp -r converters cli.py $(SANITIZED)/ondevice
	@cp build/native/asan/core/_native*.so $(SANITIZED)/ondevice/kernels
	@packages="$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; cd $(SANITIZED); \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONPATH="$$packages" \
		$(abspath $(PY)) -S -m pytest -q -p no:cacheprovider $(SANITIZED_TESTS)
