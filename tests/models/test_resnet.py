"""ResNet-18: names, shapes and arithmetic of the well-known implementation, and its cuts.

torchvision is not needed: what its state has is written down here from the architecture.
"""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.errors import InvalidInputError
from feddbe.models.registry import RESNET18_CUTS, ResNet18, build_model, resnet18
from feddbe.models.split_model import SplitModel
from feddbe.runs.experiment import resolve
from feddbe.seeds import torch_seeded
from feddbe.state import State
from tests.federation import run_outcome


def well_known(classes: int) -> dict[str, tuple[int, ...]]:
    """The 122 entries of the state, in order: a stem, 4 layers x 2 blocks, a classifier."""
    found: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, out: int, into: int, side: int) -> None:
        found[f"{name}.weight"] = (out, into, side, side)

    def norm(name: str, width: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            found[f"{name}.{part}"] = (width,)
        found[f"{name}.num_batches_tracked"] = ()

    convolution("conv1", 64, 3, 7)
    norm("bn1", 64)
    before = 64
    for layer, width in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            name = f"layer{layer}.{block}"
            convolution(f"{name}.conv1", width, before, 3)
            norm(f"{name}.bn1", width)
            convolution(f"{name}.conv2", width, width, 3)
            norm(f"{name}.bn2", width)
            if before != width:
                convolution(f"{name}.downsample.0", width, before, 1)
                norm(f"{name}.downsample.1", width)
            before = width
    return found | {"fc.weight": (classes, 512), "fc.bias": (classes,)}


def start(classes: int, side: int = 64) -> ResNet18:
    with torch_seeded(0):
        return resnet18((3, side, side), classes)


def moved(module: nn.Module) -> State:
    """The module's state with statistics and scales that are not those of the start."""
    with torch_seeded(1):
        return {
            name: t.clone() if t.dim() != 1 else torch.rand_like(t) + 0.5
            for name, t in module.state_dict().items()
        }


@pytest.mark.parametrize(("classes", "count"), [(1000, 11_689_512), (200, 11_279_112)])
def test_names_shapes_and_counts(classes: int, count: int) -> None:
    module = start(classes)
    state = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    assert len(state) == 122
    assert list(state.items()) == list(well_known(classes).items())
    assert sum(p.numel() for p in module.parameters()) == count


def test_a_state_with_the_well_known_names_loads() -> None:
    given = {name: torch.full(shape, 0.5) for name, shape in well_known(1000).items()}
    module = start(1000)
    module.load_state_dict(given, strict=True)
    assert torch.equal(module.state_dict()["layer3.0.downsample.1.running_var"], torch.full((256,), 0.5))


def by_hand(w: State, x: Tensor) -> Tensor:
    """The network in evaluation mode, from named tensors."""

    def norm(name: str, z: Tensor) -> Tensor:
        shape = (1, -1, 1, 1)
        mean, var = w[f"{name}.running_mean"].view(shape), w[f"{name}.running_var"].view(shape)
        return (z - mean) / (var + 1e-5).sqrt() * w[f"{name}.weight"].view(shape) + w[f"{name}.bias"].view(
            shape
        )

    z = F.conv2d(x, w["conv1.weight"], stride=2, padding=3)
    z = F.max_pool2d(norm("bn1", z).relu(), 3, 2, padding=1)
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            name, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            inside = norm(
                f"{name}.bn1", F.conv2d(z, w[f"{name}.conv1.weight"], stride=stride, padding=1)
            ).relu()
            inside = norm(f"{name}.bn2", F.conv2d(inside, w[f"{name}.conv2.weight"], padding=1))
            if stride == 2:
                z = norm(f"{name}.downsample.1", F.conv2d(z, w[f"{name}.downsample.0.weight"], stride=2))
            z = (inside + z).relu()
    return F.linear(z.mean((2, 3)), w["fc.weight"], w["fc.bias"])


def test_the_arithmetic() -> None:
    module = start(7).eval()
    state = moved(module)
    module.load_state_dict(state)
    with torch_seeded(2):
        x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(module(x), by_hand(state, x), rtol=1e-4, atol=1e-4)


def test_every_parameter_gets_a_gradient() -> None:
    module = start(7, 32)
    F.cross_entropy(module(torch.rand(4, 3, 32, 32)), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_the_start_and_that_it_can_be_made_again() -> None:
    """Normal with variance 2/fan-out, BatchNorm 1 and 0; also when all layers begin anew, children first."""
    module = start(7)

    def check() -> None:
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Conv2d):
                wanted = sqrt(2 / (layer.out_channels * layer.kernel_size[0] ** 2))
                assert layer.weight.std().item() == pytest.approx(wanted, rel=0.05), name
            elif isinstance(layer, nn.BatchNorm2d):
                assert (layer.weight == 1).all()
                assert not layer.bias.any()
                assert layer.running_mean is not None
                assert not layer.running_mean.any()
                assert layer.running_var is not None
                assert torch.equal(layer.running_var, torch.ones_like(layer.running_var))
        assert module.fc.weight.abs().max().item() == pytest.approx(1 / sqrt(512), rel=0.05)

    check()
    first = module.conv1.weight.detach().clone()
    module.load_state_dict(moved(module))
    with torch_seeded(5):
        for layer in reversed([*module.modules()]):  # children come after their parents
            getattr(layer, "reset_parameters", lambda: None)()
    check()
    assert not torch.equal(module.conv1.weight, first)
    module.load_state_dict(moved(module))
    module.reset_parameters()
    check()


def test_the_six_cuts() -> None:
    sample = torch.zeros(1, 3, 64, 64)
    sizes = {}
    for alias in RESNET18_CUTS:
        model = build_model("resnet18", sample, 200, alias, 0)
        sizes[alias] = torch.Size(model.feature_shape).numel()
        assert model.cut == RESNET18_CUTS[alias], "one place has one name in a run"
    assert sizes == {"conv": 16384, "b1": 16384, "b2": 8192, "b3": 4096, "b4": 2048, "pool": 512}
    assert build_model("resnet18", sample, 200, None, 0).cut == RESNET18_CUTS["pool"]


def test_every_place_that_one_tensor_crosses_is_a_cut() -> None:
    """Not inside a block, where the way around crosses too; cuts give the same logits."""
    sample = torch.rand(2, 3, 32, 32)
    model = build_model("resnet18", sample, 5, None, 0)
    blocks = {f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1)}
    assert blocks | {"conv1", "bn1", "relu", "maxpool", "avgpool"} | set(RESNET18_CUTS.values()) <= set(
        model.cuts
    )
    assert not any(".conv" in cut or ".bn" in cut or "downsample" in cut for cut in model.cuts)
    whole = model.forward(model.parameters, sample).logits
    for cut in model.cuts[::4]:
        again = SplitModel(model.module, sample, cut)
        assert set(again.body) | set(again.head) == set(model.parameters)
        torch.testing.assert_close(again.forward(model.parameters, sample).logits, whole)


