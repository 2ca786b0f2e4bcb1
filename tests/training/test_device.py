"""Nothing of a client's work is left on the CPU: every method on torch's `meta` device, which has no numbers
and refuses to mix with others. (That the numbers are right on a GPU was not tried: there was none.)"""

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
from feddbe.simulation.engines.registry import Serial
from feddbe.training.task import find_device
from tests.federation import COMBINATIONS, are_identical, experiment, run_outcome, run_recorded

META = torch.device("meta")


class Numberless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a look at a number of a `meta` tensor give 1, and a copy to the CPU zeros; counts the operations
    of each kind. An operation with tensors from both is an error, but for single numbers, which GPUs take."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.there, self.looks = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        meta = [t for t in tensors if t.device == META]
        moving = func in (aten._to_copy.default, aten.copy_.default) or func.overloadpacket is aten.to
        if moving and meta and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")
        if func is aten._local_scalar_dense.default and meta:
            self.looks += 1
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten.bincount.default and meta:
            return torch.empty(kwargs.get("minlength", args[-1]), dtype=torch.int64, device=META)
        left = [t for t in tensors if t.device.type == "cpu" and t.dim()]
        assert moving or not (meta and left), f"{func} of tensors on meta and on the CPU"
        self.there += bool(meta)
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", [*COMBINATIONS, "fedavg+dbe(s=0.1,q=0.1)", "fedgen(lite=true)"])
def test_every_method_works_there(name: str, tmp_path: Path) -> None:
    """Preparation, two rounds with evaluation before and after, fine-tuning: what came back is the zeros that
    the CPU saw."""
    e = experiment(name, adapt_epochs=1)
    with Numberless() as seen:
        ran = run_recorded(e, tmp_path, Serial(e.task.to(META), e.method))
    assert seen.there > 100 or e.method.base_name == "majority"
    assert all(t.device.type == "cpu" for t in ran.server.values())
    assert len(ran.rounds) == 3


@pytest.mark.parametrize("adaptation", ["full", "prbm", "newton"])
def test_newcomers_join_there(adaptation: str, tmp_path: Path) -> None:
    e = experiment("fedavg+dbe", new_clients=1, adapt_epochs=2, adaptation=adaptation)
    with Numberless():
        run_recorded(e, tmp_path, Serial(e.task.to(META), e.method))


def test_a_tensor_that_is_left_behind_is_noticed() -> None:
    with Numberless(), pytest.raises((AssertionError, RuntimeError)):
        torch.ones(3, device=META) + torch.ones(3)


def test_no_look_at_numbers_in_a_step(tmp_path: Path) -> None:
    """A look waits for all that the GPU has begun: once per epoch and parameter, not once per batch."""
    looks = []
    for batch in (10, 2):
        e = experiment("fedavg+dbe", batch_size=batch)
        with Numberless() as seen:
            run_recorded(e, tmp_path / str(batch), Serial(e.task.to(META), e.method))
        looks.append(seen.looks)
    assert looks[0] == looks[1]


def test_a_task_moved_to_where_it_lies_is_itself() -> None:
    task = experiment("fedavg").task
    assert task.to(torch.device("cpu")) is task
    there = task.to(META)
    assert there.device == META
    assert {p.device for p in there.model.parameters.values()} == {META}
    assert task.device.type == "cpu"


def test_other_cores_of_apple_are_the_same_on_every_device(tmp_path: Path) -> None:
    model = experiment("apple").task.model
    assert are_identical(model.reinitialized(3), model.reinitialized(3))
    with Numberless():
        assert {p.device for p in model.to(META).reinitialized(3).values()} == {META}


def test_what_there_is_not_is_one_line() -> None:
    with pytest.raises(InvalidInputError, match=r"device = 'cuda:7'; torch can use here: .*cpu"):
        find_device("cuda:7")
    with pytest.raises(InvalidInputError, match="device = 'gpu'"):
        engines.create_engine("auto", experiment("fedavg", device="gpu").task, experiment("fedavg").method)


def test_auto_is_what_there_is(tmp_path: Path) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("there is a GPU")
    assert find_device("auto") == torch.device("cpu")
    plain, auto = experiment("fedavg+dbe"), experiment("fedavg+dbe", device="auto")
    assert plain.config_hash == auto.config_hash
    assert are_identical(run_outcome(plain, tmp_path / "a").server, run_outcome(auto, tmp_path / "b").server)
