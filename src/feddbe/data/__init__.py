"""Data sets by name, and how they are divided among clients."""

from feddbe.data.dataset import Dataset
from feddbe.data.registry import BUILTIN_DATASETS, BuiltinDataset, find_dataset, is_in_memory, load_dataset

__all__ = ["BUILTIN_DATASETS", "BuiltinDataset", "Dataset", "find_dataset", "is_in_memory", "load_dataset"]
