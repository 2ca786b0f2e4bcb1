"""SplitModel: cuts of modules, and computation with bound tensors."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from feddbe.errors import InvalidInputError
from feddbe.models.registry import build_model, cnn_small
from feddbe.models.split_model import SplitModel
from feddbe.seeds import torch_seeded
from feddbe.state import State

X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGES = torch.linspace(-1, 1, 3 * 64).reshape(3, 1, 8, 8)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seed torch, so that weights are equal in every run."""
    with torch_seeded(0):
        yield


def build_nested() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            enter=nn.Linear(4, 6),
            block=nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(6, 5), nn.ReLU())),
            leave=nn.Linear(5, 3),
        )
    )


class Residual(nn.Module):
    """y = enter(x); logits = leave(relu(y + inner(y)))."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.after = nn.ReLU()
        self.leave = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        out: Tensor = self.leave(self.after(y + self.inner(y)))
        return out


class WithRootParameter(nn.Module):
    """Module with a root parameter, used on both sides of the cut: s last(relu(s first(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        out: Tensor = self.last(torch.relu(self.first(x) * scale)) * scale
        return out


class Tied(nn.Module):
    """Module with one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decode(self.encode(x))
        return out


class ReusedLayer(nn.Module):
    """Module that uses one ReLU twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.relu(self.second(self.relu(self.first(x)))))
        return out


class CustomSequential(nn.Sequential):
    """Sequential with a custom forward."""

    def forward(self, input: Tensor) -> Tensor:
        for layer in self:
            input = layer(input)
        return 2 * input


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(100, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.dropout(x, 0.5, training=self.training))
        return out


class Untraceable(nn.Module):
    """Module that torch.fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(-x if x.sum() > 0 else x)
        return out


class FailingSilently(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError


def build_pair() -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3)


def build_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def change_parameters(model: SplitModel) -> State:
    """Return parameters that differ from the module's."""
    return {name: p * 0.5 + 0.25 for name, p in model.parameters.items()}


MODULES: list[Callable[[], nn.Module]] = [
    build_nested,
    Residual,
    WithRootParameter,
    Tied,
    ReusedLayer,
    build_batch_norm,
]


# --- cuts


def test_every_layer_and_block_of_nested_sequentials_is_a_cut() -> None:
    """Leaves in order: enter, block.0, block.1.0, block.1.1, leave; nothing comes after leave."""
    model = SplitModel(build_nested(), X)
    assert set(model.cuts) == {"enter", "block", "block.0", "block.1", "block.1.0", "block.1.1"}
    shapes = {cut: SplitModel(build_nested(), X, cut).feature_shape for cut in model.cuts}
    assert shapes == {
        "enter": (6,), "block.0": (6,), "block.1.0": (5,), "block.1.1": (5,), "block.1": (5,), "block": (5,)
    }  # fmt: skip
    module = build_nested()
    features = {
        cut: SplitModel(module, X, cut).forward(dict(module.named_parameters()), X).z_g for cut in shapes
    }
    assert torch.equal(features["block.1.1"], features["block"])
    assert torch.equal(features["block.1.1"], features["block.1.0"].relu())
    assert torch.equal(features["block.0"], features["enter"].tanh())


def test_layers_inside_a_residual_connection_are_not_cuts() -> None:
    """Inside `inner`, two tensors cross: its output and the shortcut."""
    model = SplitModel(Residual(), X)
    assert model.cuts == ("enter", "add", "after")
    assert model.cut == "after"
    with pytest.raises(
        InvalidInputError, match=re.escape("unknown cut 'inner.0'; allowed: add, after, enter")
    ):
        SplitModel(Residual(), X, "inner.0")


def test_pair_is_cut_between_its_halves() -> None:
    features, classifier = build_pair()
    model = SplitModel((features, classifier), X)
    assert model.cut == "features"
    assert model.body == ("features.0.weight", "features.0.bias")
    assert model.head == ("classifier.weight", "classifier.bias")
    out = model.forward(model.parameters, X)
    assert torch.equal(out.z_g, features(X))
    assert torch.equal(out.logits, classifier(features(X)))
    assert SplitModel(build_pair(), X, "features.0").feature_shape == (5,)
    assert SplitModel((nn.Sequential(*build_pair()), nn.Linear(3, 2)), X).feature_shape == (3,)


def test_pair_replaces_tracing() -> None:
    with pytest.raises(InvalidInputError) as caught:
        SplitModel(Untraceable(), X)
    assert str(caught.value).startswith("torch.fx cannot trace Untraceable (")
    assert str(caught.value).endswith("); pass a pair (features, classifier) instead")
    assert "\n" not in str(caught.value)
    model = SplitModel((Untraceable(), nn.Linear(3, 2)), X)
    assert (model.cut, model.feature_shape, model.classes) == ("features", (3,), 2)


def test_tracing_error_without_message_is_one_line() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^torch\.fx cannot trace FailingSilently \(AssertionError\); pass a pair"
    ):
        SplitModel(FailingSilently(), X)


def test_unknown_cut_error_lists_nearest_and_allowed_names() -> None:
    with pytest.raises(InvalidInputError) as caught:
        SplitModel(build_nested(), X, "blok")
    names = "block, block.0, block.1, block.1.0, block.1.1, enter"
    assert str(caught.value) == f"unknown cut 'blok'; did you mean 'block'? allowed: {names}"


@pytest.mark.parametrize(
    ("module", "cut"),
    [
        (build_nested(), "block"),
        (build_nested().append(nn.Softmax(1)), "block"),
        (nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.Sequential(nn.Linear(4, 3)), c=nn.Tanh())), "a"),
        (nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 3, 1), nn.ReLU(), nn.Flatten()), "2"),
        (WithRootParameter(), "relu"),
        (Tied(), "encode"),
    ],
    ids=["block", "layer-after", "block-of-one", "no-linear", "function", "tied"],
)
def test_default_cut_is_before_the_last_linear_layer(module: nn.Module, cut: str) -> None:
    """The shortest name of the cut is used; without a linear layer, it is the last cut."""
    assert SplitModel(module, X).cut == cut


