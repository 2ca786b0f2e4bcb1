"""Default settings by model, data set, variant and method.

They are resolved before a run and stored with it. Options of the user come first, then the defaults of the
method, the variant, the data set and the model. A mapping holds the options of an add-on, data set or model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

GENERAL: dict[str, Any] = {
    "partition": "dirichlet:0.1",
    "clients": 20,
    "rounds": 100,
    "short_batch": "keep",
}

PER_MODEL: dict[str, dict[str, Any]] = {
    "cnn": {"lr": 0.005, "mr": {"kappa": 50.0}},
    "cnn_small": {"lr": 0.1, "mr": {"kappa": 1.0}},
    "fasttext": {"lr": 0.5, "mr": {"kappa": 0.1}},
    "har_cnn": {"lr": 0.1, "mr": {"kappa": 1.0}},
    "mlp": {"lr": 0.1, "mr": {"kappa": 1.0}},
    "resnet18": {"lr": 0.1, "mr": {"kappa": 1.0, "mu": 0.1}},
    "own": {"lr": 0.01, "mr": {"kappa": 1.0}},
}
"""Published are kappa and mu of cnn, resnet18 and fasttext, and the learning rate of cnn. `own` is a
user-defined model. The other values were chosen on validation data (docs/results.md)."""

PER_METHOD: dict[str, dict[str, float]] = {"scaffold": {"cnn_small": 0.05}}
"""Method -> model -> learning rate, if the model's default is too large for the method (docs/results.md)."""

PER_DATA: dict[str, dict[str, Any]] = {
    "digits": {"rounds": 40},
    "har": {"partition": "natural"},
    "ag_news": {"partition": "dirichlet:1"},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"mr": {"init_mean": "exact"}},
    "official": {
        "short_batch": "refuse",
        "har": {"layout": "scrambled"},
        "fasttext": {"rep": "logsoftmax"},
        "mr": {"init_mean": "momentum", "init_epochs": "epochs"},
        "fedgen": {"lite": True, "noise": 512, "hidden": 512, "steps": 1000, "gen_batch": 10,
                   "gen_lr": 0.005},
        "fedrep": {"head_epochs": 1},
        "pfedme": {"evaluate": "w"},
    },
}  # fmt: skip
"""Values of each `--variant`.

- `default`: recommended.
- `paper`: the paper's text; otherwise the default.
- `official`: the published code. Its setup has as many epochs as a round, and it fails on a client with less
  than one batch. Its deviations in other methods are included if they are an option here.
"""

PER_VARIANT: dict[str, dict[str, dict[str, Any]]] = {"official": {"har_cnn": {"cut": "conv2"}}}
"""Variant -> model -> options: the head of HAR-CNN has all three linear layers."""


def part_defaults(name: str) -> set[str]:
    """Return the options of a part (`mr`) whose defaults depend on the model or the variant."""
    layers = (*PER_MODEL.values(), *VARIANTS.values())
    return {option for layer in layers for option in layer.get(name, {})}


class Setting(NamedTuple):
    """A value and its origin."""

    value: Any
    origin: str


class DefaultLayers:
    """The defaults that apply to one experiment: of its options, and of its parts (`mr`, `har`)."""

    def __init__(self, variant: str, data: str, model: str = "", method: str = "") -> None:
        method_lr = PER_METHOD.get(method, {}).get(model)
        layers: list[tuple[str, dict[str, Any]]] = [
            ("general default", GENERAL),
            (f"model {model}", PER_MODEL.get(model, {})),
            (f"data set {data}", PER_DATA.get(data, {})),
            (f"variant {variant}", VARIANTS[variant] | PER_VARIANT.get(variant, {}).get(model, {})),
            (f"method {method}", {} if method_lr is None else {"lr": method_lr}),
        ]
        self.options: dict[str, Setting] = {}
        self.parts: dict[str, dict[str, Setting]] = {}
        for origin, layer in layers:
            for key, value in layer.items():
                if isinstance(value, dict):
                    settings = {option: Setting(v, origin) for option, v in value.items()}
                    self.parts.setdefault(key, {}).update(settings)
                else:
                    self.options[key] = Setting(value, origin)

    def __getitem__(self, option: str) -> Any:
        """Return the default of an option, or None."""
        return self.options[option].value if option in self.options else None

    def part_settings(self) -> dict[str, dict[str, Any]]:
        """Return the values of each part, without their origins."""
        return {
            part: {key: setting.value for key, setting in settings.items()}
            for part, settings in self.parts.items()
        }
