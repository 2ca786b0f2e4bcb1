"""The tests of every method of feddbe, for yours: `feddbe.testing.check(MyProx)`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from feddbe.errors import BadInput, FeddbeError
from feddbe.methods import METHODS, Method, spelled, takes
from feddbe.options.grammar import written
from feddbe.testing import contract
from feddbe.testing.federation import experiment, outcome

__all__ = ["check"]


def check(
    method: type[Method] | Method | str,
    *,
    engines: Sequence[str] = ("pool(workers=2)",),
    addons: Sequence[str] | None = None,
    beside: Mapping[str, Mapping[str, Any]] | None = None,
    values: Mapping[str, Sequence[Any]] | None = None,
    rounds: int = 2,
) -> list[str]:
    """Try what feddbe promises of every method, among a few small clients with digits and a perceptron, and
    return what was tried, in a line for each combination. What does not hold is an `AssertionError` of one
    line.

    `method`: a class, an instance with other options than the defaults, or a name, as in `my.py:MyProx`. It
    is tried alone and with `addons`; by default with each that it takes. `engines`: each must give the bits
    of serial. Of its options another value must change something within so many `rounds`: `beside` has what
    must be set for one to act (option -> options), `values` the other values to try (option -> values).
    """
    made = _instance(method)
    name = spelled(made)
    with tempfile.TemporaryDirectory(prefix="feddbe-check-") as folder:
        tried = []
        for addon in ("", *(takes(type(made)) if addons is None else addons)):
            spec = f"{name}+{addon}" if addon else name
            words = _told(spec, _one(spec, engines, Path(folder) / f"with {addon}"))
            tried.append(f"{spec}: {', '.join(words)}")
        acting = _told(name, _options(made, Path(folder), beside or {}, values or {}, rounds))
        return [*tried, f"{name}: options that act: {', '.join(acting) or 'it has none'}"]


def _told(spec: str, tries: Iterator[str]) -> list[str]:
    """What was tried. A run that ends in an error, as one that diverges does, is one that fails."""
    done = list[str]()
    try:
        for words in tries:
            done.append(words)
    except BadInput:
        raise
    except FeddbeError as error:
        after = f" (after: {', '.join(done)})" if done else ""
        raise AssertionError(f"{spec}: {error}{after}") from error
    return done


def _instance(method: type[Method] | Method | str) -> Method:
    if isinstance(method, str):
        if method not in METHODS:
            raise BadInput(f"'{method}' is not the name of a method; as in fedavg or my_method.py:MyProx")
        return METHODS[method]()
    return method() if isinstance(method, type) and issubclass(method, Method) else method


def _one(spec: str, engines: Sequence[str], folder: Path) -> Iterator[str]:
    """Of a method with or without an add-on, what was tried."""
    for number, engine in enumerate(engines):
        contract.engines_agree(spec, folder / f"engine-{number}", engine)
        yield f"same bits on {engine}"
    contract.continues(spec, folder / "continued")
    yield "when continued after each round"
    if contract.CAN_KILL:
        contract.survives_a_kill(spec, folder / "kill")
        yield "after kill -9"
    contract.keeps_secrets(spec, folder / "secrets")
    yield "no secret sent"
    contract.part_of_the_clients(spec, folder / "part")
    yield "part of the clients"
    for sizes in ((60, 4), (40,)):
        contract.few(spec, folder / f"few-{len(sizes)}", sizes)
    yield "few samples"


def _options(
    method: Method,
    folder: Path,
    beside: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, Sequence[Any]],
    rounds: int,
) -> Iterator[str]:
    """Every option does something."""
    cls = type(method)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for given in sorted({*beside, *values} - fields.keys()):
        raise BadInput(f"{cls.name} has no option '{given}'; it has: {', '.join(fields) or 'none'}")
    for key, field in fields.items():
        base = dataclasses.replace(method, **beside.get(key, {}))
        now = getattr(base, key)

        def taken(value: Any, base: Method = base, key: str = key) -> bool:
            try:
                return bool(dataclasses.replace(base, **{key: value}))
            except BadInput:
                return False

        chosen = values[key] if key in values else contract.others(field, now, taken)
        if not chosen and key not in values:
            raise AssertionError(
                f"{cls.name}: which values {key} takes is not known; say values={{'{key}': [...]}}"
            )
        plain = outcome(experiment(spelled(base), rounds=rounds), folder / key)
        for value in chosen:
            e = experiment(spelled(dataclasses.replace(base, **{key: value})), rounds=rounds)
            if not contract.moved(plain, outcome(e, folder / f"{key}-{value}")):
                raise AssertionError(
                    f"{cls.name}: {key} = {written(value)} changes nothing against {written(now)} in "
                    f"{rounds} rounds; if it acts only beside others, say so: beside={{'{key}': {{...}}}}"
                )
            yield f"{key} ({written(now)}, {written(value)})"
