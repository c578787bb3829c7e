"""Values that a loss function gets as bound arguments or defaults, or passes to a helper, and that change later."""

import dataclasses
import functools
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb

XS = np.linspace(-1, 1, 8, dtype=np.float32)


@dataclasses.dataclass
class Config:
    beta: float = 1.0
    unused: float = 1.0


def loss(params, batch, *, cfg):
    return cfg.beta * jnp.mean((params["w"] * batch[0] - batch[1]) ** 2)


def loss_of_dict(params, batch, cfg):
    return cfg["beta"] * jnp.mean((params["w"] * batch[0] - batch[1]) ** 2)


def loss_of_array(params, batch, cfg):
    return jnp.mean(cfg * (params["w"] * batch[0] - batch[1]) ** 2)


def outer(params, batch, options):
    return loss(params, batch, cfg=options.train)


def set_beta(config):
    config.beta = 0.0


def set_entry(config):
    config["beta"] = 0.0


def set_array(config):
    config[...] = 0.0


def in_train(config):
    config.train.beta = 0.0


NUMBER = "has changed"
ARGUMENT, VARIABLE = "The argument `cfg`", "The variable `c`"


def with_default(config):
    def by_default(params, batch, cfg=config):
        return cfg.beta * jnp.mean((params["w"] * batch[0] - batch[1]) ** 2)

    return by_default


def in_default_of_helper(config):
    def helper(params, batch, *, cfg=config):
        return cfg.beta * jnp.mean((params["w"] * batch[0] - batch[1]) ** 2)

    return lambda params, batch: helper(params, batch)


def with_partial_as_helper(config):
    bound = functools.partial(loss, cfg=config)
    return lambda params, batch: bound(params, batch)


def in_lambda(c):
    return lambda params, batch: loss(params, batch, cfg=c)


def in_lambda_by_position(c):
    return lambda params, batch: loss_of_dict(params, batch, c)


def in_inner_function(c):
    def loss_fn(params, batch):
        def inner():
            return loss(params, batch, cfg=c)

        return inner()

    return loss_fn


def of_attribute(o):
    return lambda params, batch: loss(params, batch, cfg=o.train)


def of_entry(o):
    return lambda params, batch: loss(params, batch, cfg=o["train"])


def through_two_helpers(o):
    return lambda params, batch: outer(params, batch, o)


def through_module(c):
    losses = types.ModuleType("losses")
    losses.loss = loss
    return lambda params, batch: losses.loss(params, batch, cfg=c)


def through_method(c):
    class Losses:
        def loss(self, params, batch, cfg):
            return loss(params, batch, cfg=cfg)

    losses = Losses()
    return lambda params, batch: losses.loss(params, batch, c)


CASES = {
    "dataclass in partial": (lambda c: functools.partial(loss, cfg=c), Config, set_beta, ARGUMENT),
    "namespace in partial": (
        lambda c: functools.partial(loss, cfg=c),
        lambda: types.SimpleNamespace(beta=1.0),
        set_beta,
        ARGUMENT,
    ),
    "dict in partial": (lambda c: functools.partial(loss_of_dict, cfg=c), lambda: {"beta": 1.0}, set_entry, ARGUMENT),
    "array in partial": (
        lambda c: functools.partial(loss_of_array, cfg=c),
        lambda: np.ones(8, np.float32),
        set_array,
        ARGUMENT,
    ),
    "partial of a partial": (
        lambda c: functools.partial(functools.partial(loss, cfg=Config(2.0)), cfg=c),
        Config,
        set_beta,
        ARGUMENT,
    ),
    "default": (with_default, Config, set_beta, ARGUMENT),
    "default of a helper": (in_default_of_helper, Config, set_beta, "A variable of the function `helper`"),
    "partial as a helper": (with_partial_as_helper, Config, set_beta, "A variable of the function `bound`"),
    "by name": (in_lambda, Config, set_beta, VARIABLE),
    "by position": (in_lambda_by_position, lambda: {"beta": 1.0}, set_entry, VARIABLE),
    "in an inner function": (in_inner_function, Config, set_beta, VARIABLE),
    "attribute": (of_attribute, lambda: types.SimpleNamespace(train=Config()), in_train, "The variable `o`"),
    "entry": (
        of_entry,
        lambda: {"train": Config()},
        lambda o: set_beta(o["train"]),
        "The variable `o`",
    ),
    "two helpers": (
        through_two_helpers,
        lambda: types.SimpleNamespace(train=Config()),
        in_train,
        "The variable `o`",
    ),
    "helper in a module": (through_module, Config, set_beta, VARIABLE),
    "method": (through_method, Config, set_beta, VARIABLE),
}


def learner(loss_fn):
    params = {"w": jnp.zeros(())}
    return fluxcb.Learner.from_loss(params, loss_fn, optax.sgd(0.1), data=[(XS, 3 * XS)], default_callbacks=False)


@pytest.mark.parametrize("case", CASES)
def test_handed_on_value_that_changes_is_a_warning_once(case):
    make, create, change, label = CASES[case]
    config = create()
    trained = learner(make(config))
    trained.fit(1)
    change(config)
    with pytest.warns(UserWarning, match="has changed") as caught:
        trained.fit(1)
    assert [str(warning.message) for warning in caught] == [
        f"{label} has changed, but the loss function still uses the earlier value, which is a constant of the compiled "
        "step. To change the value at the end of epochs, change it at EpochEnd, and pass it in the batch, for example "
        "with `fluxcb.data.map`. To change it at steps, keep it in an entry of `learner.cbstate`, and read the entry "
        "in the step of a phase, which names it in `uses`."
    ]
    before = float(trained.params["w"])
    trained.fit(1)  # without a warning, and with the earlier value, so that the parameter still moves
    assert float(trained.params["w"]) != before


def test_fields_that_the_code_does_not_read_are_no_warning():
    config, other, box = Config(), Config(), types.SimpleNamespace(train=Config(), test=Config())

    def unread(params, batch, cfg):
        return jnp.mean((params["w"] * batch[0] - batch[1]) ** 2)

    def loss_fn(params, batch):
        return loss(params, batch, cfg=config) + outer(params, batch, box)

    def reassigned(params, batch, cfg=other):
        cfg = config
        return loss(params, batch, cfg=cfg)

    for trained in (learner(loss_fn), learner(reassigned), learner(functools.partial(unread, cfg=other))):
        config.unused = other.beta = box.train.unused = 1.0
        trained.fit(1)
        config.unused = other.beta = box.train.unused = 0.0
        trained.fit(1)
