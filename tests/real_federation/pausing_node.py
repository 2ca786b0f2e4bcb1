"""A node that pauses in one round: python -m tests.real_federation.pausing_node WHERE ROUND FILE COMMAND...

WHERE is `before` or `after` the node saves its private state, or `lock`: it holds Python's lock for a minute.
The node creates FILE when it pauses, and continues when FILE is deleted.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from feddbe.__main__ import main
from feddbe.federation.private_store import PrivateStore
from feddbe.state import Receipt, State

LOCK_SECONDS = 60


def pause(where: str, mark: Path) -> None:
    """Create the file, and wait until it is deleted; a node that was restarted does not pause again."""
    mark.touch()
    if where == "lock":
        ctypes.PyDLL(None).sleep(LOCK_SECONDS)
        return
    while mark.exists():
        time.sleep(0.02)


def add_pause(where: str, pause_round: int, mark: Path) -> None:
    """Let the private store pause when it saves the state of a round."""
    write = PrivateStore.write

    def write_with_pause(
        self: PrivateStore, run: str, base: Receipt | None, keep: Iterable[int], round_: int, state: State
    ) -> Receipt:
        if round_ == pause_round and where != "after":
            pause(where, mark)
        receipt = write(self, run, base, keep, round_, state)
        if round_ == pause_round and where == "after":
            pause(where, mark)
        return receipt

    PrivateStore.write = write_with_pause  # type: ignore[method-assign]


if __name__ == "__main__":
    add_pause(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    sys.argv[1:4] = []
    sys.exit(main())
