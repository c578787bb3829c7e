"""Layers of Flax NNX modules that raise an error or warn if they are in training mode in evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from fluxcb._errors import DeclarationError
from fluxcb._tracebacks import warn_user
from fluxcb.models._keywords import TrainFlag

__all__ = ["Evaluation", "guard_layers"]

_STREAM = "dropout"  # the stream that dropout uses by default


@dataclass(frozen=True)
class Evaluation:
    """How an evaluation calls a module. It is hashable, because NNX keeps it in the structure of the module.

    Attributes:
        name: Name of the module's class.
        where: Location of the class.
        flag: The train flag of the module's call.
        options: The parameters of the module's call whose defaults are bools, with the defaults.
        in_loss: Whether a loss function `loss_fn(model, batch)` calls the module.
    """

    name: str
    where: str
    flag: TrainFlag | None
    options: tuple[tuple[str, bool], ...]
    in_loss: bool

    def error(self, layer: str, *, switched: bool) -> DeclarationError:
        """Return the error for a layer whose dropout is on.

        Args:
            layer: Name of the layer.
            switched: Whether the layer itself is in training mode, and not only this call of it.
        """
        why = "metrics and predictions would be those of a model with randomly disabled units"
        if switched:
            return DeclarationError(
                f"{self._switch(layer)}, which turns dropout on.", where=self.where, why=why, fix=self._keep_mode()
            )
        fixes = self._fixes("deterministic", layer)
        purpose = "if random numbers in evaluation are intended, draw them from another stream: "
        own = "`rngs=self.noise`, with `self.noise = rngs.noise.fork()` in `__init__`"
        fixes.append(purpose + ('`rng_collection="noise"` in `nnx.Dropout`' if layer == "Dropout" else own))
        return DeclarationError(
            f"The NNX module `{self.name}` turns dropout on in evaluation, although it is in evaluation mode.",
            where=self.where,
            why=why,
            fix=fixes,
        )

    def warn_of_batch_statistics(self, *, switched: bool) -> None:
        """Warn about batch normalization with the statistics of the batch, which may be intended.

        Args:
            switched: Whether the layer itself is in training mode, and not only this call of it.
        """
        calls = f"In evaluation, the NNX module `{self.name}` calls `nnx.BatchNorm` with `use_running_average=False`"
        fixes = [self._keep_mode()] if switched else self._fixes("use_running_average", "BatchNorm")
        warn_user(
            f"{self._switch('BatchNorm') if switched else calls}, so metrics and predictions depend on the other "
            f"examples of a batch. To use the running average, {'; or '.join(fixes)}.",
            UserWarning,
        )

    def _switch(self, layer: str) -> str:
        who = "the loss function or the NNX module" if self.in_loss else "the NNX module"
        return f"In evaluation, {who} `{self.name}` switches `nnx.{layer}` to training mode"

    def _keep_mode(self) -> str:
        """Return the fix for code that switches the mode of the module."""
        code = f"`model.train()` from the loss function, or `self.train()` from `{self.name}`"
        return (
            f"remove {code if self.in_loss else f'`self.train()` from `{self.name}`'}: fluxcb sets the mode, "
            "which is training mode in training phases only"
        )

    def _fixes(self, argument: str, layer: str) -> list[str]:
        """Return the fixes for a layer that is in training mode.

        Args:
            argument: The argument of the layer that must be true in evaluation.
            layer: Name of the layer.
        """
        # Fluxcb has called `.eval()`, and only an argument of the layer's call overrides it.
        fixes = [f"leave `{argument}` out when you call `nnx.{layer}`: fluxcb sets it, as `module.eval()` does"]
        if self.in_loss:
            passed = self.flag.name if self.flag else next((name for name, on in self.options if on), None)
            if passed:
                value = "not train" if self.flag and self.flag.inverted else "train"
                fixes.append(
                    f"write `def loss_fn(model, batch, *, train):`, and pass `{passed}={value}` when you call the model"
                )
        elif self.flag is not None:
            opposite = "" if self.flag.inverted else "not "
            fixes.append(f"write `{argument}={opposite}{self.flag.name}` when you call `nnx.{layer}`")
        else:
            # An argument that must be True for evaluation has the default False, since its default has turned training
            # mode on.
            fixes += [
                f'if `{option}` is true in training, pass `fluxcb.models.nnx(module, "{option}")` as the model'
                if on
                else f"if `{option}` is true in evaluation, rename it to `deterministic`"
                for option, on in self.options
            ]
        return fixes


def guard_layers(module: Any, evaluation: Evaluation) -> None:
    """Make the layers of a module raise an error or warn if they are in training mode.

    The state of the module does not change. Dropout layers that draw from another stream than `dropout` stay as they
    are, as do subclasses of the layers of Flax.
    """
    # The calls of the layers are checked instead of the counts of the random streams: transforms such as `nnx.jit`
    # replace all counts, and `nnx.split_rngs` increments them, even if no layer drops anything.
    for _, layer in nnx.iter_modules(module):
        guarded = _GUARDED.get(type(layer))
        if guarded is not None and getattr(layer, "rng_collection", _STREAM) == _STREAM:
            object.__setattr__(layer, "__class__", guarded)
        if isinstance(layer, GuardedDropout | GuardedAttention | GuardedBatchNorm):
            layer.evaluation = evaluation


class GuardedDropout(nnx.Dropout):
    """A dropout layer that raises an error if it is on."""

    evaluation: Evaluation

    def __call__(self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None) -> Any:
        """Return the inputs."""
        if self.rate != 0 and _is_on(self, deterministic, rngs):
            raise self.evaluation.error("Dropout", switched=deterministic is None)
        return super().__call__(inputs, deterministic=deterministic, rngs=rngs)


class GuardedAttention(nnx.MultiHeadAttention):
    """An attention layer that raises an error if its dropout is on."""

    evaluation: Evaluation

    def __call__(self, *args: Any, deterministic: bool | None = None, rngs: Any = None, **kwargs: Any) -> Any:
        """Return the outputs of the layer."""
        if self.dropout_rate > 0 and _is_on(self, deterministic, rngs):
            raise self.evaluation.error("MultiHeadAttention", switched=deterministic is None)
        return super().__call__(*args, deterministic=deterministic, rngs=rngs, **kwargs)


class GuardedBatchNorm(nnx.BatchNorm):
    """A batch normalization layer that warns if it uses the statistics of the batch."""

    evaluation: Evaluation

    def __call__(self, x: Any, use_running_average: bool | None = None, **kwargs: Any) -> Any:
        """Return the outputs of the layer."""
        used = self.use_running_average if use_running_average is None else use_running_average
        if used is False:  # a traced value is no decision
            self.evaluation.warn_of_batch_statistics(switched=use_running_average is None)
        return super().__call__(x, use_running_average, **kwargs)


_GUARDED: dict[type, type] = {
    nnx.Dropout: GuardedDropout,
    nnx.MultiHeadAttention: GuardedAttention,
    nnx.BatchNorm: GuardedBatchNorm,
}


def _is_on(layer: Any, deterministic: bool | None, rngs: Any) -> bool:
    """Return whether the layer drops units, with random numbers that the call did not choose."""
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        return False  # the module has passed a key or a stream of its own
    used = layer.deterministic if deterministic is None else deterministic
    return used is not None and not used  # with None, Flax raises its own error
