"""What a worker of the pool does: jobs, until its pipe closes."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection

import torch

from feddbe.engines.base import portable
from feddbe.engines.client import Job, Reply, perform
from feddbe.engines.shared_memory import LARGE, Items, send
from feddbe.errors import FeddbeError
from feddbe.methods.base import Method
from feddbe.state import State, decode, encode
from feddbe.training.task import Task

__all__ = ["HELD", "KEPT", "end_with_parent", "work"]

KEPT, HELD = "<kept>", "<held>"
"""Among the tensors that travel with a client: the bytes of its state; that the worker holds them, too."""
ROOM = 2**28
"""Bytes of states that a worker holds at most: large ones that it made, so that they need not come back."""


def end_with_parent() -> None:
    """One that is stopped does not notice that its pipe closes; Linux can end it all the same."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def work(
    pipe: Connection,
    inherited: list[Connection],
    others: list[int],
    desks: tuple[int, int],
    task: Task,
    method: Method,
) -> None:
    """`others`: descriptors of other workers' desks; `desks`: the one for all workers, and its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may have its own way
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in good order
    end_with_parent()
    for other in inherited:
        other.close()
    for one in others:
        os.close(one)
    torch.set_num_threads(1)
    gc.freeze()  # a search for garbage would write to every object's page, which is ours and the parent's now
    shared, held, (common, own) = State(), dict[int, bytes](), desks
    while True:
        try:
            jobs, parcels = pipe.recv()
            if jobs is None:
                shared = parcels[0].unpack(common)
                continue
            began = time.process_time()
            states = [one.unpack(own) for one in parcels]
            answers, tensors = _answers(task, method, jobs, shared, states, held)
            send(pipe, own, (answers, time.process_time() - began), tensors)
        except (EOFError, OSError):
            return


def _answers(
    task: Task, method: Method, jobs: list[Job], shared: State, states: list[Items], held: dict[int, bytes]
) -> tuple[list[Reply] | Exception, list[Items]]:
    """To all jobs, and what goes beside them; or what went wrong."""
    answers, tensors = list[Reply](), list[Items]()
    for job, each in zip(jobs, states, strict=True):
        try:
            mine = held.pop(job.client, None)
            kept: bytes | None = mine if each.pop(HELD, None) is not None else each.pop(KEPT, None)
            private = None if kept is None else decode(kept)
            reply = perform(task, method, job, shared | each if each else shared, private)
            tensors.append(reply.tensors())
            if reply.private:
                kept = tensors[-1][KEPT] = encode(reply.private)
            if kept and len(kept) >= LARGE and sum(map(len, held.values())) + len(kept) <= ROOM:
                held[job.client] = kept
                tensors[-1][HELD] = b""
            answers.append(reply.with_tensors({})._replace(private=None))
        except FeddbeError as error:
            return error, []
        except Exception as error:
            error.add_note(f"in client {job.client}, round {job.round}:\n{traceback.format_exc()}")
            return portable(error), []
    return answers, tensors
