"""Fixtures of tests whose nodes are in this process: the nodes' files and the form of their data."""

from __future__ import annotations

from pathlib import Path

import pytest

from feddbe.federation.data_spec import DataSpec
from tests.real_federation.nodes import make_files, make_spec


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_files(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return make_spec(tmp_path_factory.mktemp("spec"))
