"""How the processes that save or restore a checkpoint together agree.

They exchange texts through the key-value store of JAX's coordination service, and call no collective. Collectives must
have the same order in all processes, and a background thread that saves would run them between those of the training.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

from fluxcb._errors import CheckpointCorruptError, CheckpointError, FluxcbError

__all__ = ["Agreement"]

T = TypeVar("T")

_POLL = 500  # ms between two checks whether an agreement was abandoned
_numbers = itertools.count()


class Agreement:
    """A series of exchanges between all processes.

    All processes create their agreements in the same order, on the main thread. Another thread may then use one.
    """

    def __init__(self) -> None:
        self._folder = f"fluxcb/checkpoints/{next(_numbers)}"
        self._round = 0

    def abandon(self) -> None:
        """Make exchanges raise an error in all processes, because a process does not take part any longer."""
        store = _store()
        if store is not None:
            store.key_value_set(f"{self._folder}/abandoned/by", "this process", allow_overwrite=True)

    def exchange(self, text: str, answer: Callable[[list[str]], Any]) -> Any:
        """Return what process 0 answers to the texts of all processes.

        Args:
            text: The text of this process.
            answer: A function of the texts, in the order of the processes, that returns JSON. Only process 0 calls it.

        Raises:
            CheckpointError: The agreement was abandoned.
        """
        import jax

        count, process, store = jax.process_count(), jax.process_index(), _store()
        if count == 1:
            return answer([text])
        self._round += 1
        folder, before = (f"{self._folder}/{number}" for number in (self._round, self._round - 1))
        if process != 0:
            store.key_value_set(f"{folder}/{process}", json.dumps(text))
            return self._value_of(f"{folder}/answer")
        texts = [text]
        for other in range(1, count):
            key = f"{folder}/{other}"
            texts.append(self._value_of(key))
            store.key_value_delete(key)
        if self._round > 1:  # all processes have read the answer of the last round
            store.key_value_delete(f"{before}/answer")
        answered = answer(texts)
        store.key_value_set(f"{folder}/answer", json.dumps(answered))
        return answered

    def _value_of(self, key: str) -> Any:
        """Return the value of a key, as soon as a process has set it."""
        store = _store()
        while True:
            try:
                return json.loads(store.blocking_key_value_get(key, _POLL))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if store.key_value_dir_get(f"{self._folder}/abandoned/"):
                raise CheckpointError("Another process has ended, and the processes no longer agree.")

    def on_all(self, function: Callable[[], T]) -> T:
        """Call a function in each process, and return its result if it succeeds in all of them.

        Raises:
            Exception: The error of the function in this process.
            CheckpointCorruptError: The function raised an error in another process.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            result = function()
        except Exception as error:
            failure = error
        process, text = self.exchange(_text(failure) if failure is not None else "", _first_failure)
        if failure is not None:
            raise failure
        if text:
            raise CheckpointCorruptError(f"Process {process} reports: {text}")
        return result

    def of_first(self, function: Callable[[], Any]) -> Any:
        """Return the result (JSON) of a function that only process 0 calls.

        Raises:
            Exception: The error of the function.
        """
        failure: Exception | None = None

        def answer(texts: list[str]) -> tuple[str, Any]:
            nonlocal failure
            try:
                return "", function()
            except Exception as error:
                failure = error
                return _text(error), None

        text, result = self.exchange("", answer)
        if failure is not None:
            raise failure
        if text:
            raise CheckpointError(f"Process 0 reports: {text}")
        return result


def _store() -> Any:
    """Return the client of JAX's coordination service, or None in a single process."""
    from jax._src import distributed  # there is no public access to it (jax 0.10)

    return distributed.global_state.client


def _text(error: Exception) -> str:
    return error.what if isinstance(error, FluxcbError) else f"{type(error).__name__}: {error}"


def _first_failure(texts: list[str]) -> tuple[int, str]:
    return next(((process, text) for process, text in enumerate(texts) if text), (0, ""))
