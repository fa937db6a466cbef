# The documents: a site from all of them, strictly, and the page that is generated.

DOCS_STAGE := build/docs
SITE := build/site

.PHONY: docs options

$(STAMPS)/docs: $(STAMPS)/installed pyproject.toml
	$(extra)

# Documents link to each other across folders, so the site is built from copies that lie as they do. With --quiet,
# warnings would not be counted, and a dead link would pass.
docs: $(STAMPS)/docs options
	@rm -rf $(DOCS_STAGE) && mkdir -p $(DOCS_STAGE)
	@tar --create --file - README.md CONTRIBUTING.md CHANGELOG.md LICENSE weights/README.md \
		weights/real/*.md $(MODEL_FOLDER)/*.md $(MODEL_FOLDER)/NOTICE $(APP)/README.md $(APP)/*.png \
		docs/*.md docs/lab docs/pictures tests/benchmarks/data/*/README.md \
		| tar --extract --file - --directory $(DOCS_STAGE)
	@$(PY) -m mkdocs build --strict --config-file docs/tools/mkdocs.yml --site-dir $(CURDIR)/$(SITE)
	@echo "the site is $(SITE)/index.html" >&2

options: $(STAMPS)/installed
	@$(PY) docs/tools/options.py
