"""The interface of methods and add-ons.

A method is a frozen dataclass. Its fields are its hyperparameters, its class attributes declare the
state that it keeps, sends and receives, and its functions are pure functions of named tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from feddbe.config.parameters import Parameters, parameter
from feddbe.models.split_model import SplitModel
from feddbe.state import State, weighted_mean
from feddbe.training.task import Context, Task
from feddbe.training.trainer import ClientTrainer

Names = tuple[str, ...]
"""Names in a state: a name, a prefix that ends with a slash, or one of the three constants below."""
MODEL = "<model>"
"""Placeholder for all names of the model's parameters."""
BODY = "<f>"
"""Placeholder for the names before the cut."""
HEAD = "<h>"
"""Placeholder for the names after the cut."""

PERSONAL = "personal/"
"""Prefix of a client's personal parameters."""

Finetuning = Literal["", "each", "last"]
"""Evaluations before which clients fine-tune: none, each, or only the one after the last round."""


class Upload(NamedTuple):
    """One client's upload, and the number of training samples behind it."""

    client: int
    samples: int
    state: State


def undeclared_names(state: Iterable[str], allowed: Names, model: SplitModel) -> list[str]:
    """Return the names that no pattern of `allowed` covers."""
    groups: dict[str, Iterable[str]] = {MODEL: model.parameters, BODY: model.body, HEAD: model.head}
    exact = {name for pattern in allowed for name in groups.get(pattern, (pattern,))}
    prefixes = tuple(pattern for pattern in allowed if pattern.endswith("/"))
    return [name for name in state if name not in exact and not name.startswith(prefixes)]


def weights_parameter(default: str = "samples") -> Any:
    """Return the hyperparameter that selects the weights of an average."""
    return parameter(default, "weights of the average", choices=("samples", "uniform"))


def average(uploads: Sequence[Upload], weights: str) -> State:
    """Return sum_i w_i theta_i / sum_i w_i.

    Args:
        uploads: Uploads in client order; the sum runs in this order.
        weights: `samples` for w_i = n_i, or `uniform` for w_i = 1.
    """
    states = [upload.state for upload in uploads]
    if weights == "samples":
        return weighted_mean(states, [upload.samples for upload in uploads])
    return weighted_mean(states, [1] * len(uploads))


