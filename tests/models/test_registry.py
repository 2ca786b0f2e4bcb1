"""Models by name: published sizes, and models built from a name, a module or a function."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe.errors import InvalidInputError
from feddbe.models.registry import MODELS, build_model, cnn, cnn_small, default_model, mlp
from feddbe.models.split_model import SplitModel
from feddbe.seeds import torch_seeded
from feddbe.state import sha256


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seed torch, so that weights are equal in every run."""
    with torch_seeded(0):
        yield


class PublishedSizes(NamedTuple):
    """Published sizes of the CNN for one input shape."""

    shape: tuple[int, int, int]
    classes: int
    conv1: tuple[int, int, int]
    conv2: tuple[int, int, int]
    sizes: tuple[int, int, int]
    """Sizes of the representation at conv1, conv2 and fc1."""
    counts: tuple[int, int, int, int]
    total: int


TABLE = [
    PublishedSizes(
        (1, 28, 28), 10, (32, 12, 12), (64, 4, 4), (4608, 1024, 512), (832, 51264, 524800, 5130), 582026
    ),
    PublishedSizes(
        (3, 32, 32), 100, (32, 14, 14), (64, 5, 5), (6272, 1600, 512), (2432, 51264, 819712, 51300), 924708
    ),
    PublishedSizes(
        (3, 64, 64),
        200,
        (32, 30, 30),
        (64, 13, 13),
        (28800, 10816, 512),
        (2432, 51264, 5538304, 102600),
        5694600,
    ),
]


