PYTHON ?= python3
BIN := .venv/bin
FLOWER_BIN := build/flower/venv/bin

.PHONY: demo test test-all test-flower test-trackers docs wheel clean

demo: .venv/installed
	$(BIN)/feddbe compare fedavg fedavg+dbe

test: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n auto --dist worksteal

test-all: test test-flower test-trackers  # a thousand kills, flips and random networks; every method on Ray; all of a federation
	FEDDBE_CASES=1000 $(BIN)/pytest -n auto tests/contract/test_kill.py tests/runs/test_store_verification.py tests/test_fuzz.py \
		tests/test_crafted_runs.py \
		tests/simulation/test_ray.py tests/contract/test_every_method.py tests/training/compiled/test_kernels.py
	FEDDBE_CASES=1 $(BIN)/pytest -n auto tests/real_federation  # real processes: faults, attacks, three machines

test-trackers: build/trackers/installed  # W&B, MLflow and TensorBoard with the real packages, offline
	build/trackers/bin/python -m pytest -rs tests/callbacks/test_tracking.py

test-flower: build/flower/installed  # real processes of stock Flower, and nginx if it is installed
	$(FLOWER_BIN)/pytest -rs tests/real_federation/test_flower.py

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

build/trackers/installed: pyproject.toml constraints.txt  # apart from .venv: W&B and MLflow are large
	$(PYTHON) -m venv build/trackers
	build/trackers/bin/pip install --quiet -c constraints.txt -e '.[wandb,mlflow,tensorboard]' pytest hypothesis
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ .venv/installed

build/flower/installed: pyproject.toml constraints.txt  # its own environment: Flower needs older versions of four packages
	$(PYTHON) -m venv build/flower/venv
	grep -vE '^(protobuf|fastapi|starlette|uvicorn)==' constraints.txt > build/flower/constraints.txt
	$(FLOWER_BIN)/python -m pip install --quiet --disable-pip-version-check -c build/flower/constraints.txt \
		-e '.[flower]' pytest hypothesis
	touch $@
