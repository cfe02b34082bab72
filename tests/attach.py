"""The command that pytest-xdist starts as a worker: asks for a forked worker, and ends when that one ends.

It imports nothing slow. The forked worker gets this process's standard input and output, which lead to the controller.
"""

import os
import select
import signal
import socket
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller and the tests
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{sys.argv[1]}")
        socket.send_fds(connection, [b"?"], [0, 1])
        worker = os.pidfd_open(int(connection.recv(32)))
    os.close(0)
    os.close(1)
    select.select([worker], [], [])


if __name__ == "__main__":
    main()
