"""The methods of a Learner that use its model without training: `get_model`, `set_model`, `predict`, `evaluate`."""

from __future__ import annotations

from typing import Any

from fluxcb._calls import entry_point
from fluxcb._compile.arrays import own_copy
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb._run.averages import average_in, params_with, restart_averages, validated_average
from fluxcb._run.data_metrics import Measure, evaluate_metrics, validating_phase
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.prediction import Predictor
from fluxcb._typing import PyTree
from fluxcb.checkpoints.snapshot import VALIDATED

__all__ = ["ModelMethods"]


class ModelMethods:
    """Base class of `Learner`: the model, its predictions, and its metrics on any data.

    Only `set_model` changes the training. The other methods use the parameters that validation measures. If a
    `ParameterEMA` or a `StochasticWeightAveraging` validates with its average, these are the average. Otherwise, they
    are the trained parameters. The argument `average=` selects other parameters.
    """

    _core: LearnerCore
    _predictor: Predictor | None = None
    _measure: Measure | None = None

    @property
    @entry_point
    def model(self) -> Any:
        """The trained model, ready for inference; equivalent to `get_model()`. An assignment calls `set_model`.

        Each access returns a new model, so changing its arrays does not change the Learner. Assign the changed model:
        `model = learner.model; model.kernel[...] = 0; learner.model = model`.
        """
        return self.get_model()

    @model.setter
    def model(self, model: Any) -> None:
        self.set_model(model)

    @entry_point
    def get_model(self, *, average: str | None = VALIDATED) -> Any:
        """Return a new model of the same type as yours with trained parameters, ready for inference.

        A Flax NNX module is in evaluation mode, and an Equinox module is in inference mode: dropout is off, and batch
        normalization uses its running averages. A Linen module is bound to its variables. It does not store a mode, so
        pass the train flag of its call, if it has one. For a pair of functions, the result is a callable `model(xs)`.

        The model that you passed to the Learner is not changed. To continue the training, call `learner.fit` again. To
        continue in your own training loop, call `model.train()` (NNX) or `eqx.nn.inference_mode(model, False)`
        (Equinox) first. If you pass the model to another Learner, that Learner trains it in training mode.

        Args:
            average: Which parameters the model has: "validated" (those that validation measures), None (the trained
                parameters), or the name of an average in `cbstate`, such as "ema" or "swa".

        Returns:
            The model.

        Raises:
            DeclarationError: The Learner has no model, or there is no such average.

        Example:
            >>> from fluxcb.callbacks import ParameterEMA
            >>> from fluxcb.testing import testlearner
            >>> learner = testlearner(ParameterEMA(0.9))
            >>> history = learner.fit(1)
            >>> learner.model(1.0) == learner.get_model(average="ema")(1.0)
            Array(True, dtype=bool)
            >>> learner.model(1.0) == learner.get_model(average=None)(1.0)
            Array(False, dtype=bool)
        """
        adapter = self._adapter("use `learner.params`")
        self._core.refuse_ahead("model")
        state = self._core.state
        # Copies, because training continues to donate the arrays of the carry.
        params = own_copy(params_with(state, self._average(average)))
        return adapter.rebuild(params, own_copy(state.train.carry["model_state"]))

    @entry_point
    def set_model(self, model: Any) -> None:
        """Replace the parameters of the training by those of another model with the same structure.

        Averages of the parameters, such as that of `ParameterEMA`, restart at the new parameters.

        Args:
            model: The model. It can be in any mode, so a model from `learner.model` works.

        Raises:
            DeclarationError: The parameters of the model have another structure, shape or dtype.
        """
        self._core.refuse_while_running("set_model(...)")
        self._core.exchange_model(model)
        restart_averages(self._core.graph, self._core.state)  # they restart at the new parameters
        self._core.state.fit.assign("learner.model")

    @entry_point
    def predict(self, data: Any, *, batch_size: int | None = None, average: str | None = VALIDATED) -> PyTree:
        """Apply the trained model, in evaluation mode, and return its outputs for all examples.

        The type of `data` determines its meaning:

        - An array contains the inputs of all examples, along its first axis.
        - A tuple, a dict or another pytree of arrays is one batch of any size. A pair is `(xs, ys)`, as in training,
          and only `xs` is used; `(xs,)` is the same as `xs`. If the model's input is itself a pytree, data with the
          same structure is all input.
        - Any other iterable (a list, a loader, a dataset, an iterator) yields batches. Each batch is an array or a
          pytree as above. The list `[xs, ys]` is therefore two batches of inputs; a pair is a tuple, `(xs, ys)`.

        Callbacks do not run. Parameters, model state, counters and random keys stay as they are. With a `mesh`, each
        batch is divided over its devices. With several processes, each process passes its own examples and gets their
        outputs.

        Args:
            data: The inputs.
            batch_size: Examples per call of the compiled program, for data that is not an iterable of batches. The
                default is the size of a training batch, or 32 if that is not known. A program is compiled for each
                shape of a batch. The last, smaller batch is filled with preceding examples, so that it does not need
                another program.
            average: Which parameters are used; see `get_model`.

        Returns:
            The outputs in the pytree structure that the model returns, as NumPy arrays with all examples along the
            first axes, in the order of the data.

        Raises:
            DeclarationError: The Learner has no model; the outputs do not have the examples along their first axes;
                `batch_size` is passed with an iterable of batches.
            DataError: The data yields no batches, or a batch is not made of numeric arrays; the data is an
                `ArrayLoader` that shuffles.
            MissingStateError: The Learner has not yet seen the shape of a batch.
            Exception: An error of the model, with a note that names the batch.

        Example:
            >>> import numpy as np
            >>> from fluxcb.testing import testlearner
            >>> learner = testlearner()
            >>> history = learner.fit(30)  # the outputs become 3 x - 1
            >>> xs = np.float32([[0], [1], [2]])
            >>> learner.predict(xs).round(1).tolist()
            [[-1.0], [2.0], [5.0]]
            >>> learner.predict([(xs[:2], xs[:2]), (xs[2:], xs[2:])]).shape
            (3, 1)

        Source:
            Keras, `Model.predict`.
        """
        adapter = self._adapter("apply your own function to `learner.params`")
        self._core.refuse_ahead("predict(...)")
        # Cached, because each `Predictor` compiles its own program. `set_model` replaces the adapter.
        if self._predictor is None or self._predictor.model is not adapter:
            self._predictor = Predictor(adapter, self._core.placement)
        return self._predictor(self._core, data, self._average(average), batch_size)

    @entry_point
    def evaluate(
        self,
        data: Any = None,
        metrics: Any = None,
        *,
        phase: Phase | None = None,
        batch_size: int | None = None,
        average: str | None = VALIDATED,
    ) -> dict[str, Any]:
        """Compute metrics of the trained model on some data.

        For each batch, the step of a phase that does not train, usually `ValidationPhase`, is computed with the traced
        handlers of that phase. Host handlers do not run. Each batch is weighted by its number of examples, or by the
        `weight` of the metric. Parameters, model state, counters, random keys, `cbstate`, the history, and the logs
        stay as they are. With a `mesh`, each batch is divided over its devices. With several processes, each process
        passes its own examples, and all get the metrics of the examples of all processes.

        Args:
            data: Batches of the phase with targets, in one of the forms that `predict` takes: `(xs, ys)` contains all
                examples or one batch, and a list or a loader yields batches. By default, the Learner's own data for
                the phase.
            metrics: The arguments of `Metrics(...)`: a function of `(outputs, ys)`, a metric, or a list of these. The
                loss is always measured if the phase computes one. By default, the metrics of the Learner's `Metrics`.
            phase: The phase; by default the Learner's first phase that does not train.
            batch_size: Examples per batch, for data that is not an iterable of batches; see `predict`.
            average: Which parameters are used. "validated" uses those that an epoch of the phase uses; see `get_model`.

        Returns:
            The values by the names of the metrics, e.g. `{"loss": 0.33, "accuracy": 0.97}`. The value of a metric with
            a shape, such as `ConfusionMatrix(10)`, is a NumPy array.

        Raises:
            DeclarationError: The phase trains, or all phases of the Learner train; an element of `metrics` is not a
                metric, or needs a value that the phase does not compute; there is no such average.
            DataError: There is no data, or it yields no batches; or the Learner's own data is a one-shot iterator.
            MissingStateError: The Learner has not yet seen the shape of a batch.
            Exception: An error of the model, the loss or a metric, with a note that names the batch.

        Example:
            >>> import numpy as np
            >>> from fluxcb.testing import testlearner
            >>> learner = testlearner()
            >>> history = learner.fit(30)  # the outputs become 3 x - 1
            >>> xs, ys = np.float32([[0], [1], [2]]), np.float32([[-1], [2], [9]])
            >>> round(learner.evaluate((xs, ys))["loss"], 1)  # (0 + 0 + 4 ** 2) / 3
            5.3
            >>> def largest_error(outputs, ys):
            ...     return abs(outputs - ys).max()
            >>> sorted(learner.evaluate((xs, ys), largest_error))
            ['largest_error', 'loss']

        Source:
            Keras, `Model.evaluate`.
        """
        self._core.refuse_ahead("evaluate(...)")
        phase = validating_phase(self._core, phase)
        # The average of this phase, which can differ from that of the first validation phase.
        if average == VALIDATED:
            average = average_in(self._core.graph, type(phase))
        # The same metrics must not be compiled again at each call.
        if self._measure is None or not self._measure.matches(metrics, self._core.graph):
            self._measure = Measure(metrics, self._core.graph)
        return evaluate_metrics(self._core, phase, data, self._measure.sums(phase), average, batch_size)

    def _adapter(self, instead: str) -> Any:
        if self._core.adapter is None:
            raise DeclarationError("This Learner has no model: it was built with `Learner.from_loss`.", fix=instead)
        return self._core.adapter

    def _average(self, average: str | None) -> str | None:
        core = self._core
        return validated_average(core.graph, core.phases) if average == VALIDATED else average
