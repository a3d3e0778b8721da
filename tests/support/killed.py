"""A process killed with SIGKILL at each of its writes in turn: `killed.py rm|retire|gc|cp|repair FOLDER RESULTS [ARGUMENT]`.

FOLDER is copied for each run; the run is a child process that kills itself right before its nth create or delete. Says how
many runs were killed before one came to its end. A lease or sweep at RESULTS belongs to a process that is dead.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from kvcdn.digest import ModelTag
from kvcdn.origin.upkeep.catalog import find_manifest
from kvcdn.origin.upkeep.check import check_origin
from kvcdn.origin.upkeep.collect import collect_garbage
from kvcdn.origin.upkeep.copy import copy_documents
from kvcdn.origin.upkeep.remove import remove_documents, retire_model
from kvcdn.stores.folder import FolderStore
from support.library import Watched

RUNS = 200


def act(action: str, folder: Path, number: int, argument: str) -> None:
    """Runs the action, up to write `number`."""
    writes = itertools.count(1)

    def listen(operation: str, _key: str) -> None:
        if operation in ("create", "delete") and next(writes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    store = Watched(FolderStore(folder), listen)
    match action:
        case "rm":
            remove_documents(store, [find_manifest(store, argument)])
        case "retire":
            retire_model(store, ModelTag(bytes.fromhex(argument)))
        case "gc":
            collect_garbage(store, now=time.time() + 2 * 86400)
        case "repair":
            check_origin(store, repair=True)
        case "cp":
            copy_documents(FolderStore(argument), store)


def main() -> None:
    """Prints how many runs were killed."""
    action, folder, results, argument = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), "".join(sys.argv[4:5])
    for number in range(1, RUNS):
        copy = shutil.copytree(folder, results / f"{number:03}")
        child = os.fork()
        if not child:
            act(action, copy, number, argument)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.stdout.write(f"{number - 1} {os.WEXITSTATUS(status)}\n")
            return
    raise AssertionError(f"no end after {RUNS} runs")


if __name__ == "__main__":
    main()