def test_default_cut_with_reused_layer() -> None:
    """A layer's cut is after its last use: here just before `last`, not before `second`."""
    module = ReusedLayer()
    model = SplitModel(module, X)
    assert (model.cut, model.feature_shape) == ("relu", (6,))
    assert model.head == ("last.weight", "last.bias")


def test_models_without_cut_raise_error() -> None:
    with pytest.raises(InvalidInputError, match=r"^the model has no cut: "):
        SplitModel(nn.Sequential(nn.Linear(4, 3)), X)
    with pytest.raises(
        InvalidInputError, match=r"^no layer before the last linear layer is a cut; allowed: 0$"
    ):
        SplitModel(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), X)
    assert SplitModel(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), X, "0").feature_shape == (3,)


@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        ("conv1.0", (16, 8, 8)),
        ("conv1", (16, 4, 4)),
        ("conv2", (32, 2, 2)),
        ("fc1.0", (128,)),
        ("fc1", (64,)),
    ],
)
def test_prbm_has_the_shape_of_the_cut(cut: str, shape: tuple[int, ...]) -> None:
    model = SplitModel(cnn_small((1, 8, 8), 10), IMAGES, cut)
    assert model.feature_shape == shape
    prbm = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
    out = model.forward(model.parameters, IMAGES, prbm)
    assert out.z_g.shape == (3, *shape)
    assert torch.equal(out.z, out.z_g + prbm)
    assert torch.equal(out.logits, model.classify(model.parameters, out.z))
    assert not torch.allclose(out.logits, model.forward(model.parameters, IMAGES).logits)


# --- values


