"""What clients are sent in a round, made from the server's state."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from feddbe.engines import Messages
from feddbe.engines.client import BUFFER
from feddbe.methods import Method
from feddbe.state import State, matches, without
from feddbe.training.task import Context

__all__ = ["apart", "constants", "sent", "steady"]


def sent(method: Method, ctx: Context, server: State, *, prepare: bool = False) -> Messages:
    """What clients are sent in this round, or for the preparation from theta^0."""
    own, buffers = apart(server)
    fixed = constants(method, own) | buffers
    if prepare:
        return Messages(ctx.task.model.parameters | buffers)
    if method.same_for_all:
        return Messages(method.down(ctx, own, -1) | fixed)
    return Messages(fixed, lambda client: method.down(ctx, own, client))


def apart(state: State) -> tuple[State, State]:
    """What a method sees, and the averaged BatchNorm statistics, which it does not."""
    return without(state, [BUFFER]), {name: t for name, t in state.items() if name.startswith(BUFFER)}


def constants(method: Method, server: State) -> State:
    """What is sent to a client once."""
    return {name: t for name, t in server.items() if matches(name, method.constant)}


@contextmanager
def steady() -> Iterator[None]:
    """One thread: sums depend on their number in the last bits, and results must not depend on the machine.
    And no search for garbage among what is there already, most of it torch's: that is a third of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