def test_an_unknown_cut_is_told_with_both_kinds_of_names() -> None:
    with pytest.raises(InvalidInputError, match=r"^unknown cut 'b5'; allowed: .* b1, .* layer1, .* pool, "):
        build_model("resnet18", torch.zeros(1, 3, 32, 32), 5, "b5", 0)


def test_a_round_with_the_published_defaults(tmp_path: Path) -> None:
    """kappa 1 and mu 0.1 are published, the learning rate is not."""
    rng = np.random.RandomState(0)
    x = torch.from_numpy(rng.randint(256, size=(24, 3, 16, 16)).astype(np.uint8))
    data = Dataset("images", x, torch.arange(24) % 2, 2, 2 / 255, -1.0, np.arange(24) // 12)
    chosen = Config(partition="natural", model="resnet18", rounds=1, batch_size=4)
    experiment = resolve("fedavg+dbe", chosen, dataset=data)
    found = experiment.config["method_options"]["mr"]
    assert (found["kappa"], found["mu"], experiment.config["lr"]) == (1, 0.1, 0.1)
    ran = run_outcome(experiment, tmp_path)
    assert ran.server["mean"].shape == (512,)
    assert all(state["prbm"].any() for state in ran.clients.values())
    counters = {
        int(t) for c in ran.clients.values() for name, t in c.items() if name.endswith("num_batches_tracked")
    }
    assert counters == {2 * 2}, "two batches before round 1 and two in it"
