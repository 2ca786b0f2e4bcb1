"""Where a module can be cut: every place in it where exactly one tensor crosses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn

from feddbe.errors import BadInput, one_line

Halves = tuple[nn.Module, nn.Module]
Layers = list[tuple[nn.Module, dict[str, str]]]
"""Layers that are called one after the other, and the model's names of each one's parameters."""
Cuts = dict[str, Callable[[], Halves]]
PLACES = "places"
"""Where a traced node's `meta` has the names of the cut that it is."""


def find_cuts(module: nn.Module) -> Cuts:
    """All places of the module where it can be cut, each with how to make the two halves."""
    if _plain(module):
        return _sequential_cuts(module)
    if "forward" in vars(module):  # torch.fx traces the forward of the class
        raise BadInput(
            f"torch.fx cannot trace this {type(module).__name__}: its forward is replaced on the instance; "
            "define it in a class, or give a pair (features, classifier) instead"
        )
    try:
        graph = fx.symbolic_trace(module)
    except Exception as error:  # a module's own forward can fail in any way when it is traced
        raise BadInput(
            f"torch.fx cannot trace {type(module).__name__} ({one_line(error)}); "
            "give a pair (features, classifier) instead"
        ) from error
    return _traced_cuts(graph)


def _plain(module: nn.Module) -> bool:
    """Whether it is a Sequential that does nothing but call its layers one after the other."""
    sequential = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return sequential and "forward" not in vars(module)


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials in order, with their dotted names."""
    for name, child in module._modules.items():  # named_children leaves out a layer's second use
        assert child is not None
        if _plain(child):
            yield from _leaves(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def layers_of(half: nn.Module) -> list[nn.Module]:
    """The layers that it calls one after the other; itself if it is no row of layers."""
    return [layer for _, layer in _leaves(half)] if _plain(half) else [half]


def find_layers(half: nn.Module, names: Mapping[int, str]) -> Layers:
    own = [(layer, layer.named_parameters()) for layer in layers_of(half)]
    return [(layer, {name: names[id(p)] for name, p in parameters}) for layer, parameters in own]


def linear_of(half: nn.Module) -> nn.Linear | None:
    """The linear layer that it is, if it is one and nothing else."""
    called: list[nn.Module | None] = [*layers_of(half)]
    if isinstance(half, fx.GraphModule):
        nodes = [node for node in half.graph.nodes if node.op not in ("placeholder", "output")]
        called = [half.get_submodule(n.target) if n.op == "call_module" else None for n in nodes]
    (layer,) = called if len(called) == 1 else [None]
    return layer if type(layer) is nn.Linear and not hooked(layer) else None


def hooked(layer: nn.Module) -> bool:
    """Return whether calling the layer does more than its class does: it has hooks or a replaced forward."""
    hooks = (
        layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks) or "forward" in vars(layer)


def _ends(module: nn.Module) -> dict[str, int]:
    """Place -> how many leaves lie before it; a block's place is its end."""
    ends: dict[str, int] = {}
    for position, (name, _) in enumerate(_leaves(module), start=1):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            ends[".".join(parts[:depth])] = position
    return ends


def places_of(module: nn.Module, cut: str) -> tuple[list[list[str]], list[list[str]]]:
    """Of a row of layers: the names of the place after each layer, up to the cut and from there on. A traced
    module has them in its graph."""
    if not _plain(module):
        return [[]], [[]]
    ends = _ends(module)
    each: list[list[str]] = [[] for _ in range(max(ends.values()))]
    for name, position in ends.items():
        each[position - 1].append(name)
    return each[: ends[cut]], each[ends[cut] :]


def _sequential_cuts(module: nn.Module) -> Cuts:
    ends, layers = _ends(module), layers_of(module)

    def halves(at: int) -> Halves:
        return _row(layers[:at]), _row(layers[at:])

    # by place, of several names the shortest last
    ordered = sorted(ends.items(), key=lambda item: (item[1], -len(item[0])))
    return {name: lambda at=at: halves(at) for name, at in ordered if at < len(layers)}  # type: ignore[misc]


def _row(layers: list[nn.Module]) -> nn.Module:
    """The layers one after the other."""
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def _traced_cuts(graph: fx.GraphModule) -> Cuts:
    nodes = list(graph.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    places: dict[str, fx.Node] = {}
    for node in nodes:
        if node.op in ("call_module", "call_function", "call_method"):
            for path, _ in node.meta.get("nn_module_stack", {}).values():
                places[path] = node  # the last node inside a block is the block's place
            places[str(node.target) if node.op == "call_module" else node.name] = node
    places.pop("", None)
    result = set(nodes[-1].all_input_nodes)

    def crosses_alone(cut: fx.Node) -> bool:
        later = nodes[position[cut] + 1 :]
        needed = {
            a for n in later for a in n.all_input_nodes if position[a] <= position[cut] and a.op != "get_attr"
        }
        return needed == {cut}

    cuts: Cuts = {}
    for name, node in sorted(places.items(), key=lambda item: (position[item[1]], -len(item[0]))):
        if node not in result and crosses_alone(node):
            node.meta[PLACES] = (*node.meta.get(PLACES, ()), name)
            cuts[name] = lambda node=node: _halves_at(graph, node)  # type: ignore[misc]
    return cuts


def _halves_at(traced: fx.GraphModule, cut: fx.Node) -> Halves:
    """Two graphs over the same layers: the nodes up to the cut, and those after it."""
    nodes = list(traced.graph.nodes)
    at = nodes.index(cut)
    first, second = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes[: at + 1]:
        copies[node] = first.node_copy(node, lambda n: copies[n])
    first.output(copies[cut])
    later: dict[fx.Node, fx.Node] = {cut: second.placeholder("z")}
    used = {argument for node in nodes[at + 1 :] for argument in node.all_input_nodes}
    for node in [n for n in nodes[: at + 1] if n.op == "get_attr" and n in used] + nodes[at + 1 :]:
        later[node] = second.node_copy(node, lambda n: later[n])
    return fx.GraphModule(traced, first), fx.GraphModule(traced, second)


def before_last_linear(module: nn.Module, cuts: tuple[str, ...]) -> str:
    """The last place before the last linear layer."""
    linear = [
        name for name, layer in module.named_modules(remove_duplicate=False) if isinstance(layer, nn.Linear)
    ]
    before = list(cuts)
    if linear and linear[-1] in before:
        before = before[: before.index(linear[-1])]
    if not before:
        raise BadInput(f"no place before the last linear layer is a cut; allowed: {', '.join(cuts)}")
    return before[-1]


Keep = Callable[[str, Tensor], None]


def walk(half: nn.Module, x: Tensor, names: Iterable[Iterable[str]], keep: Keep) -> Tensor:
    """The half's output for `x`; `keep` is told each place and what is there. `names`: of a row of layers,
    the places after each of them (a traced half has them in its graph)."""
    if isinstance(half, fx.GraphModule):
        out: Tensor = _Walk(half, keep).run(x)
        return out
    for layer, places in zip(layers_of(half), names, strict=True):
        x = layer(x)
        for place in places:
            keep(place, x)
    return x


class _Walk(fx.Interpreter):
    """Computes a graph node by node."""

    def __init__(self, half: fx.GraphModule, keep: Keep) -> None:
        super().__init__(half)
        self.keep = keep

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        for place in n.meta.get(PLACES, ()):
            self.keep(place, found)
        return found
