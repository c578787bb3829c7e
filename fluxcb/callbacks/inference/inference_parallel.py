"""`DataParallelInferenceRunner`, which divides the batches of an `InferenceRunner` among several devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._errors import DataError
from fluxcb.callbacks.arguments import require
from fluxcb.callbacks.inference.inference import Evaluate, InferenceRunner
from fluxcb.callbacks.inference.inferencer import Inferencer
from fluxcb.callbacks.metrics.recorder import leading_axis

__all__ = ["DataParallelInferenceRunner"]


class DataParallelInferenceRunner(InferenceRunner):
    """Compute statistics on other data like `InferenceRunner`, with each batch divided among several devices.

    Training stays on its own devices: for each round, the parameters are copied to each device. If the last batch
    cannot be divided equally, it is computed on the first device. Nothing is padded, so the statistics are exact. The
    inferencers get the batches in the order of the data.

    Args:
        data: See `InferenceRunner`.
        inferencers: See `InferenceRunner`.
        devices: The devices; by default, all devices of this process.
        name: See `InferenceRunner`.
        phase: See `InferenceRunner`.
        average: See `InferenceRunner`.

    Access:
        See `InferenceRunner`.

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        One compiled call per batch, a copy of the parameters per device and round, and two compiled programs.

    Raises:
        DeclarationError: See `InferenceRunner`. Also if `devices` is empty or contains a device twice.
        DataError: See `InferenceRunner`. Also if a batch other than the last cannot be divided equally.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from fluxcb.callbacks import DataParallelInferenceRunner, ScalarStats
        >>> from fluxcb.testing import testlearner
        >>> xs = np.float32([[0], [1], [2]])
        >>> batches = [(xs[:2], xs[:2]), (xs[2:], xs[2:])]
        >>> runner = DataParallelInferenceRunner(batches, ScalarStats("loss"), devices=jax.devices()[:1])
        >>> learner = testlearner(runner)
        >>> history = learner.fit(1)
        >>> list(learner.cbstate["inference"]["inference"])
        ['loss']

    Source:
        tensorpack, `DataParallelInferenceRunner`, where inferencers get batches out of order.
    """

    def __init__(
        self,
        data: Any,
        inferencers: Inferencer | Iterable[Inferencer],
        devices: Sequence[Any] | None = None,
        *,
        name: str = "inference",
        phase: Phase | None = None,
        average: str | None = None,
    ) -> None:
        super().__init__(data, inferencers, name=name, phase=phase, average=average)
        if devices is not None and not isinstance(devices, Sequence):
            devices = (devices,)
        self.devices = tuple(devices) if devices is not None else None
        fits, what = self.devices is None or _are_devices(self.devices), "`devices` of `DataParallelInferenceRunner`"
        require(fits, self.devices, what, "different devices", "jax.devices()[:4]")

    def evaluate(self, learner: LearnerView) -> Evaluate:
        """Return a function that computes the step values of a batch."""
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        devices = self.devices if self.devices is not None else tuple(jax.local_devices())
        params, model_state = self.parameters(learner), learner.model_state
        mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
        replicated, divided = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))

        def evaluation_on(placement: Any) -> Evaluate:
            placed_params, placed_state = jax.device_put((params, model_state), placement)
            return learner.evaluation(self.phase, placed_params, placed_state, self.names())

        on_all, on_first = evaluation_on(replicated), evaluation_on(devices[0])
        uneven = 0  # samples of the batch that could not be divided equally

        def evaluate(batch: Any) -> Mapping[str, Any]:
            nonlocal uneven
            if uneven:  # there is a batch after the uneven one
                raise self._not_the_last(uneven, len(devices))
            samples = leading_axis(batch)
            if samples % len(devices):
                uneven = samples
                return on_first(jax.device_put(batch, devices[0]))
            shardings = jax.tree.map(lambda leaf: divided if np.ndim(leaf) else replicated, batch)
            return on_all(jax.device_put(batch, shardings))

        return evaluate

    def _not_the_last(self, samples: int, devices: int) -> DataError:
        return DataError(
            f"A batch of the data of {self!r} has {samples} samples, which cannot be divided equally among {devices} "
            "devices, and it is not the last batch.",
            why="only the last batch is computed on a single device, because the other devices are idle meanwhile",
            fix=[f"make the batch size a multiple of {devices}", "use `InferenceRunner`"],
        )


def _are_devices(devices: tuple[Any, ...]) -> bool:
    """Return whether all elements are devices, and all are different."""
    import jax

    fits = bool(devices) and all(isinstance(device, jax.Device) for device in devices)
    return fits and len(set(devices)) == len(devices)
