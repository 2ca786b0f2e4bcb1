"""fastText: published sizes, mean over all positions, and a padding vector without gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.errors import InvalidInputError
from feddbe.models.registry import MeanEmbedding, build_model, default_model, fasttext
from feddbe.runs.experiment import Experiment, resolve

X = torch.tensor([[1, 2, 2, 0], [3, 0, 0, 0], [0, 0, 0, 0], [2, 1, 4, 3]])


def make_texts(n: int = 40, words: int = 12) -> Dataset:
    indices = torch.arange(n)
    x = (indices[:, None] * torch.arange(1, 7) % words).int()
    return Dataset("texts", x, indices % 3, 3, num_words=words)


def resolve_texts(**options: object) -> Experiment:
    return resolve("fedavg+dbe", Config(partition="iid", clients=2, **options), dataset=make_texts())  # type: ignore[arg-type]


def test_number_of_parameters_is_the_published_one() -> None:
    """98,635 x 32 + 32 x 33 + 4 x 33 = 3,157,508."""
    model = build_model("fasttext", torch.zeros(1, 200, dtype=torch.long), 4, None, 0, words=98_635)
    assert sum(p.numel() for p in model.parameters.values()) == 3_157_508
    assert (model.cut, model.feature_shape, model.cuts) == ("fc1", (32,), ("embedding", "fc1"))
    assert model.head == ("fc.weight", "fc.bias")


def test_initialization_equals_nn_embedding() -> None:
    torch.manual_seed(3)
    ours = MeanEmbedding(7, 5).weight
    torch.manual_seed(3)
    assert torch.equal(ours, nn.Embedding(7, 5, padding_idx=0).weight)
    assert not ours[0].any()


def test_mean_is_over_all_positions() -> None:
    layer = MeanEmbedding(5, 3)
    w = layer.weight.detach()
    expected = torch.stack([(w[1] + 2 * w[2]) / 4, w[3] / 4, 0 * w[0], (w[1] + w[2] + w[3] + w[4]) / 4])
    torch.testing.assert_close(layer(X), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(X), expected)


@pytest.mark.parametrize("x", [X, X[:1], X[3:], X[2:3]])
def test_gradient_is_sparse_and_equals_the_dense_one(x: Tensor) -> None:
    """The third text has no padding, the fourth only padding; word 0 never has a gradient."""
    layer, output_gradient = MeanEmbedding(5, 3), torch.randn(len(x), 3)
    dense = layer.weight.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.embedding(x, dense, padding_idx=0).mean(1), dense, output_gradient)
    (gradient,) = torch.autograd.grad(layer(x), layer.weight, output_gradient)
    assert gradient.is_sparse
    words = gradient._indices()[0].tolist()
    assert sorted(words) == sorted({*x.flatten().tolist()}), "each word once"
    torch.testing.assert_close(gradient.to_dense(), expected)
    assert not gradient.to_dense()[0].any()


def test_published_representation_is_the_log_softmax() -> None:
    """The same weights; log-softmax stands between the hidden layer and the last one."""
    torch.manual_seed(0)
    linear = fasttext(5, 3)
    torch.manual_seed(0)
    published = fasttext(5, 3, "logsoftmax")
    assert linear.state_dict().keys() == published.state_dict().keys()
    hidden = linear[:2](X)
    torch.testing.assert_close(linear(X), linear[-1](hidden))
    torch.testing.assert_close(published(X), linear[-1](F.log_softmax(hidden, 1)))
    model = build_model("fasttext(rep=logsoftmax)", X, 3, None, 0, words=5)
    z = model.forward(model.parameters, X).z_g
    torch.testing.assert_close(z.exp().sum(1), torch.ones(len(X)))
    assert (model.cut, model.feature_shape) == ("logsoftmax", (32,))


def test_fasttext_is_used_for_texts_only() -> None:
    assert default_model((200,), words=9) == "fasttext"
    assert default_model((200,)) == "mlp"
    with pytest.raises(
        InvalidInputError, match=r"'mlp' takes .*, the data has texts as word indices .* use fasttext"
    ):
        build_model("mlp", X, 3, None, 0, words=5)
    with pytest.raises(
        InvalidInputError, match="'fasttext' takes texts as word indices, the data has inputs of shape"
    ):
        build_model("fasttext", X.float(), 3, None, 0)


def test_defaults_and_variants() -> None:
    default = resolve_texts()
    assert default.options.model == "fasttext(rep=linear)"
    assert default.config_hash == resolve_texts(model="fasttext").config_hash
    assert (
        default.config["method_options"]["mr"] | {"kappa": 0.1, "mu": 1.0}
        == default.config["method_options"]["mr"]
    )
    official = resolve_texts(variant="official", batch_size=5)
    assert official.options.model == "fasttext(rep=logsoftmax)"
    assert official.task.model.cut == "logsoftmax"
    chosen = resolve_texts(variant="official", batch_size=5, model="fasttext(rep=linear)")
    assert chosen.task.model.cut == "fc1"
    assert chosen.config_hash != official.config_hash


def test_option_of_another_model_raises_error() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown option of mlp 'rep'; allowed: \(none\)"):
        resolve("fedavg", Config(model="mlp(rep=linear)"))
