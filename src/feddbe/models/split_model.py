"""SplitModel: any `nn.Module` split at a named cut into features f and classifier h.

    z_g = f(x)        z = z_g + prbm        logits = h(z)

A layer is a cut if exactly one tensor crosses the boundary after it. A cut renames nothing: parameters keep
the module's names, and the cut only divides them into those of f and those of h.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from feddbe.errors import InvalidInputError, one_line, unknown_name
from feddbe.seeds import torch_seeded
from feddbe.state import State, to_device

Halves = tuple[nn.Module, nn.Module]
"""The modules f and h."""
Layers = list[tuple[nn.Module, dict[str, str]]]
"""Layers in order, each with the model's names of its parameters."""
Cuts = dict[str, Callable[[], Halves]]
"""Name of a cut -> function that builds the two halves."""
LAYER_NAMES_KEY = "layer_names"
"""Key in a traced node's `meta` under which the names of its cut are stored."""


def find_cuts(module: nn.Module) -> Cuts:
    """Return all cuts of the module by name, each with a function that builds the two halves."""
    if _is_plain_sequential(module):
        return _sequential_cuts(module)
    if "forward" in vars(module):  # torch.fx traces the forward of the class
        raise InvalidInputError(
            f"torch.fx cannot trace this {type(module).__name__}: its forward is replaced on the instance; "
            "define it in a class, or pass a pair (features, classifier) instead"
        )
    try:
        graph = fx.symbolic_trace(module)
    except Exception as error:  # a user's forward may raise any error when it is traced
        raise InvalidInputError(
            f"torch.fx cannot trace {type(module).__name__} ({one_line(error)}); "
            "pass a pair (features, classifier) instead"
        ) from error
    return _traced_cuts(graph)


def _is_plain_sequential(module: nn.Module) -> bool:
    """Return True if this is a Sequential that only calls its layers one after the other."""
    sequential = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return sequential and "forward" not in vars(module)


def _iterate_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of nested Sequentials in order, with their dotted names."""
    for name, child in module._modules.items():  # named_children omits the second use of a layer
        assert child is not None
        if _is_plain_sequential(child):
            yield from _iterate_layers(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def list_layers(half: nn.Module) -> list[nn.Module]:
    """Return the layers of a Sequential in order, or a list of the module itself."""
    return [layer for _, layer in _iterate_layers(half)] if _is_plain_sequential(half) else [half]


def layers_with_parameter_names(half: nn.Module, names: Mapping[int, str]) -> Layers:
    """Return the half's layers in order, each with the model's names of its parameters."""
    return [
        (layer, {name: names[id(p)] for name, p in layer.named_parameters()}) for layer in list_layers(half)
    ]


def find_single_linear(half: nn.Module) -> nn.Linear | None:
    """Return the linear layer if the half consists of exactly one; else None."""
    if isinstance(half, fx.GraphModule):
        nodes = [node for node in half.graph.nodes if node.op not in ("placeholder", "output")]
        if len(nodes) != 1 or nodes[0].op != "call_module":
            return None
        layer = half.get_submodule(nodes[0].target)
    else:
        layers = list_layers(half)
        if len(layers) != 1:
            return None
        layer = layers[0]
    return layer if type(layer) is nn.Linear and not has_hooks(layer) else None


def has_hooks(layer: nn.Module) -> bool:
    """Return True if the layer has hooks or a replaced forward."""
    hooks = (
        layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks) or "forward" in vars(layer)


def _end_positions(module: nn.Module) -> dict[str, int]:
    """Return, for each layer or block, the number of layers up to its end."""
    ends: dict[str, int] = {}
    for position, (name, _) in enumerate(_iterate_layers(module), start=1):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            ends[".".join(parts[:depth])] = position
    return ends


def split_layer_names(module: nn.Module, cut: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the names of each layer's output, for the layers up to the cut and for those after it.

    The lists are empty for a traced module, which stores the names in its graph.
    """
    if not _is_plain_sequential(module):
        return [[]], [[]]
    ends = _end_positions(module)
    names: list[list[str]] = [[] for _ in range(max(ends.values()))]
    for name, position in ends.items():
        names[position - 1].append(name)
    return names[: ends[cut]], names[ends[cut] :]


def _sequential_cuts(module: nn.Module) -> Cuts:
    ends, layers = _end_positions(module), list_layers(module)

    def halves(position: int) -> Halves:
        return _as_module(layers[:position]), _as_module(layers[position:])

    # Sort by position; if a position has several names, the shortest is last.
    sorted_ends = sorted(ends.items(), key=lambda item: (item[1], -len(item[0])))
    return {
        name: lambda position=position: halves(position)  # type: ignore[misc]
        for name, position in sorted_ends
        if position < len(layers)
    }