@pytest.mark.parametrize("build", MODULES)
def test_f_then_h_equals_the_module_at_every_cut(build: Callable[[], nn.Module]) -> None:
    """At its own parameters and at others, which torch.func puts into the module for comparison."""
    module = build().eval()
    for cut in SplitModel(module, X).cuts:
        model = SplitModel(module, X, cut)
        out = model.forward(model.parameters, X)
        assert torch.equal(out.logits, module(X)), cut
        assert out.z is out.z_g
        assert torch.equal(model.classify(model.parameters, out.z_g), out.logits)
        changed = change_parameters(model)
        assert torch.equal(model.forward(changed, X).logits, functional_call(module, changed, (X,))), cut
        assert model.classes == out.logits.shape[1]


@pytest.mark.parametrize("build", [Residual, WithRootParameter, ReusedLayer, build_batch_norm])
def test_gradients_equal_those_of_the_module(build: Callable[[], nn.Module]) -> None:
    module = build()
    model = SplitModel(module, X)
    params = {name: p.requires_grad_() for name, p in change_parameters(model).items()}
    with model.bind(params, {name: b.clone() for name, b in model.buffers.items()}, training=True):
        gradients = torch.autograd.grad(model.forward(params, X).logits.square().sum(), list(params.values()))
    module.train()
    state = params | {name: b.clone() for name, b in model.buffers.items()}
    logits = functional_call(module, state, (X,))
    expected = torch.autograd.grad(logits.square().sum(), list(params.values()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert sum(g.abs().sum() for g in gradients) > 1


@pytest.mark.parametrize("build", MODULES)
def test_body_and_head_partition_the_modules_names(build: Callable[[], nn.Module]) -> None:
    module = build()
    keys = list(module.state_dict())
    assert SplitModel(module, X).parameters.keys() == dict(module.named_parameters()).keys()
    for cut in SplitModel(module, X).cuts:
        model = SplitModel(module, X, cut)
        assert list(module.state_dict()) == keys
        if build is not Tied:  # its weight has two names in the state
            assert {*model.parameters, *model.buffers} == set(keys)
        assert sorted((*model.body, *model.head)) == sorted(model.parameters)


@pytest.mark.parametrize("build", [build_nested, Residual])
def test_body_changes_only_f_and_head_only_h(build: Callable[[], nn.Module]) -> None:
    """A name of the body does not change h, a name of the head does not change f."""
    module = build()
    for cut in SplitModel(module, X).cuts:
        model = SplitModel(module, X, cut)
        start = model.forward(model.parameters, X)
        for name in model.parameters:
            changed = {**model.parameters, name: model.parameters[name] + 1}
            same = torch.equal(model.forward(changed, X).z_g, start.z_g)
            assert same == (name in model.head), (cut, name)
            if name in model.body:
                assert torch.equal(model.classify(changed, start.z), start.logits)


def test_root_parameter_is_used_by_both_halves() -> None:
    module = WithRootParameter()
    model = SplitModel(module, X)
    params = {**model.parameters, "scale": torch.tensor(3.0)}
    out = model.forward(params, X)
    assert torch.equal(out.z_g, torch.relu(module.first(X) * 3))
    assert torch.equal(out.logits, module.last(out.z_g) * 3)
    assert torch.equal(model.classify(params, X[:, :1].expand(3, 5)), module.last(X[:, :1].expand(3, 5)) * 3)
    assert "scale" in model.head  # used by both halves, so it belongs to the head
    assert model.body == ("first.weight", "first.bias")


@pytest.mark.parametrize("sequential", [False, True])
def test_tied_weights_stay_tied(sequential: bool) -> None:
    """With W = 2 I, f doubles and h doubles again."""
    tied = Tied()
    module = nn.Sequential(OrderedDict(encode=tied.encode, decode=tied.decode)) if sequential else tied
    model = SplitModel(module, X)
    assert list(model.parameters) == ["encode.weight"]
    assert (model.body, model.head) == ((), ("encode.weight",))
    out = model.forward({"encode.weight": 2 * torch.eye(4)}, X)
    assert torch.equal(out.z_g, 2 * X)
    assert torch.equal(out.logits, 4 * X)
    assert tied.decode.weight is tied.encode.weight


def test_layer_used_twice_in_a_sequential() -> None:
    relu, same = nn.ReLU(), nn.Linear(4, 4)
    module = nn.Sequential(same, relu, same, relu, nn.Linear(4, 3))
    model = SplitModel(module, X)
    assert model.cuts == ("0", "1", "2", "3")
    assert model.cut == "3"
    assert torch.equal(model.forward(model.parameters, X).logits, module(X))
    assert SplitModel(nn.Sequential(same, relu, same, nn.Tanh()), X).cut == "1", "before its second use"


@pytest.mark.parametrize(
    "module",
    [
        CustomSequential(nn.Linear(4, 5), nn.Linear(5, 3)),
        nn.Sequential(CustomSequential(nn.Linear(4, 5), nn.ReLU()), nn.Linear(5, 3)),
    ],
    ids=["root", "inside"],
)
def test_sequential_with_custom_forward_is_traced(module: nn.Module) -> None:
    for cut in SplitModel(module, X).cuts:
        model = SplitModel(module, X, cut)
        assert torch.equal(model.forward(model.parameters, X).logits, module(X)), cut


def test_functional_dropout_acts_in_training_only() -> None:
    """Of 100 ones, kept ones become 2 (p = 1/2); in evaluation all stay."""
    ones = torch.ones(1, 100)
    model = SplitModel(FunctionalDropout(), ones, "dropout")
    for training in (True, False, True):
        with model.bind(model.parameters, training=training):
            z = model.forward(model.parameters, ones).z_g
        if training:
            assert 20 < int((z == 0).sum()) < 80
            assert set(z.flatten().tolist()) == {0.0, 2.0}
        else:
            assert torch.equal(z, ones)
    assert torch.equal(model.forward(model.parameters, ones).z_g, ones)


@pytest.mark.parametrize("prbm", [None, torch.zeros(5)])
def test_in_place_layer_after_the_cut(prbm: Tensor | None) -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    model = SplitModel(module, X, "0")
    out = model.forward(model.parameters, X, prbm)
    assert torch.equal(out.z_g, module[0](X))
    assert torch.equal(out.z, module[0](X))


# --- binding


@pytest.mark.parametrize("build", [*MODULES, lambda: nn.Sequential(*build_pair())])
def test_module_parameters_are_unchanged(build: Callable[[], nn.Module]) -> None:
    module = build()
    module_params = dict(module.named_parameters())
    values = {name: t.clone() for name, t in module.state_dict().items()}
    model = SplitModel(module, X)
    params = {name: p.requires_grad_() for name, p in change_parameters(model).items()}
    model.forward(params, X)
    with model.bind(params, {n: b.clone() for n, b in model.buffers.items()}, training=True):
        model.forward(params, X).logits.sum().backward()  # type: ignore[no-untyped-call]
        assert any(p is not module_params[name] for name, p in module.named_parameters())
    assert all(p is module_params[name] and p.grad is None for name, p in module.named_parameters())
    assert all(torch.equal(t, values[name]) for name, t in module.state_dict().items())
    model.parameters[next(iter(module_params))].zero_()
    assert torch.equal(module_params[next(iter(module_params))], values[next(iter(module_params))]), (
        "parameters are copies"
    )


@pytest.mark.parametrize("build", [build_nested, Residual, WithRootParameter])
def test_nested_bind_restores_the_outer_binding(build: Callable[[], nn.Module]) -> None:
    module = build()
    model = SplitModel(module, X)
    outer, inner = change_parameters(model), {name: -p for name, p in model.parameters.items()}
    expected = {id(p): functional_call(module, p, (X,)) for p in (outer, inner)}
    with model.bind(outer, training=True):
        for _ in range(2):
            assert torch.equal(model.forward(outer, X).logits, expected[id(outer)])
            assert module.training
            with model.bind(inner):
                assert not module.training
                assert torch.equal(model.forward(inner, X).logits, expected[id(inner)])
            assert torch.equal(model.forward(inner, X).logits, expected[id(inner)])  # bound for the call
        assert all(p is outer[name] for name, p in _layer_parameters(module).items())
    assert not module.training
    assert torch.equal(model.forward(model.parameters, X).logits, module(X))


def _layer_parameters(module: nn.Module) -> dict[str, object]:
    """Return the current values of all parameter slots of the layers."""
    return {
        f"{path}.{key}" if path else key: tensor
        for path, layer in module.named_modules()
        for key, tensor in layer._parameters.items()
    }


def test_bind_is_restored_after_an_error() -> None:
    module = build_nested()
    model = SplitModel(module, X, onednn=False)
    module_params, flag = _layer_parameters(module), torch.backends.mkldnn.enabled
    onednn_flags: list[bool] = []

    def raise_inside() -> None:
        with model.bind(change_parameters(model), training=True):
            onednn_flags.append(bool(torch.backends.mkldnn.enabled))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raise_inside()
    assert onednn_flags == [False]
    assert all(p is module_params[name] for name, p in _layer_parameters(module).items())
    assert torch.backends.mkldnn.enabled == flag
    assert not module.training


def test_unknown_names_are_ignored() -> None:
    model = SplitModel(build_nested(), X)
    params = change_parameters(model)
    expected = model.forward(params, X).logits
    assert torch.equal(model.forward({**params, "prbm": torch.ones(5), "mean": X}, X).logits, expected)


def test_missing_names_use_the_modules_parameters() -> None:
    model = SplitModel(build_nested(), X)
    part = {"leave.bias": torch.full((3,), 7.0)}
    expected = model.forward({**model.parameters, **part}, X).logits
    assert torch.equal(model.forward(part, X).logits, expected)


def test_batch_norm_updates_buffers_in_training_only() -> None:
    """One batch from (0, 1) with momentum 1/10: mean m/10, variance 9/10 + v/10 (v unbiased), counter 1."""
    module = build_batch_norm()
    model = SplitModel(module, X)
    assert {n: b.shape for n, b in model.buffers.items()} == {
        "1.running_mean": (5,), "1.running_var": (5,), "1.num_batches_tracked": ()
    }  # fmt: skip
    buffers = {name: b.clone() for name, b in model.buffers.items()}
    with model.bind(model.parameters, buffers):
        model.forward(model.parameters, X)
    assert all(torch.equal(buffers[name], b) for name, b in model.buffers.items())
    with model.bind(model.parameters, buffers, training=True):
        model.forward(model.parameters, X)
    features = module[0](X)
    assert torch.allclose(buffers["1.running_mean"], features.mean(0) / 10)
    assert torch.allclose(buffers["1.running_var"], 0.9 + features.var(0) / 10)
    assert int(buffers["1.num_batches_tracked"]) == 1
    assert all(torch.equal(b, model.buffers[name]) for name, b in module.named_buffers())
    assert int(model.buffers["1.num_batches_tracked"]) == 0
    logits = module(X)
    with model.bind(model.parameters, buffers):
        assert not torch.allclose(model.forward(model.parameters, X).logits, logits)


# --- layout


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), ()])
@pytest.mark.parametrize("onednn", [True, False])
def test_to_memory_format_copies_values(shape: tuple[int, ...], onednn: bool) -> None:
    model = SplitModel(build_nested(), X, onednn=onednn)
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    copy = model.to_memory_format(tensor)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr()
    if len(shape) == 4:
        _, c, h, w = shape
        channels_last = (c * h * w, 1, w * c, c)
        assert (copy.stride() == channels_last) == onednn
    back = model.to_memory_format(copy.contiguous())
    assert torch.equal(back, tensor)
    assert SplitModel(build_nested(), X, channels_last=False).to_memory_format(copy).is_contiguous()
    assert SplitModel(build_nested(), X, onednn=False).to_memory_format(copy).is_contiguous()


