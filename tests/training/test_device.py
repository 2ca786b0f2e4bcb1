"""Devices: every method on torch's `meta` device, which has no values and cannot be mixed with the CPU.

No operation of a client may be left on the CPU. Values on a GPU were not tested: none was available.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feddbe.errors import InvalidInputError
from feddbe.simulation import engines
from feddbe.simulation.engines.registry import SerialEngine
from feddbe.training.task import find_device
from tests.small_runs import COMBINATIONS, are_identical, experiment, run_outcome, run_recorded

META = torch.device("meta")


class MetaDeviceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which reading a value of a `meta` tensor returns 1, and a copy to the CPU zeros.

    It counts operations on `meta` and reads of values. An operation on tensors of both devices is an error,
    except for scalars, which GPUs accept.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meta_operations = 0
        self.value_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        meta = [t for t in tensors if t.device == META]
        is_copy = func in (aten._to_copy.default, aten.copy_.default) or func.overloadpacket is aten.to
        if is_copy and meta and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")
        if func is aten._local_scalar_dense.default and meta:
            self.value_reads += 1
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten.bincount.default and meta:
            return torch.empty(kwargs.get("minlength", args[-1]), dtype=torch.int64, device=META)
        cpu = [t for t in tensors if t.device.type == "cpu" and t.dim()]
        assert is_copy or not (meta and cpu), f"{func} of tensors on meta and on the CPU"
        self.meta_operations += bool(meta)
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", [*COMBINATIONS, "fedavg+dbe(s=0.1,q=0.1)", "fedgen(lite=true)"])
def test_every_method_runs_on_the_meta_device(name: str, tmp_path: Path) -> None:
    """Setup, two rounds with evaluation, fine-tuning; all states return to the CPU."""
    e = experiment(name, adapt_epochs=1)
    with MetaDeviceMode() as mode:
        ran = run_recorded(e, tmp_path, SerialEngine(e.task.to(META), e.method))
    assert mode.meta_operations > 100 or e.method.base_name == "majority"
    assert all(t.device.type == "cpu" for t in ran.server.values())
    assert len(ran.rounds) == 3


@pytest.mark.parametrize("adaptation", ["full", "prbm", "newton"])
def test_new_clients_adapt_on_the_meta_device(adaptation: str, tmp_path: Path) -> None:
    e = experiment("fedavg+dbe", new_clients=1, adapt_epochs=2, adaptation=adaptation)
    with MetaDeviceMode():
        run_recorded(e, tmp_path, SerialEngine(e.task.to(META), e.method))


def test_mixing_devices_is_an_error() -> None:
    with MetaDeviceMode(), pytest.raises((AssertionError, RuntimeError)):
        torch.ones(3, device=META) + torch.ones(3)


def test_number_of_value_reads_is_independent_of_the_batch_size(tmp_path: Path) -> None:
    """Reading a value synchronizes with the GPU: once per epoch and parameter, not once per batch."""
    value_reads = []
    for batch in (10, 2):
        e = experiment("fedavg+dbe", batch_size=batch)
        with MetaDeviceMode() as mode:
            run_recorded(e, tmp_path / str(batch), SerialEngine(e.task.to(META), e.method))
        value_reads.append(mode.value_reads)
    assert value_reads[0] == value_reads[1]


def test_task_to_its_device_returns_the_task() -> None:
    task = experiment("fedavg").task
    assert task.to(torch.device("cpu")) is task
    moved = task.to(META)
    assert moved.device == META
    assert {p.device for p in moved.model.parameters.values()} == {META}
    assert task.device.type == "cpu"


def test_reinitialized_parameters_are_on_the_device_of_the_model() -> None:
    model = experiment("apple").task.model
    assert are_identical(model.reinitialized(3), model.reinitialized(3))
    with MetaDeviceMode():
        assert {p.device for p in model.to(META).reinitialized(3).values()} == {META}


def test_unavailable_device_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"device = 'cuda:7'; torch can use here: .*cpu"):
        find_device("cuda:7")
    with pytest.raises(InvalidInputError, match="device = 'gpu'"):
        engines.create_engine("auto", experiment("fedavg", device="gpu").task, experiment("fedavg").method)


def test_auto_is_the_cpu_without_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("has a GPU")
    assert find_device("auto") == torch.device("cpu")
    plain, auto = experiment("fedavg+dbe"), experiment("fedavg+dbe", device="auto")
    assert plain.config_hash == auto.config_hash
    assert are_identical(run_outcome(plain, tmp_path / "a").server, run_outcome(auto, tmp_path / "b").server)
