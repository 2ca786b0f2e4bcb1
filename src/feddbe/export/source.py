"""A module as a plain PyTorch file: its layers as they print themselves, its passes as torch.fx traced them.

That is possible for models whose layers are torch's own and print as they are made (convolutions, linear
layers, pooling, norms, embeddings, recurrent layers). For all others the exported program stands alone.
"""

from __future__ import annotations

import re

from torch import fx, nn

from feddbe.errors import short
from feddbe.export.client_model import Deployed

__all__ = ["source_of"]

_PRINTED = (
    nn.Conv1d, nn.Conv2d, nn.Linear, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AdaptiveAvgPool2d, nn.ReLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Flatten, nn.Dropout, nn.BatchNorm1d,
    nn.BatchNorm2d, nn.LayerNorm, nn.LogSoftmax, nn.Embedding, nn.EmbeddingBag, nn.GRU, nn.LSTM, nn.Identity,
)  # fmt: skip
_HEAD = '''"""{title}

Made by feddbe; it needs torch and safetensors only:

    from model import load
    logits = load()(inputs)  # inputs as rows.py makes them
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
'''
_PUT = """

def put(root, path, layer):
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root._modules[parent]
    root.add_module(name, layer)
"""
_MODEL = '''

class Model(nn.Module):
    """{words}"""

    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), Head()
        self.own = {own}
        self.prbm = {prbm}

    def forward(self, x):
        z = self.body(x)
        if self.prbm is not None:
            z = z + self.prbm
        logits = self.head(z)
        return logits if self.own is None else logits + self.own(z)


def load(file=Path(__file__).with_name("model.safetensors")):
    model = Model()
    model.load_state_dict(load_file(file))
    return model.eval()
'''


def source_of(module: Deployed, title: str) -> str | None:
    """The file's text; None if a layer is not torch's own or does not print as it is made."""
    halves = [_class("Body", module.body), _class("Head", module.head)]
    if None in halves:
        return None
    prbm = module.prbm
    empty = f"nn.Parameter(torch.zeros({tuple(prbm.shape)}))" if prbm is not None else "None"
    words = "Body and head" + (", between them the client's own translation p_i" if prbm is not None else "")
    words += ", and a head of the client's own beside it." if module.own is not None else "."
    model = _MODEL.format(words=words, own="Head()" if module.own is not None else "None", prbm=empty)
    text = "".join(map(str, halves)) + model
    head = _HEAD.format(title=short(title).replace('"', "'").replace("\\", "/"))
    return head + (_PUT if "put(self" in text else "") + text


def _class(name: str, half: nn.Module) -> str | None:
    """One half as a class; a row of layers is an nn.Sequential."""
    if isinstance(half, fx.GraphModule):
        return _traced(name, half)
    row = [*half] if type(half) is nn.Sequential else [half]
    if not all(type(layer) in _PRINTED for layer in row):
        return None
    if type(half) is not nn.Sequential:
        kind, _, given = repr(half).partition("(")
        return f"\n\nclass {name}(nn.{kind}):\n    def __init__(self):\n        super().__init__({given}\n"
    layers = "".join(f"            nn.{layer!r},\n" for layer in row)
    head = f"\n\nclass {name}(nn.Sequential):\n    def __init__(self):\n        super().__init__(\n"
    return f"{head}{layers}        )\n"


def _traced(name: str, half: fx.GraphModule) -> str | None:
    """The graph's own code; layers under the names that it calls them by."""
    written = half.graph.python_code("self")
    body = re.sub(r";  \w+( = \w+)* = None", "", written.src)  # what was used up
    body = re.sub(r"def forward\((.*?)\)( -> .*?)?:\n", _signature, body, count=1)
    body = re.sub(r"\n\s*\n", "\n", body.strip("\n"))
    if any(re.search(rf"\b{name}\b", body) for name in written.globals if name != "torch"):
        return None
    lines = [f"\n\nclass {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    for node in half.graph.nodes:
        if node.op == "call_module":
            layer = half.get_submodule(str(node.target))
            if type(layer) not in _PRINTED:
                return None
            lines.append(f'        put(self, "{node.target}", nn.{layer!r})')
        elif node.op == "get_attr":
            value = getattr(half, str(node.target), None)
            if not isinstance(value, nn.Parameter):
                return None
            lines.append(f"        self.{node.target} = nn.Parameter(torch.zeros({tuple(value.shape)}))")
    code = "\n".join(f"    {line}" for line in body.splitlines())
    return "\n".join(dict.fromkeys(lines)) + "\n\n" + code + "\n"  # a layer may be called twice


def _signature(found: re.Match[str]) -> str:
    """Names of parameters without their types."""
    names = [part.partition(":")[0].strip() for part in found.group(1).split(",")]
    return f"def forward({', '.join(names)}):\n"
