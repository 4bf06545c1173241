"""A limit of time for a call of a library that has none of its own."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Answer = TypeVar("Answer")


def in_time(call: Callable[[], Answer], seconds: float, otherwise: str) -> Answer:
    """What a call returns or raises. After so many seconds it is left to its thread, and TimeoutError says `otherwise`.

    The time-out of a socket limits one wait for a byte. It does not limit how long a name is looked up, at how many
    addresses a connection is tried, nor redirects, headers and lengths of chunks whose bytes arrive one by one.
    """
    answer = Future[Answer]()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=work, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        if answer.done():  # the call's own, or it came just in time
            return answer.result()
        raise TimeoutError(f"{otherwise} in {seconds:.0f} seconds") from error
