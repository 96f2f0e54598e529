"""What processes may do instead of measuring samples; without torch, so that they start at once."""

import os
import signal
import time
from multiprocessing.connection import Connection


def echo(parent: Connection, *_: object) -> None:
    while True:
        sample = parent.recv()
        time.sleep(0.001)
        parent.send({"sample": sample})


def interrupted(parent: Connection, *_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    echo(parent)


def dying(parent: Connection, *_: object) -> None:
    parent.send({"sample": parent.recv()})
    os.kill(os.getpid(), signal.SIGKILL)