def count_parameters(module: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each block."""
    return {name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "x".join(map(str, row.shape)))
def test_cnn_sizes_are_published_sizes(row: PublishedSizes) -> None:
    sample = torch.zeros(1, *row.shape)
    model = build_model("cnn", sample, row.classes, None, 0)
    assert count_parameters(model.module) == dict(
        zip(("conv1", "conv2", "fc1", "fc"), row.counts, strict=True)
    )
    assert sum(p.numel() for p in model.parameters.values()) == sum(row.counts) == row.total
    shapes = [SplitModel(model.module, sample, cut).feature_shape for cut in ("conv1", "conv2", "fc1")]
    assert shapes == [row.conv1, row.conv2, (512,)]
    assert tuple(torch.Size(shape).numel() for shape in shapes) == row.sizes
    assert (model.cut, model.classes, model.head) == ("fc1", row.classes, ("fc.weight", "fc.bias"))


def test_small_cnn_sizes() -> None:
    """16 (9 + 1) = 160; 32 (16 9 + 1) = 4640; 64 (32 2 2 + 1) = 8256; 10 (64 + 1) = 650."""
    sample = torch.zeros(1, 1, 8, 8)
    model = build_model("cnn_small", sample, 10, None, 0)
    assert count_parameters(model.module) == {"conv1": 160, "conv2": 4640, "fc1": 8256, "fc": 650}
    cuts = ("conv1", "conv2", "fc1")
    shapes = [SplitModel(model.module, sample, cut).feature_shape for cut in cuts]
    assert shapes == [(16, 4, 4), (32, 2, 2), (64,)]
    assert model.cut == "fc1"


@pytest.mark.parametrize("shape", [(7,), (2, 3), (3, 2, 2), (2, 2, 2, 2)])
def test_mlp_supports_any_shape(shape: tuple[int, ...]) -> None:
    model = build_model("mlp", torch.zeros(1, *shape), 3, None, 0)
    size = torch.Size(shape).numel()
    assert count_parameters(model.module) == {"fc1": 64 * (size + 1), "fc": 3 * 65}
    assert (model.cut, model.feature_shape) == ("fc1", (64,))


@pytest.mark.parametrize("height", range(4, 12))
def test_small_cnn_supports_images_from_4x4(height: int) -> None:
    sample = torch.zeros(2, 2, height, height + 3)
    assert build_model("cnn_small", sample, 3, None, 0).forward({}, sample).logits.shape == (2, 3)


@pytest.mark.parametrize("height", [16, 17, 18, 19, 20, 21])
def test_cnn_supports_images_from_16x16(height: int) -> None:
    sample = torch.zeros(2, 1, height, height + 3)
    assert build_model("cnn", sample, 3, None, 0).forward({}, sample).logits.shape == (2, 3)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("values", [3, 5, 1000])
def test_pooling_before_relu_equals_relu_before_pooling(values: int, layout: torch.memory_format) -> None:
    """With few different values, windows have ties: of the maximum, and at zero."""
    numbers = torch.randint(values, (8, 6, 10, 10)) - values // 2
    x = numbers.float().contiguous(memory_format=layout)
    above = torch.randn(8, 6, 5, 5)

    def output_and_gradient(relu_first: bool) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        out = F.max_pool2d(leaf.relu(), 2) if relu_first else F.max_pool2d(leaf, 2).relu()
        return out.detach(), torch.autograd.grad(out, leaf, above)[0]

    for ours, published in zip(output_and_gradient(False), output_and_gradient(True), strict=True):
        assert torch.equal(ours, published)
        assert ours.any()


@pytest.mark.parametrize(("build", "side", "padding"), [(cnn, 16, 0), (cnn_small, 8, 1)])
def test_layers_equal_the_published_order_of_layers(
    build: Callable[[tuple[int, ...], int], nn.Module], side: int, padding: int
) -> None:
    """The same weights in conv, ReLU, pool: equal logits and gradients, though rounded weights give ties."""
    ours = build((1, side, side), 10)
    for p in ours.parameters():
        p.data = (p.data * 64).round() / 64
    x, y = torch.randint(0, 3, (6, 1, side, side)).float(), torch.arange(6)
    names = [name for name, _ in ours.named_parameters()]
    w = {name: p.detach().clone().requires_grad_() for name, p in ours.named_parameters()}
    z = x
    for conv in ("conv1.0", "conv2.0"):
        z = F.max_pool2d(F.relu(F.conv2d(z, w[f"{conv}.weight"], w[f"{conv}.bias"], padding=padding)), 2)
    z = F.relu(F.linear(z.flatten(1), w["fc1.1.weight"], w["fc1.1.bias"]))
    published = F.linear(z, w["fc.weight"], w["fc.bias"])
    assert torch.equal(ours(x), published)
    gradients = torch.autograd.grad(F.cross_entropy(ours(x), y), list(ours.parameters()))
    expected = torch.autograd.grad(F.cross_entropy(published, y), [w[name] for name in names])
    for name, a, b in zip(names, gradients, expected, strict=True):
        assert torch.equal(a, b), name
        assert a.any(), name


# --- build


def test_default_model_fits_the_shape() -> None:
    shapes: dict[tuple[int, ...], str] = {
        (1, 28, 28): "cnn", (3, 16, 99): "cnn", (3, 15, 99): "cnn_small", (1, 4, 4): "cnn_small",
        (1, 3, 9): "mlp", (561,): "mlp", (9, 1, 128): "har_cnn", (3, 1, 28): "har_cnn", (3, 1, 27): "mlp",
        (2, 3): "mlp", (2, 20, 20, 20): "mlp",
    }  # fmt: skip
    assert {shape: default_model(shape) for shape in shapes} == shapes
    for shape, name in shapes.items():
        assert build_model(name, torch.zeros(1, *shape), 4, None, 0).classes == 4


@pytest.mark.parametrize("name", MODELS)
def test_initial_parameters_depend_on_the_seed_only(name: str) -> None:
    samples = {"har_cnn": torch.zeros(1, 1, 1, 28), "fasttext": torch.zeros(1, 6, dtype=torch.long)}
    sample = samples.get(name, torch.zeros(1, 1, 16, 16))
    other = {"resnet18": "b1", "fasttext": "embedding"}.get(name, "fc1.0")
    words = 9 if name == "fasttext" else 0
    state = torch.get_rng_state()
    first = sha256(build_model(name, sample, 3, None, 5, words=words).parameters)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert sha256(build_model(name, sample, 3, None, 5, words=words).parameters) == first
    assert sha256(build_model(name, sample, 3, other, 5, words=words).parameters) == first
    assert sha256(build_model(name, sample, 3, None, 6, words=words).parameters) != first


def test_builder_is_called_under_the_seed() -> None:
    sample = torch.zeros(1, 5)
    calls: list[tuple[tuple[int, ...], int]] = []

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        calls.append((shape, classes))
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, classes))

    hashes = [sha256(build_model(build, sample, 3, None, seed).parameters) for seed in (1, 1, 2)]
    assert calls == [((5,), 3)] * 3
    assert hashes[0] == hashes[1] != hashes[2]


def test_weights_of_a_module_or_pair_are_the_initial_parameters() -> None:
    features, classifier = nn.Linear(5, 4), nn.Linear(4, 3)
    module = nn.Sequential(OrderedDict(features=features, classifier=classifier))
    sample = torch.zeros(1, 5)
    for source in (module, (features, classifier)):
        model = build_model(source, sample, 3, None, 9)
        assert model.cut == "features"
        assert all(torch.equal(model.parameters[name], p) for name, p in module.named_parameters())


@pytest.mark.parametrize(
    ("shape", "uses_onednn"),
    [((1, 16, 16), True), ((3, 15, 64), False), ((9, 1, 128), True), ((64,), False), ((20, 20), False)],
)
def test_onednn_is_used_for_large_images_and_long_signals(shape: tuple[int, ...], uses_onednn: bool) -> None:
    assert build_model("mlp", torch.zeros(1, *shape), 3, None, 0).onednn == uses_onednn


@pytest.mark.parametrize(
    ("name", "shape", "min_size", "suggestion"),
    [
        ("cnn", (1, 8, 8), 16, "cnn_small"),
        ("cnn", (3, 16, 15), 16, "cnn_small"),
        ("cnn_small", (64,), 4, "mlp"),
    ],
)
def test_unsupported_shape_raises_error(
    name: str, shape: tuple[int, ...], min_size: int, suggestion: str
) -> None:
    message = (
        f"model '{name}' takes images (channels, height, width) of at least {min_size}x{min_size}, "
        f"the data has inputs of shape {shape}; use {suggestion}"
    )
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$"):
        build_model(name, torch.zeros(1, *shape), 10, None, 0)


def test_unknown_model_raises_error() -> None:
    allowed = ", ".join(sorted(["FILE.py:FUNCTION", *MODELS]))
    message = f"unknown model 'cnn_smal'; did you mean 'cnn_small'? allowed: {allowed}"
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$"):
        build_model("cnn_smal", torch.zeros(1, 1, 8, 8), 10, None, 0)


def test_wrong_number_of_classes_raises_error() -> None:
    with pytest.raises(InvalidInputError, match=r"^the model returns 3 logits, the data has 4 classes$"):
        build_model(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), torch.zeros(1, 5), 4, None, 0)


def test_builders_return_plain_modules() -> None:
    assert isinstance(cnn((1, 28, 28), 10), nn.Sequential)
    assert list(mlp((4,), 2).state_dict()) == ["fc1.1.weight", "fc1.1.bias", "fc.weight", "fc.bias"]
    names = [name for name in cnn((1, 28, 28), 10).state_dict() if name.endswith("weight")]
    assert names == ["conv1.0.weight", "conv2.0.weight", "fc1.1.weight", "fc.weight"]
