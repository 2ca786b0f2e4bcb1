PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all docs wheel clean

demo: .venv/installed
	$(BIN)/feddbe compare fedavg fedavg+dbe

test: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n auto --dist worksteal

test-all: test  # a thousand kills, flips and random networks; every method on Ray; every hyperparameter everywhere
	FEDDBE_CASES=1000 $(BIN)/pytest -n auto tests/contract/test_kill.py tests/runs/test_store_verification.py tests/test_fuzz.py \
		tests/test_crafted_runs.py \
		tests/simulation/test_ray.py tests/contract/test_every_method.py tests/training/compiled/test_kernels.py

wheel: .venv/bin/python  # as a user installs it: built, then into an empty environment, without extras
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip install --quiet -c constraints.txt build/wheel/feddbe-*.whl
	cd build/wheel && venv/bin/feddbe compare fedavg fedavg+dbe --rounds 5 --out compared
	cd build/wheel && venv/bin/feddbe show compared && venv/bin/feddbe verify compared && venv/bin/feddbe methods > methods.txt

docs: .venv/installed-dev  # the site, in build/site; open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ .venv/installed
