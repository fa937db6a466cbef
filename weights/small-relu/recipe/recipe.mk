# The model that ships, from text to bundle. TRAIN_ARGS and EVALUATE_ARGS are passed on.

MODEL_FOLDER := weights/small-relu
RECIPE_BUILD := build/recipe

.PHONY: train train-mixture evaluate-model model-tables

RECIPE := cd $(MODEL_FOLDER) && $(abspath $(PY)) -m recipe

# The one that ships, so that figures compare; recipe.tokenizer trains another.
$(RECIPE_BUILD)/tokenizer.model: $(MODEL_FOLDER)/tokenizer.model | $(STAMPS)/train
	@mkdir -p $(RECIPE_BUILD) && cp $< $@

$(RECIPE_BUILD)/streams.json: $(RECIPE_BUILD)/tokenizer.model
	@$(RECIPE).pack --data $(abspath $(SHARED)/data)

train: $(RECIPE_BUILD)/streams.json
	@$(RECIPE).train $(TRAIN_ARGS)
	@$(RECIPE).export
	@$(VENV)/bin/ondevice convert $(RECIPE_BUILD)/export/small-relu --output $(RECIPE_BUILD)/bundles/small-relu-q8 \
		--quant q8 --force </dev/null >&2
	@$(RECIPE).predictors --model $(abspath $(RECIPE_BUILD)/bundles/small-relu-q8)
	@$(RECIPE).streams --model $(abspath $(RECIPE_BUILD)/bundles/small-relu-q8) --steps 2000 --stride 2 \
		--write $(abspath $(RECIPE_BUILD)/bundles/small-relu-q8)
	@$(RECIPE).recorded_tokens --model $(abspath $(RECIPE_BUILD)/bundles/small-relu-q8)
	@echo "the bundle is $(RECIPE_BUILD)/bundles/small-relu-q8; to ship it: cp $(RECIPE_BUILD)/bundles/small-relu-q8/* $(MODEL_FOLDER)/" >&2

# The small mixture of experts that proofs use: half an hour of one core.
train-mixture: $(RECIPE_BUILD)/streams.json
	@$(RECIPE).train --size mixture --name small-olmoe --tokens 1548288 --batch-windows 4 --no-compile $(TRAIN_ARGS)
	@$(RECIPE).export --name small-olmoe
	@$(VENV)/bin/ondevice convert $(RECIPE_BUILD)/export/small-olmoe --output $(RECIPE_BUILD)/bundles/small-olmoe \
		--quant q4 --force </dev/null >&2

evaluate-model: $(RECIPE_BUILD)/streams.json
	@$(RECIPE).evaluate $(EVALUATE_ARGS)

model-tables: $(RECIPE_BUILD)/streams.json
	@$(RECIPE).sparsity
	@$(RECIPE).samples --data $(abspath $(SHARED)/data)
