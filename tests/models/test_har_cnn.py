"""HAR-CNN: published sizes, and results of the published order of layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from feddbe.errors import InvalidInputError
from feddbe.models.registry import build_model, har_cnn
from feddbe.models.split_model import SplitModel
from feddbe.seeds import torch_seeded

SAMPLE = torch.zeros(1, 9, 1, 128)


def test_number_of_parameters_is_the_published_one() -> None:
    """conv 9*9*32+32, 32*9*64+64; head of the published code: 1664-1024-512-6."""
    model = build_model("har_cnn", SAMPLE, 6, None, 0)
    assert sum(p.numel() for p in model.parameters.values()) == 2_253_958
    assert (model.cut, model.feature_shape, model.head) == ("fc2", (512,), ("fc.weight", "fc.bias"))
    shapes = {cut: SplitModel(model.module, SAMPLE, cut).feature_shape for cut in model.cuts}
    assert (shapes["conv1"], shapes["conv2"]) == ((32, 1, 60), (64, 1, 26))
    published = build_model("har_cnn", SAMPLE, 6, "conv2", 0)
    assert torch.Size(published.feature_shape).numel() == 1664
    assert sum(published.parameters[name].numel() for name in published.head) == 2_232_838
    layers = {name for name, layer in model.module.named_modules() if name and not [*layer.children()]}
    assert layers - {"fc"} <= set(model.cuts), "every layer is a cut"


def test_layers_equal_the_published_order_of_layers() -> None:
    with torch_seeded(0):
        ours = har_cnn((9, 1, 128), 6)
        x = torch.randn(4, 9, 1, 128)
    w = dict(ours.named_parameters())
    z = x
    for conv in ("conv1.0", "conv2.0"):
        z = F.max_pool2d(F.relu(F.conv2d(z, w[f"{conv}.weight"], w[f"{conv}.bias"])), (1, 2), 2)
    z = z.flatten(1)
    for fc in ("fc1.1", "fc2.0"):
        z = F.relu(F.linear(z, w[f"{fc}.weight"], w[f"{fc}.bias"]))
    torch.testing.assert_close(ours(x), F.linear(z, w["fc.weight"], w["fc.bias"]))


@pytest.mark.parametrize("steps", range(28, 36))
def test_signals_from_28_steps(steps: int) -> None:
    x = torch.zeros(2, 3, 1, steps)
    assert build_model("har_cnn", x, 4, None, 0).forward({}, x).logits.shape == (2, 4)


@pytest.mark.parametrize("shape", [(9, 1, 27), (9, 2, 128), (9, 128), (1152,)])
def test_unsupported_shape_raises_error(shape: tuple[int, ...]) -> None:
    message = (
        r"^model 'har_cnn' takes signals \(signals, 1, steps\) of at least 28 steps, the data has inputs of "
    )
    with pytest.raises(InvalidInputError, match=message):
        build_model("har_cnn", torch.zeros(1, *shape), 6, None, 0)
