"""Over a slow link a forward pass waits for less than the transfer takes: a layer computes while the next is loaded."""

from __future__ import annotations

from servers import SLOW, A, B, Servers, prompt

ROUNDS = 3


def test_less_is_waited_for_than_is_transferred(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve(**SLOW)
    a, b = servers.start(A, B)
    figures = []
    for _ in range(ROUNDS):
        stored = prompt(1008)
        servers.store(a, stored)
        b.flush()
        # What is behind the hit is what a layer computes with.
        assert b.generate([*stored, *prompt(1500)]).host == len(stored)
        status = servers.until(lambda status: own(status)["loading_steps"] == len(figures) + 1)
        session = own(status)
        figures.append((session["load_seconds"], session["exposed_load_seconds"]))
    transfer, exposed = figures[-1]
    print(f"\n{ROUNDS} loads of 1,008 tokens: {transfer:.2f} s of transfer, of which the engine waited {exposed:.2f} s")
    assert 0 < exposed < transfer


def own(status: dict) -> dict:  # type: ignore[type-arg]
    """The session of the server that loads."""
    (session,) = [each for each in status["sessions"] if each["memory"] and each["name"] == B.name]
    return session