# --- errors


def test_wrong_input_shape_error_is_one_line() -> None:
    """Layers raise different errors: RuntimeError or ValueError."""
    for module in (nn.Sequential(nn.Linear(9, 3), nn.Linear(3, 2)), build_wrong_batch_norm()):
        with pytest.raises(
            InvalidInputError, match=r"^the model does not take inputs of shape \(4,\): \w.*$"
        ):
            build_model(module, X, 2, None, 0)


def build_wrong_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm2d(3), nn.Linear(3, 2))


def test_model_that_modifies_parameters_in_forward_raises_error() -> None:
    """It would change the server's model while a client evaluates."""
    model = nn.Sequential(nn.EmbeddingBag(5, 4, max_norm=0.1), nn.Linear(4, 3))
    with pytest.raises(InvalidInputError, match=r"modifies its own parameter '0\.weight' .*max_norm"):
        SplitModel(model, torch.zeros(2, 6, dtype=torch.long))


# --- activations


class InPlace(nn.Module):
    """Module in which each activation is overwritten by the next layer or function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh_(self.second(self.act(self.first(x)))))
        return out


def test_activations_of_sequential() -> None:
    module = build_nested()
    enter, _, linear, _, leave = (layer for layer in module.modules() if not isinstance(layer, nn.Sequential))
    model = SplitModel(module, X, "block.0")
    p = torch.linspace(1, 2, 6)
    a = enter(X)
    z_g = torch.tanh(a)
    inner = linear(z_g + p)
    activations = model.activations(model.parameters, X, [*model.cuts, "z_g", "z", "logits"], p)
    expected = {
        "enter": a,
        "block.0": z_g,
        "block.1.0": inner,
        "block": inner.relu(),
        "z_g": z_g,
        "z": z_g + p,
    }
    expected |= {"block.1": inner.relu(), "block.1.1": inner.relu(), "logits": leave(inner.relu())}
    assert activations.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(activations[name], tensor), name


@pytest.mark.parametrize("cut", ["act", "tanh_"])
def test_activations_of_traced_module(cut: str) -> None:
    """Activations are copies: a layer that modifies its input does not change them."""
    module = InPlace()
    model = SplitModel(module, X, cut)
    assert model.cuts == ("first", "act", "second", "tanh_")
    p = torch.linspace(1, 2, 5)
    first = module.first(X)
    act = first.clone().relu()
    second = module.second(act + p if cut == "act" else act)
    tanh = second.tanh()
    logits = module.last(tanh if cut == "act" else tanh + p)
    expected = {"first": first, "act": act, "second": second, "tanh_": tanh, "logits": logits}
    expected |= {"z_g": act, "z": act + p} if cut == "act" else {"z_g": tanh, "z": tanh + p}
    activations = model.activations(model.parameters, X, expected, p)
    for name, tensor in expected.items():
        assert torch.equal(activations[name], tensor), name
    assert torch.equal(activations["logits"], model.forward(model.parameters, X, p).logits)


def test_aliases_of_layers_survive_pickling() -> None:
    x = torch.rand(2, 3, 32, 32)
    model = build_model("resnet18", x, 10, None, 0)
    with torch.inference_mode():
        activations = model.activations(
            model.parameters, x, ["conv", "maxpool", "b2", "layer2", "pool", "z_g"]
        )
    assert activations["conv"].shape == (2, 64, 8, 8)
    assert torch.equal(activations["conv"], activations["maxpool"])
    assert torch.equal(activations["b2"], activations["layer2"])
    assert torch.equal(activations["pool"], activations["z_g"])
    unpickled = pickle.loads(pickle.dumps(model))
    unpickled.check_layers(["b4", "z", "logits"])
    assert unpickled.aliases == model.aliases != {}


def test_unknown_layer_error_is_one_line() -> None:
    model = SplitModel(build_nested(), X)
    with pytest.raises(
        InvalidInputError, match=r"^unknown layer 'blok'; did you mean 'block'\? allowed: .*logits, z, z_g$"
    ):
        model.check_layers(["z", "blok"])
