"""Method: a frozen dataclass whose fields are its hyper-parameters, and pure functions on named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from feddbe.config.parameters import Parameters, parameter
from feddbe.models.split_model import SplitModel
from feddbe.state import State, weighted_mean
from feddbe.training.task import Context, Task
from feddbe.training.trainer import Local

Names = tuple[str, ...]
"""Names in a state: each itself, or with a slash at its end what begins so, or one of the three below."""
MODEL, BODY, HEAD = "<model>", "<f>", "<h>"
"""Stand for the model's own parameter names: all of them, those before the cut, those after it."""

PERSONAL = "personal/"
"""Prefix of a client's own parameters."""


class Upload(NamedTuple):
    """What came from one client, and how many training samples it stands for."""

    client: int
    samples: int
    state: State


class Facts(NamedTuple):
    """What `feddbe methods` tells of a method. Messages of a round and what a client keeps are in models, f
    and h being its parts, N the clients; `numbers` are single ones."""

    down: str = "1"
    up: str = "1"
    keeps: str = "0"
    evaluated: str = "the global model"


def refused(state: Iterable[str], allowed: Names, model: SplitModel) -> list[str]:
    """The names that are none of those allowed."""
    groups: dict[str, Iterable[str]] = {MODEL: model.parameters, BODY: model.body, HEAD: model.head}
    exact = {name for pattern in allowed for name in groups.get(pattern, (pattern,))}
    prefixes = tuple(pattern for pattern in allowed if pattern.endswith("/"))
    return [name for name in state if name not in exact and not name.startswith(prefixes)]


def averaging(default: str = "samples") -> Any:
    """The option of every method that averages: with which weights."""
    return parameter(default, "weights of the average", choices=("samples", "uniform"))


def average(uploads: Sequence[Upload], weights: str) -> State:
    """sum_i w_i theta_i / sum_i w_i with w_i = n_i (`samples`) or 1 (`uniform`)."""
    return weighted_mean(
        [u.state for u in uploads], [u.samples if weights == "samples" else 1 for u in uploads]
    )


