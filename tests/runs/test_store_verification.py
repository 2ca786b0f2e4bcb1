"""Verification: flipped bits and truncated files are detected or harmless, without tracebacks."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from feddbe.errors import StoreError
from feddbe.runs.store import RUN_FILE, PartStatus, RunStore, verify_run
from tests.small_runs import experiment, run_outcome


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    run_outcome(experiment("fedavg+dbe"), folder)
    return (folder / RUN_FILE).read_bytes()


def everything(folder: Path) -> str:
    store = RunStore.open(folder)
    try:
        return repr((store.round_results(), store.hashes(), store.meta("config_hash"), store.records(1)))
    finally:
        store.close()


FLIPS = int(os.environ.get("FEDDBE_CASES", "48"))


@pytest.mark.parametrize("seed", range(FLIPS))
def test_flipped_bits_are_detected_or_harmless(seed: int, whole: bytes, tmp_path: Path) -> None:
    """A third of them in the file's head, where tables and formats are."""
    (tmp_path / RUN_FILE).write_bytes(whole)
    expected, rng, content = everything(tmp_path), random.Random(seed), bytearray(whole)
    content[rng.randrange(1500 if seed % 3 == 0 else len(whole))] ^= 1 << rng.randrange(8)
    (tmp_path / RUN_FILE).write_bytes(content)
    result = verify_run(tmp_path)
    if result.is_intact:
        assert everything(tmp_path) == expected
        assert result.round == 2
    else:
        wrong = result.texts(PartStatus.DAMAGED)
        assert all("\n" not in text and "intact" not in text and "began" not in text for text in wrong)
        assert str(tmp_path) in wrong[0]
        assert result.round is None


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.6, 0.99])
def test_truncated_files_are_detected_or_harmless(share: float, whole: bytes, tmp_path: Path) -> None:
    """A little less at the end may be of a page that nothing is on."""
    (tmp_path / RUN_FILE).write_bytes(whole)
    expected = everything(tmp_path)
    (tmp_path / RUN_FILE).write_bytes(whole[: int(share * len(whole))])
    (tmp_path / "curves.png").write_bytes(b"it ran")
    result = verify_run(tmp_path)
    if result.is_intact:
        assert share == 0.99
        assert everything(tmp_path) == expected
    else:
        assert any("is damaged" in text for text in result.texts(PartStatus.DAMAGED))


def test_only_an_empty_run_is_reported_as_never_begun(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).touch()
    with pytest.raises(StoreError, match="never began; remove the folder"):
        RunStore.open(tmp_path)
    (tmp_path / f"{RUN_FILE}-wal").write_bytes(b"what it wrote")
    with pytest.raises(StoreError, match=r"is damaged \(file is empty\); restore it from a copy"):
        RunStore.open(tmp_path)
