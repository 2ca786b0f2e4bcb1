"""A method with add-ons: `fedavg+dbe` is Composed(FedAvg(), (PRBM(), MR()))."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from feddbe.errors import BadInput
from feddbe.methods.base import AddOn, Method, Upload, refused
from feddbe.state import State, matches, without
from feddbe.training.task import Context, Task
from feddbe.training.trainer import Local


@dataclass(frozen=True)
class Composed(Method):
    """The method sees the model's parameters only: no proximal term, control variate or upload of its ever
    touches an add-on's part. Add-ons act in the fits on the method's `addon_tracks`."""

    name: ClassVar[str] = "composed"

    inner: Method
    addons: tuple[AddOn, ...]

    def __post_init__(self) -> None:
        inner = self.inner
        shown: dict[str, Any] = {
            "family": inner.family,
            "same_for_all": inner.same_for_all,
            "deployed_track": inner.deployed_track,
            "keeps_uploads": inner.keeps_uploads,
            "needs_all": inner.needs_all,
            "keeps_to": inner.keeps_to,
            "adapts": inner.adapts or next((a.adapts for a in self.addons if a.adapts), ""),
        }
        for names in ("keeps", "secret", "sends", "receives", "constant"):
            shown[names] = sum((getattr(part, names) for part in (inner, *self.addons)), ())
        for name, value in shown.items():
            object.__setattr__(self, name, value)
        for addon in self.addons:
            if reason := addon.refuse(inner):
                raise BadInput(f"{inner.name} does not take this +{addon.name}: {reason}")

    @property
    def base(self) -> str:
        return self.inner.base

    def unused(self, task: Task) -> Mapping[str, str]:
        unused = self.inner.unused(task)
        return {} if any(a.adapts for a in self.addons) else unused  # fine-tuning is training

    @property
    def prepares(self) -> bool:
        return self.inner.prepares or any(a.prepares for a in self.addons)

    @property
    def preparing(self) -> int | None:
        needed = [a.preparing for a in self.addons if a.prepares]
        return needed[0] if needed and not self.inner.prepares else self.inner.preparing

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
        # an add-on may send a model, of which the method may keep a part to itself
        own = set(refused(ctx.task.model.parameters, self.inner.sends, ctx.task.model))
        return {name: t for name, t in up.items() if name not in own}, private

    def prepared(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        server = self.inner.prepared(ctx, server, uploads)
        for addon in self.addons:
            server = addon.prepared(ctx, server, uploads)
        return server

    def down(self, ctx: Context, server: State, client: int) -> State:
        received = [name for a in self.addons for name in a.receives if name not in a.constant]
        mine = {name: t for name, t in server.items() if matches(name, received)}
        return self.inner.down(ctx, self._theirs(server), client) | mine

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        self._attach(local, self.inner.addon_tracks, received, private)
        up, new = self.inner.train(ctx, local, self._theirs(received), self._theirs(private))
        return up, new | {name: extra.value for name, extra in local.extras.items()}

    def combine(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        theirs = self._theirs(server)
        of_addons = {name: t for name, t in server.items() if name not in theirs}
        uploads = [u._replace(state=self._theirs(u.state)) for u in uploads]
        return self.inner.combine(ctx, theirs, uploads) | of_addons

    def deployed(self, ctx: Context, local: Local, received: State, private: State) -> State:
        self._attach(local, self.inner.addon_tracks, received, private)
        return self.inner.deployed(ctx, local, self._theirs(received), self._theirs(private))

    def tune(self, ctx: Context, local: Local, received: State, private: State) -> State:
        self._attach(local, self.inner.addon_tracks, received, private)
        return self.inner.tune(ctx, local, self._theirs(received), self._theirs(private))

    def adapt(self, ctx: Context, local: Local, received: State, private: State) -> State:
        self._attach(local, self.inner.addon_tracks, received, private)
        return self.inner.adapt(ctx, local, self._theirs(received), self._theirs(private))

    def newcomer(self, ctx: Context, received: State) -> State:
        private = self.inner.newcomer(ctx, received)
        for addon in self.addons:
            private |= addon.client_init(ctx)
        return private

    def remarks(self, task: Task) -> list[str]:
        return [*self.inner.remarks(task), *(text for a in self.addons for text in a.remarks(task))]

    @property
    def own_logits(self) -> bool:
        return self.inner.own_logits

    def logits(self, local: Local, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.inner.logits(local, state, x)

    def _attach(self, local: Local, tracks: Sequence[str], received: State, private: State) -> None:
        for addon in self.addons:
            addon.attach(local, tracks, received, private)

    def _theirs(self, state: State) -> State:
        """The entries that belong to the inner method."""
        return without(state, self._of_addons)

    @cached_property
    def _of_addons(self) -> tuple[str, ...]:
        return tuple(n for a in self.addons for n in (*a.keeps, *a.sends, *a.receives))