def _as_module(layers: list[nn.Module]) -> nn.Module:
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def _traced_cuts(graph: fx.GraphModule) -> Cuts:
    nodes = list(graph.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    ends: dict[str, fx.Node] = {}
    for node in nodes:
        if node.op in ("call_module", "call_function", "call_method"):
            for path, _ in node.meta.get("nn_module_stack", {}).values():
                ends[path] = node  # a block ends with its last node
            ends[str(node.target) if node.op == "call_module" else node.name] = node
    ends.pop("", None)
    outputs = set(nodes[-1].all_input_nodes)

    def is_only_crossing(cut: fx.Node) -> bool:
        later = nodes[position[cut] + 1 :]
        crossing = {
            argument
            for node in later
            for argument in node.all_input_nodes
            if position[argument] <= position[cut] and argument.op != "get_attr"
        }
        return crossing == {cut}

    cuts: Cuts = {}
    for name, node in sorted(ends.items(), key=lambda item: (position[item[1]], -len(item[0]))):
        if node not in outputs and is_only_crossing(node):
            node.meta[LAYER_NAMES_KEY] = (*node.meta.get(LAYER_NAMES_KEY, ()), name)
            cuts[name] = lambda node=node: _split_graph(graph, node)  # type: ignore[misc]
    return cuts


def _split_graph(traced: fx.GraphModule, cut: fx.Node) -> Halves:
    """Return two graphs over the same layers: the nodes up to the cut, and those after it."""
    nodes = list(traced.graph.nodes)
    position = nodes.index(cut)
    first, second = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes[: position + 1]:
        copies[node] = first.node_copy(node, lambda n: copies[n])
    first.output(copies[cut])
    later: dict[fx.Node, fx.Node] = {cut: second.placeholder("z")}
    used_nodes = {argument for node in nodes[position + 1 :] for argument in node.all_input_nodes}
    shared_attributes = [n for n in nodes[: position + 1] if n.op == "get_attr" and n in used_nodes]
    for node in [*shared_attributes, *nodes[position + 1 :]]:
        later[node] = second.node_copy(node, lambda n: later[n])
    return fx.GraphModule(traced, first), fx.GraphModule(traced, second)


def before_last_linear(module: nn.Module, cuts: tuple[str, ...]) -> str:
    """Return the last cut before the last linear layer."""
    layers = module.named_modules(remove_duplicate=False)
    linear_layers = [name for name, layer in layers if isinstance(layer, nn.Linear)]
    before = list(cuts)
    if linear_layers and linear_layers[-1] in before:
        before = before[: before.index(linear_layers[-1])]
    if not before:
        raise InvalidInputError(f"no layer before the last linear layer is a cut; allowed: {', '.join(cuts)}")
    return before[-1]


OnActivation = Callable[[str, Tensor], None]
"""(layer name, activation) -> None."""


def run_half(
    half: nn.Module, x: Tensor, names: Iterable[Iterable[str]], on_activation: OnActivation
) -> Tensor:
    """Return the half's output for `x`, and call `on_activation` with each named activation.

    Args:
        half: f or h.
        x: Input of the half.
        names: Names of each layer's output in a Sequential; a traced half stores them in its graph.
        on_activation: Called with a name and the activation.
    """
    if isinstance(half, fx.GraphModule):
        out: Tensor = _ActivationInterpreter(half, on_activation).run(x)
        return out
    for layer, layer_names in zip(list_layers(half), names, strict=True):
        x = layer(x)
        for name in layer_names:
            on_activation(name, x)
    return x


class _ActivationInterpreter(fx.Interpreter):
    """Interpreter of a traced graph that reports named activations."""

    def __init__(self, half: fx.GraphModule, on_activation: OnActivation) -> None:
        super().__init__(half)
        self.on_activation = on_activation

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for name in n.meta.get(LAYER_NAMES_KEY, ()):
            self.on_activation(name, value)
        return value


Owner = MutableMapping[str, Any]
"""Dictionary of a layer's parameters or buffers."""
Slots = dict[str, list[tuple[Owner, str]]]
"""Name of a tensor -> all dictionary entries that hold it."""


class Forward(NamedTuple):
    """Result of a forward pass: representation before and after adding PRBM's vector, and logits."""

    z_g: Tensor
    z: Tensor
    logits: Tensor


class SplitModel:
    """Pure functions of named tensors, computed by one module into which the tensors are bound.

    Args:
        module: An `nn.Sequential` (every layer is a cut, nested ones by dotted name), a pair (features,
            classifier), or another module that torch.fx can trace.
        sample: An input with a batch axis.
        cut: Name of the cut; None: before the last linear layer.
        onednn: Use oneDNN; without it the channels-last layout is not used either. For tiny
            images both cost more than they save.
        channels_last: Use the channels-last layout, which is slower for some networks.
        aliases: Other names of cuts.
    """

    def __init__(
        self,
        module: nn.Module | Halves,
        sample: Tensor,
        cut: str | None = None,
        *,
        onednn: bool = True,
        channels_last: bool = True,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(module, tuple):
            pair = nn.Sequential()
            pair.add_module("features", module[0])
            pair.add_module("classifier", module[1])
            module, cut = pair, cut or "features"
        self.module = module
        self.onednn = onednn
        self.channels_last = onednn and channels_last
        self.rebuild_module: Callable[[], nn.Module | Halves] | None = None
        """Function that rebuilds the module in processes that cannot import its classes (a user's file)."""
        self._sample, self.input_shape = sample, tuple(sample.shape[1:])
        # One pair of halves per mode, because tracing writes the training flag of F.dropout into the graph.
        cuts_by_mode = {training: find_cuts(module.train(training)) for training in (True, False)}
        self.cuts = tuple(cuts_by_mode[False])
        if not self.cuts:
            raise InvalidInputError("the model has no cut: more than one tensor leaves each of its layers")
        self.aliases = dict(aliases or {})
        names = {name: name for name in self.cuts} | self.aliases
        if cut is not None and cut not in names:
            raise unknown_name("cut", cut, names)
        self.cut = names[cut] if cut is not None else before_last_linear(module, self.cuts)
        self._layer_names = split_layer_names(module, self.cut)
        self._halves = {training: cuts[self.cut]() for training, cuts in cuts_by_mode.items()}
        roots = [module, *self._halves[True], *self._halves[False]]
        layers = [layer for root in roots for layer in root.modules()]
        self._slots = _find_slots(module.named_parameters(), [layer._parameters for layer in layers])
        self._slots |= _find_slots(module.named_buffers(), [layer._buffers for layer in layers])
        names_by_id = {id(p): name for name, p in module.named_parameters()}
        self.layers = tuple(layers_with_parameter_names(half, names_by_id) for half in self._halves[True])
        """Layers of f and of h."""
        self._bound_params: Mapping[str, Tensor] | None = None
        self._training = False

        self.frozen = frozenset(name for name, p in module.named_parameters() if not p.requires_grad)
        self.parameters: State = {name: p.detach().clone() for name, p in module.named_parameters()}
        persistent = module.state_dict().keys()
        self.buffers: State = {
            name: b.detach().clone() for name, b in module.named_buffers() if name in persistent
        }
        f, h = self._halves[False]
        self.feature_shape, self.classes, self._head_writes_in_place = self._inspect_forward(f, h)
        in_head = {id(p) for p in h.parameters()}
        self.linear_head: dict[str, str] = {}
        """Names of weight and bias, if h is a single linear layer that shares neither with f."""
        linear = find_single_linear(h)
        if linear is not None and in_head.isdisjoint(id(p) for p in f.parameters()):
            self.linear_head = {name: names_by_id[id(p)] for name, p in linear.named_parameters()}
        self.head = tuple(name for name, p in module.named_parameters() if id(p) in in_head)
        self.body = tuple(name for name in self.parameters if name not in self.head)

    def _inspect_forward(self, f: nn.Module, h: nn.Module) -> tuple[tuple[int, ...], int, bool]:
        """Return from one pass the shape of z, the number of classes, and True if h modifies z in place."""
        versions = {name: p._version for name, p in self.module.named_parameters()}
        with torch.no_grad():
            z = f(self._sample)
            version = z._version
            classes = _count_classes(h(z))
        changed = [name for name, p in self.module.named_parameters() if p._version != versions[name]]
        if changed:
            raise InvalidInputError(
                f"the model modifies its own parameter '{changed[0]}' in a forward pass "
                "(max_norm of an embedding?); only training may change parameters"
            )
        return tuple(z.shape[1:]), classes, z._version != version

    def copy_halves(self, state: Mapping[str, Tensor]) -> Halves:
        """Return f and h with these values, in evaluation mode, as modules independent of this one."""
        module = copy.deepcopy(self.module)
        module.load_state_dict({n: t.detach().clone() for n, t in state.items()}, strict=False)
        return SplitModel(module, self._sample, self.cut, onednn=self.onednn)._halves[False]

    def to(self, device: torch.device) -> SplitModel:
        """Return the model on this device."""
        module = copy.deepcopy(self.module).to(device)
        settings = self._sample.to(device), self.cut, self.onednn, self.channels_last, self.aliases
        with device:  # a traced graph creates its constants on the device of tracing
            parameters, buffers = to_device(self.parameters, device), to_device(self.buffers, device)
            model = _rebuild_model(module, *settings, parameters, buffers)
        model.rebuild_module = self.rebuild_module
        return model

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments instead of the object: the graphs of a traced module cannot be pickled."""
        settings = self._sample, self.cut, self.onednn, self.channels_last, self.aliases
        return _rebuild_model, (self.rebuild_module or self.module, *settings, self.parameters, self.buffers)

    @contextmanager
    def bind(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] | None = None,
        *,
        training: bool = False,
    ) -> Iterator[None]:
        """Compute with these tensors until the end of the block; BatchNorm updates `buffers` in place.

        Names that the module does not have are ignored.
        """
        previous = self._bound_params, self._training
        tensors = {name: t for name, t in {**params, **(buffers or {})}.items() if name in self._slots}
        replaced = {}
        for name in tensors:
            owner, key = self._slots[name][0]
            replaced[name] = owner[key]
        self._write_slots(tensors)
        self._bound_params, self._training = params, training
        self._set_mode(training)
        flags = torch.backends.mkldnn.set_flags(self.onednn)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.backends.mkldnn.set_flags(flags[0])  # type: ignore[no-untyped-call]
            self._write_slots(replaced)
            self._bound_params, self._training = previous
            self._set_mode(self._training)

    def _set_mode(self, training: bool) -> None:
        if self.module.training != training:  # setting the mode takes longer than a pass of a small model
            self.module.train(training)

    def forward(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        prbm: Tensor | None = None,
        *,
        training: bool = False,
    ) -> Forward:
        """Return the forward pass at `params`.

        If `params` are not the bound ones, they are bound for this call, in evaluation mode unless
        `training`. They may include buffers; otherwise BatchNorm uses the bound model's.
        """
        if params is not self._bound_params:
            with self.bind(params, training=training):
                return self.forward(params, x, prbm)
        f, h = self._halves[self._training]
        z_g = f(x)
        z = z_g if prbm is None else z_g + prbm
        return Forward(z_g, z, h(z.clone() if self._head_writes_in_place else z))

    def check_layers(self, names: Iterable[str]) -> None:
        """Raise an error unless all names are cuts, their aliases, z_g, z or logits."""
        allowed = {*self.cuts, *self.aliases, *Forward._fields}
        for name in names:
            if name not in allowed:
                raise unknown_name("layer", name, allowed)

    def activations(
        self, params: Mapping[str, Tensor], x: Tensor, names: Iterable[str], prbm: Tensor | None = None
    ) -> State:
        """Return copies of the activations of these layers in one pass in evaluation mode.

        Layers before the cut are computed by f alone, layers after it include PRBM's vector; the cut's name
        stands for z_g.
        """
        if params is not self._bound_params:
            with self.bind(params):
                return self.activations(params, x, names, prbm)
        layers = {name: self.aliases.get(name, name) for name in names}
        activations: State = {}

        def record(layer: str, value: Tensor) -> None:
            if layer in layers.values():
                activations[layer] = value.clone()

        f, h = self._halves[self._training]
        body_names, head_names = self._layer_names
        z_g = run_half(f, x, body_names, record)
        record("z_g", z_g)
        z = z_g if prbm is None else z_g + prbm
        record("z", z)
        record("logits", run_half(h, z, head_names, record))
        return {name: activations[layer] for name, layer in layers.items()}

    def features(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return f(x)."""
        if params is not self._bound_params:
            with self.bind(params):
                return self.features(params, x)
        z_g: Tensor = self._halves[self._training][0](x)
        return z_g

    def classify(self, params: Mapping[str, Tensor], z: Tensor) -> Tensor:
        """Return h(z), for representations that were not computed by f."""
        if params is not self._bound_params:
            with self.bind(params):
                return self.classify(params, z)
        logits: Tensor = self._halves[self._training][1](z)
        return logits

    def reinitialized(self, seed: int) -> State:
        """Return the parameters of another initialization by each layer's `reset_parameters`, children first.

        A parameter that no layer resets stays at theta^0.
        """
        module = copy.deepcopy(self.module).cpu()  # on the CPU, so that it is equal on every device
        with torch.device("cpu"), torch_seeded(seed):
            module.apply(lambda layer: getattr(layer, "reset_parameters", lambda: None)())
        device = self._sample.device
        return {name: p.detach().to(device) for name, p in module.named_parameters()}

    def to_memory_format(self, tensor: Tensor, *, copy: bool = True) -> Tensor:
        """Return a copy in the memory layout in which this model is fast.

        With `copy=False` the tensor itself is returned if its layout is right already.
        """
        # `contiguous` would leave one-channel tensors, and all results of them, in the slow layout.
        channels_last = self.channels_last and tensor.dim() == 4
        if not copy and not channels_last:
            return tensor.contiguous()
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return torch.empty_like(tensor, memory_format=memory_format).copy_(tensor)

    def _write_slots(self, tensors: Mapping[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            for owner, key in self._slots[name]:
                owner[key] = tensor


def _rebuild_model(
    source: nn.Module | Callable[[], nn.Module | Halves],
    sample: Tensor,
    cut: str,
    onednn: bool,
    channels_last: bool,
    aliases: Mapping[str, str],
    parameters: State,
    buffers: State,
) -> SplitModel:
    """Rebuild a model, for example in another process."""
    module: nn.Module | Halves
    if isinstance(source, nn.Module):
        module = source
    else:
        with torch_seeded(0):  # its random values are overwritten
            module = source()
    model = SplitModel(module, sample, cut, onednn=onednn, channels_last=channels_last, aliases=aliases)
    model.rebuild_module = None if isinstance(source, nn.Module) else source
    model.module.load_state_dict(parameters | buffers, strict=False)
    model.parameters, model.buffers = parameters, buffers
    return model


def _count_classes(logits: object) -> int:
    """Return the number of classes of a model's output."""
    if not isinstance(logits, Tensor):
        raise InvalidInputError(
            f"the model returns a {type(logits).__name__}; expected logits of shape (batch, classes)"
        )
    if logits.dim() != 2:
        shape = tuple(logits.shape)
        raise InvalidInputError(f"the model returns an output of shape {shape}; expected (batch, classes)")
    return logits.shape[1]


def _find_slots(named_tensors: Iterator[tuple[str, Tensor]], owners: list[Owner]) -> Slots:
    """Return all dictionary entries that hold each named tensor, including tied layers and traced copies."""
    names = {id(tensor): name for name, tensor in named_tensors}
    slots: Slots = {name: [] for name in names.values()}
    for owner in owners:
        for key, tensor in owner.items():
            if id(tensor) not in names:
                continue
            slot = slots[names[id(tensor)]]
            if not any(other is owner and other_key == key for other, other_key in slot):
                slot.append((owner, key))
    return slots


Shape = tuple[int, ...]
BUILDER_PARAMETERS = ("shape", "classes", "words")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def builder_arguments(
    function: Callable[..., Any], shape: Shape, classes: int, words: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments for a call of a model builder.

    Raises:
        InvalidInputError: The builder has another required parameter.
    """
    values: dict[str, Any] = {"shape": shape, "classes": classes, "words": words}
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # some built-in functions have no signature
        return [shape, classes], {}
    required = [
        p for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip
    unknown = [p for p in required if p.name not in BUILDER_PARAMETERS]
    if unknown and all(p.kind in _POSITIONAL for p in unknown) and required[:2] == parameters[:2]:
        # (shape, classes) by position, under any names
        positional, rest = parameters[:2], [p for p in required[2:] if p.name not in BUILDER_PARAMETERS]
        if len(required) >= 2 and not rest and not any(p.name == "words" for p in positional):
            keywords = {p.name: values[p.name] for p in parameters[2:] if p.name in BUILDER_PARAMETERS}
            return [shape, classes], keywords
    if unknown:
        name = getattr(function, "__name__", "build")
        raise InvalidInputError(
            f"{name}{inspect.signature(function)}: a builder may have the parameters shape, classes "
            f"and words; '{unknown[0].name}' needs a default"
        )
    leading = list(takewhile(lambda p: p.name in BUILDER_PARAMETERS and p.kind in _POSITIONAL, parameters))
    rest = [p for p in parameters[len(leading) :] if p.name in BUILDER_PARAMETERS]
    return [values[p.name] for p in leading], {p.name: values[p.name] for p in rest}


def call_builder(function: Callable[..., Any], shape: Shape, classes: int, words: int) -> Any:
    """Call a model builder with its supported arguments and return its result."""
    arguments, keywords = builder_arguments(function, shape, classes, words)
    return function(*arguments, **keywords)
