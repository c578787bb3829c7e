"""Whether a function of outputs and targets compares each output with every target, because of their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["compares_all_pairs"]


def compares_all_pairs(function: Callable[..., Any], outputs: Any, ys: Any) -> bool:
    """Return whether an operation of a function combines outputs and targets of shapes `[N]` and `[N, 1]`.

    NumPy broadcasts these shapes to `[N, N]`. The function is traced, with an option that makes JAX refuse an operation
    that must add an axis to an operand. JAX refuses neither `outputs[:, 0] - ys` nor a deliberate
    `outputs - ys[None, :]`.

    Args:
        function: `function(outputs, ys)`.
        outputs: An array, or its shape and dtype, with an axis for the examples.
        ys: The same for the targets.
    """
    import jax

    # JAX caches the traces of its own functions by shape, whatever the option, so the batches have unusual sizes. The
    # sizes differ, which tells outputs from targets: all pairs of the outputs, as in a ranking loss, are intended.
    sizes = [2 * ys.shape[0] + 1, 2 * ys.shape[0] + 3]
    specs = [
        jax.ShapeDtypeStruct((size, *value.shape[1:]), value.dtype)
        for size, value in zip(sizes, (outputs, ys), strict=True)
    ]
    try:
        with jax.numpy_rank_promotion("raise"):
            jax.eval_shape(function, *specs)
    except Exception as error:  # also one of the function, for example if it depends on the batch size
        text = str(error)
        return "rank_promotion" in text and all(f"({size}," in text for size in sizes)
    return False
