"""A method with add-ons: `fedavg+dbe` is Composed(FedAvg(), (PRBM(), MR()))."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from feddbe.local import Local
from feddbe.methods.addons import AddOn
from feddbe.methods.base import Method, Upload
from feddbe.state import State, without
from feddbe.task import Context

__all__ = ["Composed"]


@dataclass(frozen=True)
class Composed(Method):
    """The method sees the model's parameters only: no proximal term, control variate or upload of its ever
    touches an add-on's part. Add-ons act in the fits on the method's `addon_tracks`."""

    name: ClassVar[str] = "composed"

    inner: Method
    addons: tuple[AddOn, ...]

    def __post_init__(self) -> None:
        inner = self.inner
        shown = {
            "private": inner.private + tuple(p for a in self.addons for p in a.private),
            "constant": inner.constant + tuple(c for a in self.addons for c in a.constant),
            "family": inner.family,
            "same_for_all": inner.same_for_all,
            "deployed_track": inner.deployed_track,
        }
        for name, value in shown.items():
            object.__setattr__(self, name, value)

    @property
    def prepares(self) -> bool:
        return self.inner.prepares or any(a.prepares for a in self.addons)

    def server_init(self, ctx: Context) -> State:
        return self.inner.server_init(ctx)

    def client_init(self, ctx: Context) -> State:
        private = self.inner.client_init(ctx)
        for addon in self.addons:
            private |= addon.client_init(ctx)
        return private

    def prepare(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        up, private = self.inner.prepare(ctx, local, received, private)
        for addon in self.addons:
            up = up | addon.prepare(ctx, local, received)
        return up, private

    def prepared(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        server = self.inner.prepared(ctx, server, uploads)
        for addon in self.addons:
            server = addon.prepared(ctx, server, uploads)
        return server

    def down(self, ctx: Context, server: State, client: int) -> State:
        return self.inner.down(ctx, self._theirs(server), client)

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        self._attach(local, received, private)
        up, new = self.inner.train(ctx, local, self._theirs(received), self._theirs(private))
        return up, new | {name: extra.value for name, extra in local.extras.items()}

    def combine(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        mine = {name: t for name, t in server.items() if name not in self._theirs(server)}
        return self.inner.combine(ctx, self._theirs(server), uploads) | mine

    def deployed(self, ctx: Context, local: Local, received: State, private: State) -> State:
        self._attach(local, received, private)
        return self.inner.deployed(ctx, local, self._theirs(received), self._theirs(private))

    def logits(self, local: Local, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.inner.logits(local, state, x)

    def _attach(self, local: Local, received: State, private: State) -> None:
        for addon in self.addons:
            addon.attach(local, self.inner.addon_tracks, received, private)

    def _theirs(self, state: State) -> State:
        """The entries that belong to the inner method."""
        return without(state, [n for a in self.addons for n in (*a.private, *a.constant)])
