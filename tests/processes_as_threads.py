"""Processes of a training as threads, with a dictionary as the key-value store of JAX's coordination service."""

import threading

from fluxcb._run import peers as peers_module
from fluxcb._run.interrupts import Interrupt
from fluxcb._run.peers import Peers


class Store:
    """The key-value store. It does not answer while `frozen` is set."""

    def __init__(self, entries, lock):
        self.entries, self.lock = entries, lock
        self.frozen = threading.Event()
        self.thawed = threading.Event()

    def _answer(self):
        if self.frozen.is_set():
            self.thawed.wait()

    def key_value_set(self, key, value, allow_overwrite):
        self._answer()
        with self.lock:
            assert allow_overwrite
            self.entries[key] = value

    def key_value_dir_get(self, prefix):
        self._answer()
        with self.lock:
            return [(key, value) for key, value in self.entries.items() if key.startswith(prefix)]


class _Exit:
    """Stands in for the end of the process."""

    def __init__(self, *settings):
        del settings

    def without_jax(self, error):
        pass

    def as_usual(self):
        pass


def keep_processes(monkeypatch):
    """Do not end the process of the test if a thread fails that stands for a process."""
    monkeypatch.setattr(peers_module, "ProcessExit", _Exit)
    monkeypatch.setattr(peers_module, "end_process", lambda process, failure: None)


class Process(threading.Thread):
    """A process: a thread that runs a program with its `Peers`."""

    def __init__(self, number, count, entries, lock, program, timeout):
        super().__init__(daemon=True)
        self.store = Store(entries, lock)
        self.peers = Peers(number, count, timeout, self.store, "1")
        self.number, self.program = number, program
        self.pressed, self.agreed = Interrupt(), Interrupt()
        self.error = self.result = None

    def run(self):
        with self.peers.watch(lambda: self.pressed, lambda: self.agreed):
            try:
                self.result = self.program(self)
            except BaseException as error:
                self.error = error
                self.peers.report(error)


def run_processes(program, count=2, timeout=1e6):
    """Run a program in several processes, and return them."""
    entries, lock = {}, threading.Lock()
    processes = [Process(number, count, entries, lock, program, timeout) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return processes
