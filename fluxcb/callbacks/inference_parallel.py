"""`DataParallelInferenceRunner`: the same statistics, computed on several devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fluxcb._declare.phases import Phase
from fluxcb._errors import DataError, DeclarationError
from fluxcb.callbacks.inference import Evaluate, InferenceRunner
from fluxcb.callbacks.inferencer import Inferencer
from fluxcb.callbacks.recorder import leading_axis

__all__ = ["DataParallelInferenceRunner"]


class DataParallelInferenceRunner(InferenceRunner):
    """Compute statistics of other data like `InferenceRunner`, each batch divided over several devices.

    The training stays where it is: a copy of the parameters goes to each device for the round. A last batch that does
    not divide is computed on the first device, so that nothing is padded and statistics are exact. The inferencers get
    the batches in the order of the data.

    Args:
        data: See `InferenceRunner`.
        inferencers: See `InferenceRunner`.
        devices: The devices; all of this process by default.
        name: See `InferenceRunner`.
        phase: See `InferenceRunner`.
        average: See `InferenceRunner`.

    Access:
        As `InferenceRunner`.

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        One compiled call per batch; a copy of the parameters per device and round; two programs.

    Raises:
        DeclarationError: As `InferenceRunner`, and if there are no devices, or one twice.
        DataError: As `InferenceRunner`, and if a batch that is not the last does not divide over the devices.

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
        given = devices if devices is None or isinstance(devices, Sequence) else (devices,)
        self.devices = tuple(given) if given is not None else None
        if self.devices is not None and not _are_devices(self.devices):
            raise DeclarationError(
                f"`devices` of `DataParallelInferenceRunner` must be different devices, not {self.devices!r}.",
                fix="leave it out for all of this process, or give `jax.devices()[:4]`",
            )

    def evaluate(self, learner: Any) -> Evaluate:
        """Return what computes the step values of a batch."""
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        devices = self.devices if self.devices is not None else tuple(jax.local_devices())
        params, model_state = self.parameters(learner), learner.model_state
        mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
        whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))

        def on(place: Any) -> Evaluate:
            held = jax.device_put((params, model_state), place)
            return learner.evaluation(self.phase, *held, self.names())

        together, alone = on(whole), on(devices[0])
        ragged = 0  # samples of the batch that did not divide

        def evaluate(batch: Any) -> Mapping[str, Any]:
            nonlocal ragged
            if ragged:
                raise self._not_the_last(ragged, len(devices))
            samples = leading_axis(batch)
            if samples % len(devices):
                ragged = samples
                return alone(jax.device_put(batch, devices[0]))
            places = jax.tree.map(lambda leaf: split if np.ndim(leaf) else whole, batch)
            return together(jax.device_put(batch, places))

        return evaluate

    def _not_the_last(self, samples: int, devices: int) -> DataError:
        return DataError(
            f"A batch of the data of {self!r} has {samples} samples, which do not divide over {devices} devices, "
            "and is not the last.",
            why="only one batch is computed on a single device, or the other devices would have nothing to do",
            fix=[f"make the batch size a multiple of {devices}", "use `InferenceRunner`"],
        )


def _are_devices(given: tuple[Any, ...]) -> bool:
    import jax

    return bool(given) and all(isinstance(device, jax.Device) for device in given) and len(set(given)) == len(given)
