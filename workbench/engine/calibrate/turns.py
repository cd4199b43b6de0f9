"""Turns of worlds of ranks that measure one after the other, on one machine."""

from __future__ import annotations

import multiprocessing


class Turns:
    """Lets one world work while the others wait, round by round.

    All worlds are prepared once and measured many times: the machine's speed moves within minutes,
    and rounds that are spread over all of them see its mean. The first rank of each world calls
    this; made before ranks are forked.

    Args:
        worlds: Their number.
        seconds: Longest wait for the others, which a rank without them does not outlive.
    """

    def __init__(self, worlds: int, seconds: float) -> None:
        self._seconds = seconds
        context = multiprocessing.get_context("fork")
        self._all_ready = context.Barrier(worlds)
        self._turns = [context.Semaphore(int(place == 0)) for place in range(worlds)]
        self._over = context.Event()

    def ready(self) -> None:
        """Wait until every world is prepared; `BrokenBarrierError` where one is not in time."""
        self._all_ready.wait(self._seconds)

    def take(self, place: int, over: bool = False) -> bool:
        """Wait for the turn of world `place`; whether it is to measure another round.

        The first world says when the time is `over`, so that all have equally many rounds.

        Raises:
            TimeoutError: The others did not pass it on in time.
        """
        if not self._turns[place].acquire(timeout=self._seconds):
            raise TimeoutError(f"no turn for {self._seconds:.0f} s: another world hangs or ended")
        if place == 0 and over:
            self._over.set()
        return not self._over.is_set()

    def pass_on(self, place: int) -> None:
        """End the turn of world `place`; the next one's begins."""
        self._turns[(place + 1) % len(self._turns)].release()
