"""Data sets and their division among clients."""

from feddbe.data.dataset import Dataset
from feddbe.data.registry import (
    BUILTIN_DATASETS,
    BuiltinDataset,
    dataset_from_object,
    find_builtin_dataset,
    is_remote,
    load_dataset,
    load_remote,
)

__all__ = [
    "BUILTIN_DATASETS",
    "BuiltinDataset",
    "Dataset",
    "dataset_from_object",
    "find_builtin_dataset",
    "is_remote",
    "load_dataset",
    "load_remote",
]
