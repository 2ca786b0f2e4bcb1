"""Method classes by name: feddbe's own, each imported when it is first asked for; those of packages; those in
users' files (`my_method.py:MyProx`); and what a program puts here itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from importlib import import_module
from importlib.metadata import EntryPoint

from feddbe.errors import BadInput
from feddbe.methods import own
from feddbe.methods.base import Method
from feddbe.options.from_file import names_file

__all__ = ["Registry"]


class Registry(MutableMapping[str, type[Method]]):
    """A client has no use for methods other than its own: nothing is imported that is not asked for."""

    def __init__(self, places: Mapping[str, str], addons: Mapping[str, object]) -> None:
        self._places = dict(places)
        self._found: dict[str, type[Method]] = {}
        self._taken = {*places, *addons}

    def __getitem__(self, name: str) -> type[Method]:
        if names_file(name):
            return own.in_file(name, self._taken)
        if name not in self._found and name in self._places:
            module, _, cls = self._places[name].partition(".")
            self._found[name] = getattr(import_module(f"feddbe.methods.{module}"), cls)
        if name not in self._found and name in self._installed():
            self._found[name] = own.from_package(name, self._taken)
        return self._found[name]

    def __setitem__(self, name: str, cls: type[Method]) -> None:
        own.checked(cls, getattr(cls, "__name__", str(cls)), self._taken)
        if cls.name != name:
            raise BadInput(f"{cls.__name__} has name = '{cls.name}', not '{name}'")
        self._found[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __contains__(self, name: object) -> bool:
        known = name in self._places or name in self._found
        return known or (isinstance(name, str) and (names_file(name) or name in self._installed()))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._places, *self._installed(), *self._found]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def ours(self) -> Collection[str]:
        """feddbe's own."""
        return self._places.keys()

    def given(self, cls: type[Method]) -> bool:
        """Whether it was put here by this program: no other process can find it by its name."""
        return self._found.get(cls.name) is cls and cls.name not in {*self._places, *self._installed()}

    def _installed(self) -> Mapping[str, EntryPoint]:
        for name in own.packages().keys() & self._taken:
            raise BadInput(f"{own.owner(name)} has the name of one of feddbe's own; uninstall the package")
        return own.packages()
