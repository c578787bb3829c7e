"""What schedulers and setters change: hyperparameters on the device, and attributes of Python objects."""

from __future__ import annotations

from typing import Any

from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["HyperParameter", "LearningRate", "ObjAttrParam", "hyperparameter_name", "shown_hyperparameter"]


class HyperParameter:
    """A hyperparameter that optax injected; derive to name one of yours.

    Attributes:
        name: Its name in `hyperparams`, an argument of the optimizer.

    Example:
        >>> from fluxcb.callbacks import Scheduler
        >>> class WeightDecay(HyperParameter):
        ...     name = "weight_decay"
        >>> Scheduler({WeightDecay: 1e-4})
        Scheduler(weight_decay)
    """

    name: str = ""


class LearningRate(HyperParameter):
    """The learning rate, `hyperparams.learning_rate`."""

    name = "learning_rate"


class ObjAttrParam:
    """An attribute of a Python object, for the setters that act between epochs: the strength of an augmentation, say.

    It is changed on the host. What a compiled step has read from the object stays as it was when the step was traced.
    The attribute is no part of `learner.state`; the setter's `state_dict` holds its value.

    Args:
        obj: The object.
        attribute: The attribute's name; it must exist and take values (its own value is assigned to it once, to see).
        name: What messages and `cbstate.attributes` call it, `<class>_<attribute>` if not given; two objects of one
            class need two names.

    Raises:
        DeclarationError: There is no such attribute, it cannot be set, or the name is no identifier.

    Example:
        >>> class Augmentation:
        ...     strength = 0.1
        >>> ObjAttrParam(Augmentation(), "strength")
        ObjAttrParam(Augmentation_strength)

    Source:
        tensorpack, `ObjAttrParam`.
    """

    def __init__(self, obj: Any, attribute: str, name: str | None = None) -> None:
        if not isinstance(attribute, str):
            raise DeclarationError(
                f"`ObjAttrParam` takes the name of an attribute, not {attribute!r}.",
                fix='write `ObjAttrParam(augmentation, "strength")`',
            )
        kind = type(obj).__name__
        if not hasattr(obj, attribute):
            raise DeclarationError(
                f"`ObjAttrParam` was given a `{kind}`, which has no attribute `{attribute}`."
                f"{did_you_mean(attribute, [known for known in dir(obj) if not known.startswith('_')])}",
                why="a misspelt attribute would be added, and never read",
                fix="set the attribute before, or correct its name",
            )
        try:
            setattr(obj, attribute, getattr(obj, attribute))
        except Exception as error:
            raise DeclarationError(
                f"The attribute `{attribute}` of the `{kind}` given to `ObjAttrParam` cannot be set "
                f"({type(error).__name__}: {error}).",
                fix="name an attribute that takes values",
            ) from error
        self.obj = obj
        self.attribute = attribute
        self.name = f"{kind}_{attribute}" if name is None else name
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise DeclarationError(
                f"`name` of `ObjAttrParam` must be an identifier, not {self.name!r}.", fix='e.g. `name="flip_rate"`'
            )

    @property
    def value(self) -> Any:
        """The attribute's value."""
        return getattr(self.obj, self.attribute)

    @value.setter
    def value(self, value: Any) -> None:
        setattr(self.obj, self.attribute, value)

    def __repr__(self) -> str:
        return f"ObjAttrParam({self.name})"


def hyperparameter_name(key: Any) -> str:
    """Return the name of a hyperparameter given as a class, an instance or a name.

    Raises:
        DeclarationError: It is none of these.
    """
    if isinstance(key, str) and key.isidentifier():
        return key
    if (isinstance(key, HyperParameter) or (isinstance(key, type) and issubclass(key, HyperParameter))) and key.name:
        return key.name
    raise DeclarationError(
        f"{key!r} names no hyperparameter.",
        fix='use LearningRate, a subclass of HyperParameter with a `name`, or a name such as "weight_decay"',
    )


def shown_hyperparameter(name: str) -> str:
    """Return the code that names a hyperparameter as an argument."""
    return LearningRate.__name__ if name == LearningRate.name else f'"{name}"'
