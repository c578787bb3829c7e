"""Freed memory is returned to the operating system, and the garbage collection is paused."""

import ctypes
import gc
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Learner
from fluxcb._compile import program
from fluxcb._memory import garbage_collection_paused

BLOCKS, BLOCK = 1000, 100_000  # bytes; glibc takes blocks of this size from its heap

HALF_FREED = f"""
import ctypes
from fluxcb._memory import release_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))

release_freed_memory()
blocks = [libc.malloc({BLOCK}) for _ in range({BLOCKS})]
for block in blocks:
    ctypes.memset(block, 1, {BLOCK})
for block in blocks[::2]:  # the blocks between them keep the heap from shrinking
    libc.free(block)
before = resident()
release_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps freed memory"
)
def test_freed_blocks_leave_the_process():
    ended = subprocess.run([sys.executable, "-c", HALF_FREED], capture_output=True, text=True, check=True)
    # A freed block returns all of its pages, except for one at each end.
    assert int(ended.stdout) >= BLOCKS // 2 * (BLOCK - 2 * 4096)


@pytest.mark.parametrize(("limit", "releases"), [(0, 1), (1 << 40, 0)])
def test_memory_is_released_after_compiling_a_large_step(monkeypatch, limit, releases):
    released = []
    monkeypatch.setattr(program, "_LARGE", limit)
    monkeypatch.setattr(program, "release_freed_memory", lambda: released.append(1))
    learner = Learner.from_loss(
        {"w": jnp.ones(3)},
        lambda params, xs: jnp.sum((params["w"] * xs - limit % 7) ** 2),
        optax.sgd(1.25e-3 + limit % 5 * 1e-4),
        data=[np.ones(3, np.float32)],
        default_callbacks=False,
        steps_per_call=1,
    )
    learner.fit(2)
    assert len(released) == releases


@pytest.mark.parametrize("enabled", [True, False])
def test_pauses_of_the_garbage_collection_may_overlap_and_leave_it_as_it_was(enabled):
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        first, second = garbage_collection_paused(), garbage_collection_paused()
        with first:
            second.__enter__()
            assert not gc.isenabled()
        assert not gc.isenabled()  # the second pause goes on, for example in another thread
        second.__exit__(None, None, None)
        assert gc.isenabled() == enabled
        with pytest.raises(ValueError, match="inside"), garbage_collection_paused():
            raise ValueError("inside")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_garbage_collection_is_paused_while_a_step_is_traced():
    seen = []

    def loss(outputs, ys):
        seen.append(gc.isenabled())
        return ((outputs - ys) ** 2).mean()

    model = (lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: params["w"] * xs)
    batch = np.ones(4, np.float32), np.ones(4, np.float32)
    Learner(model, loss, optax.sgd(0.1), data=[batch], default_callbacks=False).fit(1)
    assert seen
    assert not any(seen)
    assert gc.isenabled()
