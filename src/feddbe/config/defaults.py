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
    "batch_order": "shuffled",
    "short_batch": "keep",
    "last_test_batch": "keep",
}

PER_MODEL: dict[str, dict[str, Any]] = {
    "cnn": {"lr": 0.1, "mr": {"kappa": 1.0}},
    "cnn_small": {"lr": 0.1, "mr": {"kappa": 1.0}},
    "fasttext": {"lr": 0.5, "mr": {"kappa": 0.1}},
    "har_cnn": {"lr": 0.1, "mr": {"kappa": 1.0}},
    "mlp": {"lr": 0.1, "mr": {"kappa": 1.0}},
    "resnet18": {"lr": 0.1, "mr": {"kappa": 1.0, "mu": 0.1}},
    "own": {"lr": 0.01, "mr": {"kappa": 1.0}},
}
"""Values that were chosen on validation data, with the commands in docs/results.md.

ResNet-18 has its published values, because a search takes days here. `own` is a user-defined model.
"""

PER_METHOD: dict[str, dict[str, dict[str, Any]]] = {
    "scaffold": {"cnn": {"lr": 0.02}, "cnn_small": {"lr": 0.05}},
    "perfedavg": {"cnn": {"lr": 0.05, "perfedavg": {"alpha": 0.02}}},
    "pfedme": {
        "cnn": {"pfedme": {"lr_p": 0.01}},
        "cnn_small": {"pfedme": {"lr_p": 0.05, "eta": 0.05}},
        "har_cnn": {"pfedme": {"lr_p": 0.05, "eta": 0.05}},
    },
    "apple": {"cnn": {"lr": 0.005}},
}
"""Method -> model -> values, if those of the model are unsuitable for the method (docs/results.md)."""

PER_DATA: dict[str, dict[str, Any]] = {
    "digits": {"rounds": 40},
    "har": {"partition": "natural"},
    "ag_news": {"partition": "dirichlet:1"},
}

_OFFICIAL: dict[str, Any] = {
    "short_batch": "refuse",
    "har": {"layout": "scrambled"},
    "fasttext": {"rep": "logsoftmax"},
    "mr": {"init_mean": "momentum", "init_epochs": "epochs"},
    "fedgen": {"lite": True, "noise": 512, "hidden": 512, "steps": 1000, "gen_batch": 10, "gen_lr": 0.005},
    "fedrep": {"head_epochs": 1},
    "pfedme": {"evaluate": "w"},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"mr": {"init_mean": "exact"}},
    "official": _OFFICIAL,
    "early-2023": _OFFICIAL | {"batch_order": "fixed", "last_test_batch": "drop"},
}
"""Values of each `--variant`.

- `default`: recommended; learning rates and kappa were chosen on validation data.
- `paper`: the paper's text, with the published values of `PUBLISHED`.
- `official`: the authors' code of October 2023. Its setup has as many epochs as a round, and it fails on a
  client with less than one batch. Its deviations in other methods are included if they are an option here.
- `early-2023`: the authors' setting of early 2023, from which most numbers of the paper come: as `official`,
  but batches are not shuffled, and the incomplete last batch of test data is not evaluated. PFLlib's README
  and the repositories of FedALA, FedCP and GPFL document both.
"""

PUBLISHED: dict[str, dict[str, Any]] = {
    "cnn": {"lr": 0.005, "mr": {"kappa": 50.0}, "perfedavg": {"alpha": 0.005}, "pfedme": {"eta": 0.005}},
    "fasttext": {"lr": 0.1, "mr": {"kappa": 0.1}, "perfedavg": {"alpha": 0.1}, "pfedme": {"eta": 0.1}},
    "har_cnn": {"lr": 0.01, "mr": {"kappa": 1.0}, "perfedavg": {"alpha": 0.01}, "pfedme": {"eta": 0.01}},
    "resnet18": {
        "lr": 0.1, "mr": {"kappa": 1.0, "mu": 0.1}, "perfedavg": {"alpha": 0.1}, "pfedme": {"eta": 0.1},
    },
}  # fmt: skip
"""Published values by model, for every variant except `default`.

Learning rates: section 4.1 of the poster of GPFL (ICCV 2023, GPFLPoster.pdf in TsingZ0/GPFL). The DBE paper
names none, but its cells are those of the GPFL and FedALA papers wherever they overlap. FLAYER's scripts and
issue 127 of PFLlib agree. PFLlib uses the same rate for alpha of Per-FedAvg and eta of pFedMe. kappa and mu
are the paper's, except for HAR-CNN, for which none are published.
"""

_OFFICIAL_CUTS = {"har_cnn": {"cut": "conv2"}}
PER_VARIANT = {"official": _OFFICIAL_CUTS, "early-2023": _OFFICIAL_CUTS}
"""Variant -> model -> options: the head of HAR-CNN has all three linear layers."""


def part_defaults(name: str) -> set[str]:
    """Return the options of a part (`mr`) whose defaults depend on the model, the method or the variant."""
    per_method = [layer for layers in PER_METHOD.values() for layer in layers.values()]
    layers = (*PER_MODEL.values(), *VARIANTS.values(), *PUBLISHED.values(), *per_method)
    return {option for layer in layers for option in layer.get(name, {})}


class Setting(NamedTuple):
    """A value and its origin."""

    value: Any
    origin: str


class ResolvedDefaults:
    """The defaults that apply to one experiment: of its options, and of its parts (`mr`, `har`)."""

    def __init__(self, variant: str, data: str, model: str = "", method: str = "") -> None:
        layers: list[tuple[str, dict[str, Any]]] = [
            ("general default", GENERAL),
            (f"model {model}", PER_MODEL.get(model, {})),
            (f"data set {data}", PER_DATA.get(data, {})),
        ]
        is_published = variant != "default" and model in PUBLISHED
        if is_published:
            layers.append((f"published for {model}", PUBLISHED[model]))
        else:
            layers.append((f"method {method}", PER_METHOD.get(method, {}).get(model, {})))
        variant_options = VARIANTS[variant] | PER_VARIANT.get(variant, {}).get(model, {})
        layers.append((f"variant {variant}", variant_options))
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
