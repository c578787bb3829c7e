"""The declarations of meshes and shardings, and the messages about wrong ones; on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import fluxcb
from fluxcb import DataError, DeclarationError, Learner, Sharding
from fluxcb._declare.shardings import FSDP

P = PartitionSpec
BATCHES = [(np.ones((4, 3), np.float32), np.ones((4, 2), np.float32))] * 2
MODEL = (
    lambda key, xs: {"encoder": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}},
    lambda params, xs: xs @ params["encoder"]["kernel"] + params["encoder"]["bias"],
)


def loss_fn(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def learner(**options):
    return Learner(MODEL, loss_fn, optax.adam(0.1), **{"data": BATCHES, "default_callbacks": False, **options})


def specs(**options):
    rows = learner(mesh=fluxcb.mesh(), **options).shardings().rows
    return {row.path: row.spec for row in rows if row.spec != "P()"}


MIRRORED = ("params.encoder", "opt_state.0.mu.encoder", "opt_state.0.nu.encoder")


@pytest.mark.parametrize(
    "rule",
    [
        {"encoder.kernel": P("data")},
        {"*kernel": P("data")},
        {"encoder/kernel": P("data")},
        {"encoder.bias": P(), "encoder": P("data")},
        lambda path, shape: P("data") if len(shape) == 2 and path == "encoder.kernel" else None,
        [{"*.bias": P()}, lambda path, shape: P("data")],
        fluxcb.fsdp(min_bytes=24),
    ],
)
def test_the_first_rule_that_matches_a_parameter_decides(rule):
    assert specs(sharding=Sharding(params=rule)) == {f"{path}.kernel": "P('data')" for path in MIRRORED}


def test_other_arrays_can_have_rules_of_their_own():
    sharding = Sharding(params={"*kernel": P("data")}, opt_state={"0.mu": P("model")})
    assert specs(sharding=sharding) == {
        "params.encoder.kernel": "P('data')",
        "opt_state.0.mu.encoder.bias": "P('model')",
        "opt_state.0.mu.encoder.kernel": "P('model')",
        "opt_state.0.nu.encoder.kernel": "P('data')",
    }


def test_parameters_are_replicated_by_default():
    assert specs() == specs(sharding="replicated") == {}


def test_the_table_prints():
    assert str(learner(mesh=fluxcb.mesh(), sharding=Sharding(params={"*kernel": P("data")})).shardings()) == (
        "path                           spec       bytes per device\n"
        "params.encoder.bias            P()                       8\n"
        "params.encoder.kernel          P('data')                24\n"
        "opt_state.0.count              P()                       4\n"
        "opt_state.0.mu.encoder.bias    P()                       8\n"
        "opt_state.0.mu.encoder.kernel  P('data')                24\n"
        "opt_state.0.nu.encoder.bias    P()                       8\n"
        "opt_state.0.nu.encoder.kernel  P('data')                24\n"
        "counters                       P()                      24\n"
        "total                                                  124"
    )


def test_the_table_of_a_learner_without_a_mesh():
    table = learner().shardings()
    assert {row.spec for row in table.rows} == {"one device"}
    assert table.bytes_per_device == 124


def test_fsdp_divides_the_largest_dimension_that_divides_evenly():
    rule = FSDP("data", 100)
    assert rule.dimension((4, 8), 128, 4) == 1
    assert rule.dimension((9, 8), 288, 4) == 1
    assert rule.dimension((8, 8), 256, 4) == 0
    assert rule.dimension((9, 7), 252, 4) is None
    assert rule.dimension((4, 8), 99, 4) is None


def test_a_mesh_has_the_axes_data_and_model_and_others():
    mesh = fluxcb.mesh(expert=1)
    assert dict(mesh.shape) == {"data": len(jax.devices()), "model": 1, "expert": 1}


def test_a_mesh_does_not_change_the_training():
    with_mesh, without = (learner(key=1, **options) for options in ({"mesh": fluxcb.mesh()}, {}))
    for each in (with_mesh, without):
        each.fit(3)
    for one, other in zip(*(jax.tree.leaves(each.params) for each in (with_mesh, without)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def pad(loss=loss_fn, batches=BATCHES):
    return Learner(
        MODEL, loss, optax.sgd(0.1), data=batches, default_callbacks=False,
        mesh=fluxcb.mesh(), sharding=Sharding(ragged="pad"),
    ).fit(1)  # fmt: skip


XY = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
EXAMPLE = '`params={"*": P("data")}`, with `P = jax.sharding.PartitionSpec`'


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: learner(sharding="fsdp"),
            DeclarationError,
            "`sharding='fsdp'` was given without a mesh.\n"
            "  why:   arrays are divided over the axes of a mesh\n"
            "  fix:   add `mesh=fluxcb.mesh()`, which has all devices\n"
            "     or: leave out `sharding`",
        ),
        (
            lambda: learner(mesh=8),
            DeclarationError,
            "`mesh` must be a `jax.sharding.Mesh`, not int 8.\n"
            "  fix:   write `mesh=fluxcb.mesh()`\n"
            '     or: write `mesh=jax.make_mesh((jax.device_count(),), ("data",))`',
        ),
        (
            lambda: learner(mesh=fluxcb.mesh(), sharding="zero"),
            DeclarationError,
            "`sharding` must be 'replicated', 'fsdp' or a `fluxcb.Sharding`, not 'zero'.\n"
            "  fix:   write `sharding='fsdp'`\n"
            "     or: write `sharding=fluxcb.Sharding(params=...)`",
        ),
        (
            lambda: learner(mesh=fluxcb.mesh(), sharding={"*": P("data")}),
            DeclarationError,
            "`sharding` is a rule for parameters, {...}.\n"
            "  why:   a `Sharding` also has rules for the optimizer state and the batches\n"
            "  fix:   write `sharding=fluxcb.Sharding(params={...})`",
        ),
        (
            lambda: learner(mesh=fluxcb.mesh(), sharding=Sharding(params={"encoder.kernl": P("data")})),
            DeclarationError,
            "`params` of the sharding: no array fits `encoder.kernl`. Did you mean `encoder.kernel`?\n"
            "  where: 'encoder.kernl': P('data')\n"
            "  why:   a rule that matches nothing is usually a typing error, and the arrays would be replicated\n"
            "  fix:   use the path of an array: `encoder.kernel`, `encoder.bias`",
        ),
        (
            lambda: learner(mesh=fluxcb.mesh(), sharding=Sharding(params={"*": P("modell")})),
            DeclarationError,
            "`params['*']` of the sharding names the mesh axis `modell`, which does not exist. Did you mean `model`?\n"
            "  why:   the mesh has the axes data, model\n"
            "  fix:   name an axis of the mesh: `model`\n"
            "     or: make a mesh that has the axis: `fluxcb.mesh(modell=...)`",
        ),
        (
            lambda: learner(mesh=XY, sharding=Sharding(params=fluxcb.fsdp("tensor"), batch=P("x"))),
            DeclarationError,
            "`fsdp(axis='tensor', min_bytes=4194304)` names the mesh axis `tensor`, which does not exist.\n"
            "  why:   the mesh has the axes x, y\n"
            "  fix:   name an axis of the mesh: `x`\n"
            "     or: make a mesh that has the axis: `fluxcb.mesh(tensor=...)`",
        ),
        (
            lambda: learner(mesh=XY),
            DeclarationError,
            "The mesh has the axes x, y, and none of them is called `data`.\n"
            "  why:   batches are divided over the axis `data`, unless the sharding of batches is declared\n"
            "  fix:   declare it: `sharding=fluxcb.Sharding(batch=jax.sharding.PartitionSpec(\"x\"))`\n"
            "     or: name an axis `data`: `mesh=fluxcb.mesh(data=-1)`",
        ),
        (
            lambda: learner(mesh=fluxcb.mesh(), sharding=Sharding(params={"*": P(None, "data")})),
            DeclarationError,
            "`params.encoder.bias` has the shape (2,), and its sharding P(None, 'data') has 2 entries.\n"
            "  why:   a spec has at most one entry for each dimension\n"
            "  fix:   use a pattern that matches only arrays with enough dimensions",
        ),
        (
            lambda: learner(mesh=fluxcb.mesh(), sharding=Sharding(params=lambda path, shape: "data")),
            DeclarationError,
            "`params` of the sharding returned 'data' for `encoder.bias`.\n"
            "  why:   a rule returns a `PartitionSpec`, or None for arrays that it does not match\n"
            "  fix:   return e.g. `jax.sharding.PartitionSpec(\"data\")`",
        ),
        (
            lambda: Sharding(params="fsdp"),
            DeclarationError,
            "`params` of `Sharding` must be `fsdp(...)`, a mapping of path patterns to `PartitionSpec`s, or a function "
            f"of path and shape, not 'fsdp'.\n  fix:   write e.g. {EXAMPLE}",
        ),
        (
            lambda: Sharding(params={"*": "data"}),
            DeclarationError,
            "`params` of `Sharding` maps '*' to 'data'; it must map path patterns to `PartitionSpec`s.\n"
            f"  fix:   write e.g. {EXAMPLE}",
        ),
        (
            lambda: Sharding(ragged="keep"),
            DeclarationError,
            "`ragged` of `Sharding` is 'error', 'drop' or 'pad', not 'keep'.\n  fix:   write `ragged='error'`",
        ),
        (
            lambda: fluxcb.fsdp(axis=0),
            DeclarationError,
            '`axis` of `fsdp` must be the name of a mesh axis, not 0.\n  fix:   write e.g. `fsdp(axis="data")`',
        ),
        (
            lambda: fluxcb.fsdp(min_bytes=-1),
            DeclarationError,
            "`min_bytes` of `fsdp` must be a number of bytes, not -1.\n  fix:   write e.g. `fsdp(min_bytes=2**20)`",
        ),
        (
            lambda: fluxcb.mesh(data=0),
            DeclarationError,
            "`data` of `fluxcb.mesh` must be a number of devices, or -1, not 0.\n"
            "  fix:   write e.g. `fluxcb.mesh(data=1)`",
        ),
        (
            lambda: fluxcb.mesh(data=-1, model=-1),
            DeclarationError,
            "`fluxcb.mesh` got -1 for several axes: data, model.\n"
            "  why:   -1 means all devices that the other axes do not use, so only one axis can have it\n"
            "  fix:   set `model` to a number of devices",
        ),
        (
            pad,
            DeclarationError,
            "`ragged='pad'` needs a loss function that gets the batch.\n"
            "  why:   `loss_fn(outputs, ys)` gets no mask, and would count the examples that were added\n"
            "  fix:   write `def loss_fn(model, batch):`, and average with `batch.mask`: "
            "`jnp.sum(losses * batch.mask) / jnp.sum(batch.mask)`\n"
            "     or: write `ragged='drop'`",
        ),
        (
            lambda: pad(lambda model, batch: jnp.sum(model(batch)), [np.ones((4, 3), np.float32)]),
            DataError,
            "`ragged='pad'` cannot add a mask to a batch of `data.training`.\n"
            "  why:   the mask is an attribute of the batch, which must be a tuple, a list or a dictionary\n"
            "  fix:   yield dictionaries or tuples\n"
            "     or: write `ragged='drop'`",
        ),
    ],
)  # fmt: skip
def test_messages(make, kind, message):
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value) == message