@dataclass(frozen=True)
class Method(Parameters):
    """What a method is. Functions are pure; `received` is the message of this round plus the constants."""

    family: ClassVar[str] = "traditional"
    facts: ClassVar[Facts] = Facts()
    keeps: ClassVar[Names] = ()
    """What stays with a client from round to round. It need not be secret: some of it is what was sent."""
    secret: ClassVar[Names] = ()
    """What of it nobody else may ever see, under any name."""
    sends: ClassVar[Names] = (MODEL,)
    """What a client may send, in the preparation or a round."""
    receives: ClassVar[Names] = (MODEL,)
    """What it may be sent in a round, constants included. In the preparation that is theta^0."""
    constant: ClassVar[Names] = ()
    """Server entries fixed by `prepared`: sent to a client once, at its first round."""
    same_for_all: ClassVar[bool] = True
    """Whether `down` gives every client the same message."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Add-ons that it does not take, each with the reason; `--force` allows them."""
    cannot: ClassVar[Mapping[str, str]] = {}
    """Add-ons that would do nothing on it, each with the reason."""
    keeps_to: ClassVar[Mapping[str, str]] = {}
    """Options of local training that it does not take, each with the reason."""
    deployed_track: ClassVar[str] = "shared"
    """The track whose BatchNorm statistics the deployed model uses."""
    keeps_uploads: ClassVar[bool] = False
    """Whether the store keeps each client's last upload, for `down` to send to others (`ctx.uploads`)."""
    needs_all: ClassVar[str] = ""
    """Why all clients must take part in every round, if they must."""
    adapts: ClassVar[str] = ""
    """Whether `tune` is part of the method: `each` time it is evaluated, or at the `last`."""

    @property
    def addon_tracks(self) -> tuple[str, ...]:
        """The tracks of `Local.fit` on which add-ons act."""
        return ("shared",)

    @property
    def base(self) -> str:
        """Its name without add-ons."""
        return self.name

    def unused(self, task: Task) -> Mapping[str, str]:
        """Options of a run that do nothing for this method, each with the reason."""
        return {}

    @property
    def prepares(self) -> bool:
        """Whether there is an exchange before round 1."""
        return False

    @property
    def preparing(self) -> int | None:
        """How many clients, drawn at random, take part in it; None: all."""
        return None

    def server_init(self, ctx: Context) -> State:
        """The server's state at the start: theta^0."""
        return dict(ctx.task.model.parameters)

    def client_init(self, ctx: Context) -> State:
        """A client's private state at first contact."""
        return {}

    def prepare(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        """A client's part of the exchange before round 1: (message, private state)."""
        return {}, private

    def prepared(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        """The server's part of it."""
        return server

    def down(self, ctx: Context, server: State, client: int) -> State:
        """This round's message to a client (constants travel on their own)."""
        return server

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        """A client's round: (message, private state)."""
        raise NotImplementedError

    def combine(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        """The server's round; uploads come in client order."""
        raise NotImplementedError

    def deployed(self, ctx: Context, local: Local, received: State, private: State) -> State:
        """What the client predicts with after it received this message, before it trains."""
        return received

    def tune(self, ctx: Context, local: Local, received: State, private: State) -> State:
        """What the client predicts with after it tuned what it deploys to its own data: by plain SGD on the
        cross-entropy, without a term of the method or of an add-on."""
        start = self.deployed(ctx, local, received, private)
        return local.fit(start, track=self.deployed_track, plain=True).params

    def adapt(self, ctx: Context, local: Local, received: State, private: State) -> State:
        """What a newcomer predicts with after it trained on its own from what it received: by the method's
        local training, as the paper has it."""
        up, new = self.train(ctx, local, received, private)
        return self.deployed(ctx, local, received | up, new)

    def newcomer(self, ctx: Context, received: State) -> State:
        """The private state of a client that joins when training is over: of its personal parameters those
        that the server has begin there, the others at theta^0."""
        return {
            name: received.get(name.removeprefix(PERSONAL), value) if name.startswith(PERSONAL) else value
            for name, value in self.client_init(ctx).items()
        }

    def remarks(self, task: Task) -> list[str]:
        """What a reader of a run's results must know of it."""
        return []

    @property
    def own_logits(self) -> bool:
        """Whether it predicts with more than the logits of a model."""
        return type(self).logits is not Method.logits

    def logits(self, local: Local, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Predictions of a deployed state."""
        return local.forward(state, x).logits


@dataclass(frozen=True)
class AddOn(Parameters):
    """A part that goes on a method without the method knowing."""

    keeps: ClassVar[Names] = ()
    secret: ClassVar[Names] = ()
    sends: ClassVar[Names] = ()
    """Beside the method's message; of the model's parameters, those go that the method sends."""
    receives: ClassVar[Names] = ()
    constant: ClassVar[Names] = ()
    prepares: ClassVar[bool] = False
    adapts: ClassVar[str] = ""

    @property
    def preparing(self) -> int | None:
        """How many clients prepare for it; None: all."""
        return None

    def refuse(self, method: Method) -> str:
        """Why one of its options cannot be on this method."""
        return ""

    def client_init(self, ctx: Context) -> State:
        return {}

    def attach(self, local: Local, tracks: Sequence[str], received: State, private: State) -> None:
        """Put this add-on's terms on these tracks, and its extra trainables on the model."""

    def prepare(self, ctx: Context, local: Local, received: State) -> State:
        return {}

    def prepared(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return server

    def remarks(self, task: Task) -> list[str]:
        """What a reader of a run's results must know of it."""
        return []


_OWN_WAY = "it personalises in its own way, a second one goes against it (--force allows it)"
NO_PRBM = {"prbm": _OWN_WAY, "ft": _OWN_WAY}
"""What a personalized method refuses."""

TWO_MODELS = {"prbm": "it trains two models, and PRBM is defined for one"}
"""What one with a global and a personal model cannot take."""

TUNES = {"ft": "it adapts its model to each client already"}
"""What one that tunes by itself cannot take."""

_NOT_SGD = "its local scheme is not plain SGD, so it would need another definition"
NO_MR = {"mr": _NOT_SGD, "prbm": _NOT_SGD}
"""What one with steps of its own cannot take."""

OWN_STEPS = dict.fromkeys(
    ("optimiser", "momentum", "weight_decay", "clip_norm"), "it takes steps of its own, not an optimiser's"
)
"""What one with steps of its own keeps to."""

SUM_OF_GRADIENTS = dict.fromkeys(
    ("optimiser", "momentum", "clip_norm"),
    "its control variates are mean gradients, which (x - y) / (T eta) is after plain SGD only",
)
"""What SCAFFOLD keeps to (its option II)."""