@dataclass(frozen=True)
class Method(Parameters):
    """Base class of federated methods.

    All functions are pure: the same arguments give the same result on any engine, and nothing global changes.
    Arguments that recur:

        ctx: The task (model, data, training settings) and the round.
        trainer: Trains, evaluates and samples on one client's data.
        received: The server's message of this round, including the constants.
        private: The client's state of its last round, or `client_init` at first contact.
        server: The server's state.
    """

    family: ClassVar[str] = "traditional"
    keeps: ClassVar[Names] = ()
    """State that a client keeps from round to round; not necessarily secret, since part of it may be sent."""
    secret: ClassVar[Names] = ()
    """Kept state that must never leave the client, under any name."""
    sends: ClassVar[Names] = (MODEL,)
    """State that a client may send, before round 1 or in a round."""
    receives: ClassVar[Names] = (MODEL,)
    """State that a client may receive in a round, including constants; before round 1 it receives theta^0."""
    constant: ClassVar[Names] = ()
    """Server entries that are fixed before round 1: sent to a client once, in its first round."""
    has_uniform_broadcast: ClassVar[bool] = True
    """True if every client receives the same message."""
    discouraged_addons: ClassVar[Mapping[str, str]] = {}
    """Add-ons that are rejected unless `--force` is given, each with the reason."""
    unsupported_addons: ClassVar[Mapping[str, str]] = {}
    """Add-ons that would have no effect, each with the reason."""
    fixed_options: ClassVar[Mapping[str, str]] = {}
    """Options of local training that cannot be changed, each with the reason."""
    inference_track: ClassVar[str] = "shared"
    """Track whose BatchNorm statistics are used for predictions."""
    keeps_uploads: ClassVar[bool] = False
    """True if the store keeps each client's last upload, to be sent to others (`ctx.uploads`)."""
    needs_all_clients: ClassVar[str] = ""
    """Reason why all clients must take part in every round; empty if they need not."""
    uses_sample_counts: ClassVar[bool] = False
    """True if a client uses the numbers of training samples of other clients (`task.samples`)."""
    adapts: ClassVar[Finetuning] = ""
    """Evaluations before which fine-tuning is part of the method."""

    @property
    def addon_tracks(self) -> tuple[str, ...]:
        """Tracks of `ClientTrainer.fit` on which add-ons act."""
        return ("shared",)

    @property
    def base_name(self) -> str:
        """Name without add-ons."""
        return self.name

    def ignored_options(self, task: Task) -> Mapping[str, str]:
        """Return the options of a run that have no effect on this method, each with the reason."""
        return {}

    @property
    def has_setup(self) -> bool:
        """True if there is an exchange before round 1."""
        return False

    @property
    def setup_clients(self) -> int | None:
        """Number of clients, drawn at random, that take part in the exchange before round 1; None: all."""
        return None

    def server_init(self, ctx: Context) -> State:
        """Return the initial server state: theta^0."""
        return dict(ctx.task.model.parameters)

    def client_init(self, ctx: Context) -> State:
        """Return a client's private state at first contact; later states keep its names, shapes and types."""
        return {}

    def client_setup(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        """Return a client's upload and private state of the exchange before round 1."""
        return {}, private

    def server_setup(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        """Return the server state after the exchange before round 1."""
        return server

    def broadcast(self, ctx: Context, server: State, client: int) -> State:
        """Return this round's message to a client; constants are sent separately."""
        return server

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        """Run a client's local training of one round and return its upload and private state."""
        raise NotImplementedError

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        """Return the server state after the round; uploads are in client order."""
        raise NotImplementedError

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return the received model.

        These are the parameters with which the client predicts before it trains on the received message. The
        first line of an override's docstring is what `feddbe methods` shows as the evaluated model.
        """
        model = ctx.task.model.parameters
        return {name: value for name, value in received.items() if name in model}

    def finetune(self, ctx: Context, trainer: ClientTrainer, received: State, private: State) -> State:
        """Return the parameters with which the client predicts after fine-tuning on its own data.

        Fine-tuning is plain SGD on the cross-entropy, without terms of the method or of add-ons.
        """
        start = self.inference_params(ctx, trainer, received, private)
        return trainer.fit(start, track=self.inference_track, plain=True).params

    def adapt(self, ctx: Context, trainer: ClientTrainer, received: State, private: State) -> State:
        """Return the parameters with which a new client predicts after training on its own data.

        It trains from the received state by the method's local training, as in the paper.
        """
        upload, new_private = self.train(ctx, trainer, received, private)
        return self.inference_params(ctx, trainer, received | upload, new_private)

    def init_new_client(self, ctx: Context, received: State) -> State:
        """Return the private state of a client that joins after training.

        Personal parameters that the server has start there, all others at theta^0.
        """
        private = dict(self.client_init(ctx))
        for name in private:
            if name.startswith(PERSONAL) and name.removeprefix(PERSONAL) in received:
                private[name] = received[name.removeprefix(PERSONAL)]
        return private

    def notes(self, task: Task) -> list[str]:
        """Return notes that a reader of a run's results must know."""
        return []

    @property
    def has_custom_logits(self) -> bool:
        """True if predictions need more than the logits of a model."""
        return type(self).logits is not Method.logits

    def logits(self, trainer: ClientTrainer, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits of `x` at these inference parameters."""
        return trainer.forward(state, x).logits


@dataclass(frozen=True)
class AddOn(Parameters):
    """Base class of add-ons: parts that act on a method without the method's knowledge."""

    keeps: ClassVar[Names] = ()
    secret: ClassVar[Names] = ()
    sends: ClassVar[Names] = ()
    """State sent in addition to the method's message; model parameters only if the method sends them."""
    receives: ClassVar[Names] = ()
    constant: ClassVar[Names] = ()
    has_setup: ClassVar[bool] = False
    adapts: ClassVar[Finetuning] = ""

    @property
    def setup_clients(self) -> int | None:
        """Number of clients that take part in the exchange before round 1; None: all."""
        return None

    def unsupported_reason(self, method: Method) -> str:
        """Return why one of this add-on's options does not work with the method, or an empty text."""
        return ""

    def client_init(self, ctx: Context) -> State:
        """Return the add-on's private state at first contact."""
        return {}

    def attach(self, trainer: ClientTrainer, tracks: Sequence[str], received: State, private: State) -> None:
        """Attach this add-on's loss terms to these tracks, and its extra parameters to the model."""

    def client_setup(self, ctx: Context, trainer: ClientTrainer, received: State) -> State:
        """Return the add-on's part of a client's message before round 1."""
        return {}

    def server_setup(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        """Return the server state with the add-on's part after the exchange before round 1."""
        return server

    def notes(self, task: Task) -> list[str]:
        """Return notes that a reader of a run's results must know."""
        return []


_HAS_PERSONALIZATION = "it has its own personalization, which conflicts with a second one (--force allows it)"
DISCOURAGED_FOR_PERSONALIZED = {"prbm": _HAS_PERSONALIZATION, "ft": _HAS_PERSONALIZATION}
"""Discouraged add-ons of personalized methods."""

UNSUPPORTED_WITH_TWO_MODELS = {"prbm": "it trains two models, and PRBM is defined for one"}
"""Unsupported add-ons of methods with a global and a personal model."""

UNSUPPORTED_WITH_FINETUNING = {"ft": "it adapts its model to each client already"}
"""Unsupported add-ons of methods that fine-tune."""

_NOT_SGD = "its local scheme is not plain SGD, so it would need another definition"
UNSUPPORTED_WITHOUT_PLAIN_SGD = {"mr": _NOT_SGD, "prbm": _NOT_SGD}
"""Unsupported add-ons of methods whose local steps are not plain SGD."""

FIXED_WITHOUT_OPTIMIZER = dict.fromkeys(
    ("optimizer", "momentum", "weight_decay", "clip_norm"), "its local steps are not those of an optimizer"
)
"""Fixed options of methods whose local steps are not plain SGD."""
