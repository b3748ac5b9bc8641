"""Connections to boards."""

import datetime
import socket
import threading

import pytest

from penstock.group.board import connect_board


def test_process_that_ends_during_a_connection_is_lost() -> None:
    """Torch alone tries for a minute: longer than anybody waits for the reason why nothing answers."""
    listener = socket.create_server(("127.0.0.1", 0))

    def end() -> None:
        listener.accept()[0].close()
        listener.close()

    ending = threading.Thread(target=end)
    ending.start()
    port = listener.getsockname()[1]
    with pytest.raises(RuntimeError, match="refused"):
        connect_board("127.0.0.1", port, datetime.timedelta(seconds=2))
    # torch's own try goes on
    trying = [thread for thread in threading.enumerate() if thread.name == "penstock-connect"]
    assert trying
    for thread in [ending, *trying]:
        thread.join(20.0)
