"""SplitModel: any `nn.Module` cut at a named place into features f and classifier h.

    z_g = f(x)        z = z_g + prbm        logits = h(z)

A place is a cut if exactly one tensor crosses it. A cut renames nothing: parameters keep the module's own
names, the cut only divides them into those of f and those of h.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from feddbe.errors import BadInput, unknown
from feddbe.models.split_points import (
    Halves,
    before_last_linear,
    find_cuts,
    find_layers,
    linear_of,
    places_of,
    walk,
)
from feddbe.seeds import torch_seeded
from feddbe.state import State, moved

Owner = MutableMapping[str, Any]
Slots = dict[str, list[tuple[Owner, str]]]


class Forward(NamedTuple):
    """One pass: the representation before and after the translation, and the logits."""

    z_g: Tensor
    z: Tensor
    logits: Tensor


class SplitModel:
    """Pure functions of named tensors, computed by one module into which those tensors are bound.

    `module`: an `nn.Sequential` (every place in it is a cut, nested ones by dotted name), a pair
    (features, classifier), or any other module that torch.fx can trace. `sample`: an input with a batch axis.
    `cut`: default is before the last linear layer; `aliases` are other names of cuts. `onednn=False` also
    drops the channels-last layout: for tiny images both cost more than they give, for some networks the
    layout alone (`channels_last=False`).
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
        self.module, self.onednn, self.channels_last = module, onednn, onednn and channels_last
        self.remake: Callable[[], nn.Module | Halves] | None = None
        """Makes such a module again, where its classes cannot be imported (a user's file)."""
        self._sample, self.input_shape = sample, tuple(sample.shape[1:])
        # One pair of halves per mode, because tracing writes the training flag of F.dropout into the graph.
        modes = {training: find_cuts(module.train(training)) for training in (True, False)}
        self.cuts = tuple(modes[False])
        if not self.cuts:
            raise BadInput("the model has no cut: nowhere between its layers does exactly one tensor cross")
        self.aliases = dict(aliases or {})
        names = {name: name for name in self.cuts} | self.aliases
        if cut is not None and cut not in names:
            raise unknown("cut", cut, names)
        self.cut = names[cut] if cut is not None else before_last_linear(module, self.cuts)
        self._places = places_of(module, self.cut)
        self._halves = {training: cuts[self.cut]() for training, cuts in modes.items()}
        roots = [module, *self._halves[True], *self._halves[False]]
        self._slots = _slots(module.named_parameters(), [m._parameters for r in roots for m in r.modules()])
        self._slots |= _slots(module.named_buffers(), [m._buffers for r in roots for m in r.modules()])
        full = {id(p): name for name, p in module.named_parameters()}
        self.layers = tuple(find_layers(half, full) for half in self._halves[True])
        """Those of f, those of h."""
        self._bound: Mapping[str, Tensor] | None = None
        self._training = False

        self.frozen = frozenset(name for name, p in module.named_parameters() if not p.requires_grad)
        self.parameters: State = {name: p.detach().clone() for name, p in module.named_parameters()}
        kept = module.state_dict().keys()
        self.buffers: State = {name: b.detach().clone() for name, b in module.named_buffers() if name in kept}
        f, h = self._halves[False]
        self.feature_shape, self.classes, self._in_place = self._try(f, h)
        in_head = {id(p) for p in h.parameters()}
        own = linear_of(h) if in_head.isdisjoint(id(p) for p in f.parameters()) else None
        self.linear_head = {name: full[id(p)] for name, p in own.named_parameters()} if own else {}
        """The names of its weight and bias, if h is one linear layer and shares neither with f."""
        self.head = tuple(name for name, p in module.named_parameters() if id(p) in in_head)
        self.body = tuple(name for name in self.parameters if name not in self.head)

    def _try(self, f: nn.Module, h: nn.Module) -> tuple[tuple[int, ...], int, bool]:
        """The shape of z, how many classes there are, and whether h writes into z, from one pass."""
        versions = {name: p._version for name, p in self.module.named_parameters()}
        with torch.no_grad():
            z = f(self._sample)
            before = z._version
            classes = _classes(h(z))
        if changed := [n for n, p in self.module.named_parameters() if p._version != versions[n]]:
            raise BadInput(
                f"the model writes into its own parameter '{changed[0]}' in a forward pass "
                "(max_norm of an embedding?); only training may change parameters"
            )
        return tuple(z.shape[1:]), classes, z._version != before

    def apart(self, state: Mapping[str, Tensor]) -> Halves:
        """f and h at these values, for prediction, as modules that share nothing with this one."""
        module = copy.deepcopy(self.module)
        module.load_state_dict({n: t.detach().clone() for n, t in state.items()}, strict=False)
        return SplitModel(module, self._sample, self.cut, onednn=self.onednn)._halves[False]

    def on(self, device: torch.device) -> SplitModel:
        """The same model there."""
        module = copy.deepcopy(self.module).to(device)
        how = self._sample.to(device), self.cut, self.onednn, self.channels_last, self.aliases
        with device:  # a traced graph makes its constants where it was traced
            there = _rebuilt(module, *how, moved(self.parameters, device), moved(self.buffers, device))
        there.remake = self.remake
        return there

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what it was made from: the graphs of a traced module cannot be pickled."""
        how = self._sample, self.cut, self.onednn, self.channels_last, self.aliases
        return _rebuilt, (self.remake or self.module, *how, self.parameters, self.buffers)

    @contextmanager
    def bind(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] | None = None,
        *,
        training: bool = False,
    ) -> Iterator[None]:
        """Compute with these tensors until the end of the block; BatchNorm updates `buffers` in place.

        Names that are not the module's are left to those who know them.
        """
        before = self._bound, self._training
        tensors = {name: t for name, t in {**params, **(buffers or {})}.items() if name in self._slots}
        replaced = {name: self._slots[name][0][0][self._slots[name][0][1]] for name in tensors}
        self._put(tensors)
        self._bound, self._training = params, training
        self._set_mode(training)
        flags = torch.backends.mkldnn.set_flags(self.onednn)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.backends.mkldnn.set_flags(flags[0])  # type: ignore[no-untyped-call]
            self._put(replaced)
            self._bound, self._training = before
            self._set_mode(self._training)

    def _set_mode(self, training: bool) -> None:
        if self.module.training != training:  # a small model is through with its pass before it is told this
            self.module.train(training)

    def forward(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        prbm: Tensor | None = None,
        *,
        training: bool = False,
    ) -> Forward:
        """The pass at `params`: those bound, or others, which are bound for this call, in evaluation mode
        unless `training`. Others may have buffers among them; BatchNorm's are the bound model's otherwise."""
        if params is not self._bound:
            with self.bind(params, training=training):
                return self.forward(params, x, prbm)
        f, h = self._halves[self._training]
        z_g = f(x)
        z = z_g if prbm is None else z_g + prbm
        return Forward(z_g, z, h(z.clone() if self._in_place else z))

    def check_places(self, names: Iterable[str]) -> None:
        """Whether all of them are places: cuts, their other names, z_g, z, logits."""
        allowed = {*self.cuts, *self.aliases, *Forward._fields}
        for name in names:
            if name not in allowed:
                raise unknown("place", name, allowed)

    def at(
        self, params: Mapping[str, Tensor], x: Tensor, names: Iterable[str], prbm: Tensor | None = None
    ) -> State:
        """What is at these places in one pass in evaluation mode, a copy of each. Before the cut that is of f
        alone, after it with the translation; the cut's own name is z_g."""
        if params is not self._bound:
            with self.bind(params):
                return self.at(params, x, names, prbm)
        wanted = {name: self.aliases.get(name, name) for name in names}
        found: State = {}

        def keep(place: str, value: Tensor) -> None:
            if place in wanted.values():
                found[place] = value.clone()

        (f, h), (before, after) = self._halves[self._training], self._places
        z_g = walk(f, x, before, keep)
        keep("z_g", z_g)
        z = z_g if prbm is None else z_g + prbm
        keep("z", z)
        keep("logits", walk(h, z, after, keep))
        return {name: found[place] for name, place in wanted.items()}

    def features(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """f alone."""
        if params is not self._bound:
            with self.bind(params):
                return self.features(params, x)
        z_g: Tensor = self._halves[self._training][0](x)
        return z_g

    def classify(self, params: Mapping[str, Tensor], z: Tensor) -> Tensor:
        """h alone, on representations that did not come from f."""
        if params is not self._bound:
            with self.bind(params):
                return self.classify(params, z)
        logits: Tensor = self._halves[self._training][1](z)
        return logits

    def fresh(self, seed: int) -> State:
        """Parameters of another initialisation: each layer's own (`reset_parameters`), children first. A
        parameter that no layer resets stays at theta^0."""
        module = copy.deepcopy(self.module).cpu()  # the same one for every device
        with torch.device("cpu"), torch_seeded(seed):
            module.apply(lambda layer: getattr(layer, "reset_parameters", lambda: None)())
        device = self._sample.device
        return {name: p.detach().to(device) for name, p in module.named_parameters()}

    def layout(self, tensor: Tensor, *, copy: bool = True) -> Tensor:
        """A copy in the memory layout in which this model is fast; `copy=False`: or the tensor itself."""
        # `contiguous` would leave one-channel tensors as they are, and all that follows in the slow layout
        channels_last = self.channels_last and tensor.dim() == 4
        if not copy and not channels_last:
            return tensor.contiguous()
        format = torch.channels_last if channels_last else torch.contiguous_format
        return torch.empty_like(tensor, memory_format=format).copy_(tensor)

    def _put(self, tensors: Mapping[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            for owner, key in self._slots[name]:
                owner[key] = tensor


def _rebuilt(
    source: nn.Module | Callable[[], nn.Module | Halves],
    sample: Tensor,
    cut: str,
    onednn: bool,
    channels_last: bool,
    aliases: Mapping[str, str],
    parameters: State,
    buffers: State,
) -> SplitModel:
    """The same model in another process."""
    module: nn.Module | Halves
    if isinstance(source, nn.Module):
        module = source
    else:
        with torch_seeded(0):  # whatever it draws is overwritten
            module = source()
    model = SplitModel(module, sample, cut, onednn=onednn, channels_last=channels_last, aliases=aliases)
    model.remake = None if isinstance(source, nn.Module) else source
    model.module.load_state_dict(parameters | buffers, strict=False)
    model.parameters, model.buffers = parameters, buffers
    return model


def _classes(logits: object) -> int:
    """How many there are in the output for one sample."""
    if not isinstance(logits, Tensor):
        raise BadInput(
            f"the model gives a {type(logits).__name__}; expected logits of shape (batch, classes)"
        )
    if logits.dim() != 2:
        shape = tuple(logits.shape)
        raise BadInput(f"the model gives an output of shape {shape}; expected (batch, classes)")
    return logits.shape[1]


def _slots(named: Iterator[tuple[str, Tensor]], owners: list[Owner]) -> Slots:
    """For each named tensor, every dictionary entry that holds it: tied layers and traced copies included."""
    names = {id(tensor): name for name, tensor in named}
    slots: Slots = {name: [] for name in names.values()}
    for owner in owners:
        for key, tensor in owner.items():
            place = (owner, key)
            if id(tensor) in names and not any(o is owner and k == key for o, k in slots[names[id(tensor)]]):
                slots[names[id(tensor)]].append(place)
    return slots


Shape = tuple[int, ...]
KNOWN = ("shape", "classes", "words")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def asked(
    function: Callable[..., Any], shape: Shape, classes: int, words: int
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, by place and by name, that it is called with."""
    given: dict[str, Any] = {"shape": shape, "classes": classes, "words": words}
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # some builtins have none
        return [shape, classes], {}
    required = [
        p for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip
    strange = [p for p in required if p.name not in KNOWN]
    if strange and all(p.kind in _POSITIONAL for p in strange) and required[:2] == parameters[:2]:
        # named as the user likes: (shape, classes) by place
        places, rest = parameters[:2], [p for p in required[2:] if p.name not in KNOWN]
        if len(required) >= 2 and not rest and not any(p.name == "words" for p in places):
            more = {p.name: given[p.name] for p in parameters[2:] if p.name in KNOWN}
            return [shape, classes], more
    if strange:
        name = getattr(function, "__name__", "build")
        raise BadInput(
            f"{name}{inspect.signature(function)}: it is called with shape, classes and words, those that it "
            f"asks for by name; '{strange[0].name}' is none of them: give it a default"
        )
    first = list(takewhile(lambda p: p.name in KNOWN and p.kind in _POSITIONAL, parameters))
    rest = [p for p in parameters[len(first) :] if p.name in KNOWN]
    return [given[p.name] for p in first], {p.name: given[p.name] for p in rest}


def call(function: Callable[..., Any], shape: Shape, classes: int, words: int) -> Any:
    """What it makes for inputs of this shape."""
    places, names = asked(function, shape, classes, words)
    return function(*places, **names)
