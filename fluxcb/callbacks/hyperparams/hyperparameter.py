"""`HyperParameter` and `ObjAttrParam`, which name the values that schedulers and setters change."""

from __future__ import annotations

from typing import Any

from fluxcb._calls import Constructed
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb.callbacks.arguments import nonempty_text, require

__all__ = ["HyperParameter", "LearningRate", "ObjAttrParam", "hyperparameter_name", "is_name", "shown_hyperparameter"]


class HyperParameter(Constructed):
    """A hyperparameter injected by Optax. Subclass it to name a hyperparameter of your own.

    Attributes:
        name: The name in `hyperparams`, which is the name of an argument of the optimizer.

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


class ObjAttrParam(Constructed):
    """An attribute of a Python object, such as the strength of an augmentation, for setters that run between epochs.

    The attribute is set on the host. A compiled step that has read the attribute keeps the value from when the step
    was traced. The attribute is not part of `learner.state`; its value is saved in the `state_dict` of the setter.

    Args:
        obj: The object.
        attribute: The name of an existing attribute that can be assigned. To check this, its current value is assigned
            to it once.
        name: The name in messages and in `cbstate.attributes`; `<class>_<attribute>` by default. Two objects of the
            same class need different names.

    Raises:
        DeclarationError: The attribute does not exist or cannot be set, or the name is not an identifier.

    Example:
        >>> class Augmentation:
        ...     strength = 0.1
        >>> ObjAttrParam(Augmentation(), "strength")
        ObjAttrParam(Augmentation_strength)

    Source:
        tensorpack, `ObjAttrParam`.
    """

    def __init__(self, obj: Any, attribute: str, name: str | None = None) -> None:
        nonempty_text(
            attribute,
            "`attribute` of `ObjAttrParam`",
            "the name of an attribute",
            'ObjAttrParam(augmentation, "strength")',
        )
        kind = type(obj).__name__
        if not hasattr(obj, attribute):
            raise DeclarationError(
                f"`ObjAttrParam` was given a `{kind}`, which has no attribute `{attribute}`."
                f"{did_you_mean(attribute, [known for known in dir(obj) if not known.startswith('_')])}",
                why="a misspelled attribute would be created and never read",
                fix="set the attribute first, or correct its name",
            )
        try:  # a property without a setter, for example, is an error now and not in the middle of training
            setattr(obj, attribute, getattr(obj, attribute))
        except Exception as error:
            raise DeclarationError(
                f"The attribute `{attribute}` of the `{kind}` given to `ObjAttrParam` cannot be set "
                f"({type(error).__name__}: {error}).",
                fix="name an attribute that can be assigned",
            ) from error
        self.obj = obj
        self.attribute = attribute
        self.name = f"{kind}_{attribute}" if name is None else name
        fits = isinstance(self.name, str) and self.name.isidentifier()
        require(fits, self.name, "`name` of `ObjAttrParam`", "an identifier", 'name="flip_rate"')

    @property
    def value(self) -> Any:
        """The value of the attribute."""
        return getattr(self.obj, self.attribute)

    @value.setter
    def value(self, value: Any) -> None:
        setattr(self.obj, self.attribute, value)

    def __repr__(self) -> str:
        return f"ObjAttrParam({self.name})"


def is_name(text: str) -> bool:
    """Return whether a string can be the name of a hyperparameter, with or without a group: `head.learning_rate`."""
    return text.rpartition(".")[2].isidentifier() and all(text.split("."))


def hyperparameter_name(key: Any) -> str:
    """Return the name of a hyperparameter that is given as a class, an instance or a name.

    Raises:
        DeclarationError: `key` is none of these.
    """
    if isinstance(key, str) and is_name(key):
        return key
    if (isinstance(key, HyperParameter) or (isinstance(key, type) and issubclass(key, HyperParameter))) and key.name:
        return key.name
    shown = f"The class `{key.__name__}`" if isinstance(key, type) else repr(key)
    raise DeclarationError(
        f"{shown} does not name a hyperparameter.",
        fix='use LearningRate, a subclass of HyperParameter with a `name`, or a name such as "weight_decay"',
    )


def shown_hyperparameter(name: str) -> str:
    """Return the code that names a hyperparameter as an argument."""
    return LearningRate.__name__ if name == LearningRate.name else f'"{name}"'
