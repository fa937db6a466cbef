# Comparisons with other engines, and the memory ceiling. BENCH_ARGS are passed on.

.PHONY: bench bench-real bench-real-page bench-experts prove-mlx

# Of `make bench-real`: QUICK=1 takes half an hour at most, RESUME=1 goes on with the runs that are stored, and
# BENCH_MODELS names some models.
QUICK ?=
RESUME ?=
BENCH_MODELS ?=
BENCH_REAL := PYTHONPATH=weights/real $(PY) -m tests.benchmarks.real.real_models --workdir $(BENCH_DIR)

bench: $(STAMPS)/bench
	@mkdir -p $(BENCH_DIR)
	@status=0; for script in compare.versus_llama_cpp compare.flash_versus_llama_cpp compare.flash_versus_fio \
		ceiling.ceiling ceiling.ceiling_matrix ceiling.long_ceiling compare.convert_versus_cp; do \
		echo "== $$script"; \
		$(PY) -m tests.benchmarks.$$script --workdir $(BENCH_DIR) $(BENCH_ARGS) || status=1; \
	done; exit $$status

# `transformers` reads the files in float32, for which it needs two packages more.
$(STAMPS)/bench-real: $(STAMPS)/bench $(STAMPS)/torch $(STAMPS)/train
	@$(PIP) accelerate "gguf>=0.10"
	@touch $@

# The yardstick: both engines on real models, from the same files. The page is written from what it stored.
bench-real: $(STAMPS)/bench-real
	@mkdir -p $(BENCH_DIR)
	@$(BENCH_REAL) $(if $(QUICK),--size quick) $(if $(RESUME),--resume) \
		$(foreach model,$(BENCH_MODELS),--model $(model)) $(BENCH_ARGS)

bench-real-page: $(STAMPS)/bench-real
	@$(BENCH_REAL) --page

# What caches of experts hit on real routing, and the speed of a mixture larger than memory.
bench-experts: $(STAMPS)/bench $(STAMPS)/test
	@mkdir -p $(BENCH_DIR)
	@status=0; echo "== compare.expert_replay"; $(PY) -m tests.benchmarks.compare.expert_replay || status=1; \
	echo "== compare.experts_versus_llama_cpp"; \
	$(PY) -m tests.benchmarks.compare.experts_versus_llama_cpp --workdir $(BENCH_DIR) $(BENCH_ARGS) || status=1; \
	exit $$status

# The newest mlx-lm is the rival; the tests don't need it. Where there is a GPU of NVIDIA's, MLX gets to it.
$(STAMPS)/mlx-lm: $(STAMPS)/test
	@$(PIP) mlx-lm $$(if nvidia-smi >/dev/null 2>&1; then echo "mlx[cuda]"; fi)
	@touch $@

# On MLX's GPU where there is one: half-precision operands, what its kernels promise, and a 7B shape in its memory.
prove-mlx: $(STAMPS)/mlx-lm
	@mkdir -p $(BENCH_DIR)
	@gpu=$$($(PY) -c "import mlx.core as mx; print('1' if mx.default_device() == mx.gpu else '')"); status=0; \
	if [ "$$gpu" ]; then echo "== MLX on its GPU"; else echo "== MLX on its CPU device: no GPU is proven"; fi; \
	echo "== doctor"; $(VENV)/bin/ondevice doctor || status=1; \
	echo "== tests"; ONDEVICE_TEST_MLX_GPU=$$gpu $(PY) -m pytest -q -m "not slow" $(TEST_ARGS) tests || status=1; \
	ONDEVICE_TEST_MLX_GPU=$$gpu $(PY) -m pytest -q -m slow --timeout 3600 $(TEST_ARGS) tests/backends || status=1; \
	echo "== flash_into_mlx"; $(PY) -m tests.benchmarks.explain.flash_into_mlx || status=1; \
	echo "== versus_mlx_lm"; $(PY) -m tests.benchmarks.compare.versus_mlx_lm --workdir $(BENCH_DIR) \
		--shape $$(if [ "$$gpu" ]; then echo llama-7b; else echo small; fi) $(BENCH_ARGS) || status=1; \
	exit $$status
