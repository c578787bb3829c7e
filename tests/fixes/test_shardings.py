"""The fixes in the messages about meshes and shardings, on one device."""

import pytest

from fluxcb import DataError
from tests.fixes.programs import check_row, row

MESH = "P = jax.sharding.PartitionSpec\n"

ROWS = [
    row(
        "was given without a mesh",
        "learner(sharding='replicated')",
        "learner(sharding='replicated', mesh=fluxcb.mesh())",
        "learner()",
    ),
    row(
        "`mesh` must be a `jax.sharding.Mesh`",
        "learner(mesh=1)",
        "learner(mesh=fluxcb.mesh())",
        'learner(mesh=jax.make_mesh((jax.device_count(),), ("data",)))',
    ),
    row(
        "`sharding` must be",
        "learner(mesh=fluxcb.mesh(), sharding=1)",
        "learner(mesh=fluxcb.mesh(), sharding='fsdp')",
        "learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params=fluxcb.fsdp()))",
    ),
    row(
        "`sharding` is a rule for parameters",
        "learner(mesh=fluxcb.mesh(), sharding={'w': jax.sharding.PartitionSpec()})",
        "learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params={'w': jax.sharding.PartitionSpec()}))",
    ),
    row(
        "no array fits",
        "learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params={'v': jax.sharding.PartitionSpec()}))",
        "learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params={'w': jax.sharding.PartitionSpec()}))  # `w`",
    ),
    row(
        "names the mesh axis",
        f"{MESH}learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params={{'w': P('dat')}}))",
        f"{MESH}learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params={{'w': P('data')}}))",
        f"{MESH}learner(mesh=fluxcb.mesh(dat=1), sharding=fluxcb.Sharding(params={{'w': P('dat')}}))",
    ),
    row(
        "none of them is called `data`",
        "learner(mesh=jax.make_mesh((1, 1), ('x', 'y')))",
        "learner(mesh=jax.make_mesh((1, 1), ('x', 'y')), "
        'sharding=fluxcb.Sharding(batch=jax.sharding.PartitionSpec("x")))',
        "learner(mesh=fluxcb.mesh(data=-1))",
    ),
    row(
        "has 3 entries",
        f"{MESH}learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params={{'w': P(None, None, 'data')}}))",
        f"{MESH}learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params={{'w': P(None, 'data')}}))",
    ),
    row(
        "of the sharding returned",
        "learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params=lambda path, shape: 'data'))",
        "learner(mesh=fluxcb.mesh(), "
        'sharding=fluxcb.Sharding(params=lambda path, shape: jax.sharding.PartitionSpec("data")))',
    ),
    row(
        "`params` of `Sharding` must be",
        "fluxcb.Sharding(params='data')",
        'P = jax.sharding.PartitionSpec\nfluxcb.Sharding(params={"*": P("data")})',
    ),
    row(
        "it must map path patterns",
        "fluxcb.Sharding(params={'*': 'data'})",
        'P = jax.sharding.PartitionSpec\nfluxcb.Sharding(params={"*": P("data")})',
    ),
    row("`ragged` of `Sharding`", "fluxcb.Sharding(ragged='cut')", "fluxcb.Sharding(ragged='error')"),
    row("`axis` of `fsdp`", "fluxcb.fsdp(axis=0)", 'from fluxcb import fsdp\nfsdp(axis="data")'),
    row("`min_bytes` of `fsdp`", "fluxcb.fsdp(min_bytes=-1)", "from fluxcb import fsdp\nfsdp(min_bytes=2**20)"),
    row("`data` of `fluxcb.mesh`", "fluxcb.mesh(data=0)", "fluxcb.mesh(data=1)"),
    row("-1 for several axes", "fluxcb.mesh(-1, -1)", "fluxcb.mesh(-1, model=1)  # `model`"),
    row(
        "does not fit",
        "fluxcb.mesh(data=2, devices=jax.devices()[:1])",
        "fluxcb.mesh(data=-1)",
    ),
    row(
        "needs a loss function that gets the batch",
        "learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(ragged='pad'))",
        """
        def loss_fn(model, batch):
            losses = (model(batch[0]) - batch[1])[:, 0] ** 2
            return jnp.sum(losses * batch.mask) / jnp.sum(batch.mask)
        # def loss_fn(model, batch):
        learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(ragged='pad'), loss_fn=loss_fn)
        """,
        "learner(mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(ragged='drop'))",
    ),
    row(
        "cannot add a mask to a batch",
        """
        def loss_fn(model, batch): return jnp.sum(model(batch) ** 2)
        learner(data=[XS], mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(ragged='pad'), loss_fn=loss_fn)
        """,
        """
        def loss_fn(model, batch): return jnp.sum(jnp.mean(model(batch[0]) ** 2, axis=1) * batch.mask)
        learner(data=[(XS, XS)], mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(ragged='pad'), loss_fn=loss_fn)
        """,
        """
        def loss_fn(model, batch): return jnp.sum(model(batch) ** 2)
        learner(data=[XS], mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(ragged='drop'), loss_fn=loss_fn)
        """,
        kind=DataError,
    ),
    row(
        "would count examples that were added",
        """
        def loss_fn(model, batch):
            return jnp.sum(jnp.mean((model(batch[0]) - batch[1]) ** 2, axis=1) * batch.mask), {'n': batch[1]}
        metrics = Metrics(ConfusionMatrix(2, needs=("aux", "aux"), phase=TrainingPhase))
        fit(metrics, mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(ragged='pad'), loss_fn=loss_fn)
        """,
        """
        def loss_fn(model, batch):
            return jnp.sum((model(batch[0]) - batch[1]) ** 2), None
        from fluxcb.callbacks import ConfusionMatrix
        ConfusionMatrix(2, weight=lambda batch: batch.mask)
        """,
    ),
    row(
        "A callback has moved",
        "learner(ToDevice(jax.devices()[0]), mesh=fluxcb.mesh())",
        "learner(mesh=fluxcb.mesh())  # without ToDevice",
        "learner(ToDevice(jax.devices()[0]))  # without mesh, sharding",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.says for row in ROWS])
def test_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)
