"""ResNet-18: names, shapes and arithmetic of the well-known implementation, and its cuts.

torchvision is not needed: the entries of its state are listed here from the architecture.
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
from tests.small_runs import run_outcome


def torchvision_shapes(classes: int) -> dict[str, tuple[int, ...]]:
    """Return the 122 entries of the state, in order: a stem, 4 layers x 2 blocks, a classifier."""
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, out: int, into: int, side: int) -> None:
        shapes[f"{name}.weight"] = (out, into, side, side)

    def norm(name: str, width: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.{part}"] = (width,)
        shapes[f"{name}.num_batches_tracked"] = ()

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
    return shapes | {"fc.weight": (classes, 512), "fc.bias": (classes,)}


def build_resnet18(classes: int, side: int = 64) -> ResNet18:
    with torch_seeded(0):
        return resnet18((3, side, side), classes)


def changed_state(module: nn.Module) -> State:
    """Return the module's state with other statistics and scales than the initial ones."""
    with torch_seeded(1):
        return {
            name: t.clone() if t.dim() != 1 else torch.rand_like(t) + 0.5
            for name, t in module.state_dict().items()
        }


@pytest.mark.parametrize(("classes", "count"), [(1000, 11_689_512), (200, 11_279_112)])
def test_names_shapes_and_counts(classes: int, count: int) -> None:
    module = build_resnet18(classes)
    state = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    assert len(state) == 122
    assert list(state.items()) == list(torchvision_shapes(classes).items())
    assert sum(p.numel() for p in module.parameters()) == count


def test_state_with_torchvision_names_loads() -> None:
    state = {name: torch.full(shape, 0.5) for name, shape in torchvision_shapes(1000).items()}
    module = build_resnet18(1000)
    module.load_state_dict(state, strict=True)
    assert torch.equal(module.state_dict()["layer3.0.downsample.1.running_var"], torch.full((256,), 0.5))


def forward_by_hand(w: State, x: Tensor) -> Tensor:
    """Return the logits in evaluation mode from named tensors."""

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


def test_forward_matches_functions() -> None:
    module = build_resnet18(7).eval()
    state = changed_state(module)
    module.load_state_dict(state)
    with torch_seeded(2):
        x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(module(x), forward_by_hand(state, x), rtol=1e-4, atol=1e-4)


def test_every_parameter_has_a_gradient() -> None:
    module = build_resnet18(7, 32)
    F.cross_entropy(module(torch.rand(4, 3, 32, 32)), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_initialization_and_reset_parameters() -> None:
    """Normal with variance 2/fan-out, BatchNorm 1 and 0; also after a reset of all layers, children first."""
    module = build_resnet18(7)

    def check() -> None:
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Conv2d):
                std = sqrt(2 / (layer.out_channels * layer.kernel_size[0] ** 2))
                assert layer.weight.std().item() == pytest.approx(std, rel=0.05), name
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
    module.load_state_dict(changed_state(module))
    with torch_seeded(5):
        for layer in reversed([*module.modules()]):  # children come after their parents
            getattr(layer, "reset_parameters", lambda: None)()
    check()
    assert not torch.equal(module.conv1.weight, first)
    module.load_state_dict(changed_state(module))
    module.reset_parameters()
    check()


def test_six_cuts_of_the_paper() -> None:
    sample = torch.zeros(1, 3, 64, 64)
    sizes = {}
    for alias in RESNET18_CUTS:
        model = build_model("resnet18", sample, 200, alias, 0)
        sizes[alias] = torch.Size(model.feature_shape).numel()
        assert model.cut == RESNET18_CUTS[alias], "a cut has one name in a run"
    assert sizes == {"conv": 16384, "b1": 16384, "b2": 8192, "b3": 4096, "b4": 2048, "pool": 512}
    assert build_model("resnet18", sample, 200, None, 0).cut == RESNET18_CUTS["pool"]


def test_cuts_are_outside_of_blocks() -> None:
    """Inside a block, the shortcut crosses too; all cuts give equal logits."""
    sample = torch.rand(2, 3, 32, 32)
    model = build_model("resnet18", sample, 5, None, 0)
    blocks = {f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1)}
    assert blocks | {"conv1", "bn1", "relu", "maxpool", "avgpool"} | set(RESNET18_CUTS.values()) <= set(
        model.cuts
    )
    assert not any(".conv" in cut or ".bn" in cut or "downsample" in cut for cut in model.cuts)
    logits = model.forward(model.parameters, sample).logits
    for cut in model.cuts[::4]:
        split = SplitModel(model.module, sample, cut)
        assert set(split.body) | set(split.head) == set(model.parameters)
        torch.testing.assert_close(split.forward(model.parameters, sample).logits, logits)


def test_unknown_cut_error_lists_names_and_aliases() -> None:
    with pytest.raises(InvalidInputError, match=r"^unknown cut 'b5'; allowed: .* b1, .* layer1, .* pool, "):
        build_model("resnet18", torch.zeros(1, 3, 32, 32), 5, "b5", 0)


def test_round_with_published_defaults(tmp_path: Path) -> None:
    """kappa 1 and mu 0.1 are published, the learning rate is not."""
    rng = np.random.RandomState(0)
    x = torch.from_numpy(rng.randint(256, size=(24, 3, 16, 16)).astype(np.uint8))
    data = Dataset("images", x, torch.arange(24) % 2, 2, 2 / 255, -1.0, np.arange(24) // 12)
    config = Config(partition="natural", model="resnet18", rounds=1, batch_size=4)
    experiment = resolve("fedavg+dbe", config, dataset=data)
    mr_options = experiment.config["method_options"]["mr"]
    assert (mr_options["kappa"], mr_options["mu"], experiment.config["lr"]) == (1, 0.1, 0.1)
    outcome = run_outcome(experiment, tmp_path)
    assert outcome.server["mean"].shape == (512,)
    assert all(state["prbm"].any() for state in outcome.clients.values())
    counters = {
        int(t)
        for c in outcome.clients.values()
        for name, t in c.items()
        if name.endswith("num_batches_tracked")
    }
    assert counters == {2 * 2}, "two batches before round 1 and two in it"
