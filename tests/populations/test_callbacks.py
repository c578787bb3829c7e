"""Population-based training and successive halving against hand-written references."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError, MissingStateError, Population, Read, on
from fluxcb.callbacks import Checkpointer, Metrics
from fluxcb.events import Trigger
from fluxcb.phases import AbstractTrainingPhase
from fluxcb.populations import PopulationBasedTraining, PopulationCallback, PopulationTable, SuccessiveHalving
from fluxcb.testing import testlearner

RATES = [0.001, 0.003, 0.01, 0.03, 0.1]


def make(learning_rate, *callbacks, folder=None):
    saver = [Checkpointer(folder)] if folder is not None else []
    return testlearner(Metrics(), *saver, *callbacks, learning_rate=learning_rate)


def population(*callbacks, rates=RATES, **arguments):
    return Population(make, learning_rate=rates, callbacks=callbacks, default_callbacks=False, **arguments)


def reference_pbt(rates, epochs, fraction, factors, key):
    """Population-based training of the line, written by hand from section 3 of the paper: returns w, b, rate, moves."""
    learner = testlearner()
    batches, validation = list(learner.data["training"]), list(learner.data["validation"])

    def loss(params, batch):
        return jnp.mean((params["w"] * batch[0] + params["b"] - batch[1]) ** 2)

    gradient = jax.jit(jax.grad(loss))
    members = [({"w": jnp.zeros(()), "b": jnp.zeros(())}, rate) for rate in rates]
    moves = []
    for epoch in range(1, epochs + 1):
        trained = []
        for params, rate in members:
            for batch in batches:
                params = jax.tree.map(lambda p, g, rate=rate: p - rate * g, params, gradient(params, batch))
            trained.append((params, rate))
        losses = [float(np.mean([loss(params, batch) for batch in validation])) for params, _ in trained]
        order = sorted(range(len(rates)), key=losses.__getitem__)
        count = max(1, int(fraction * len(rates)))
        members = list(trained)
        for member in order[-count:]:
            random = np.random.default_rng((key, epoch, member))
            source = order[random.integers(count)]
            rate = trained[source][1] * factors[random.integers(len(factors))]
            members[member] = trained[source][0], rate
            moves.append((epoch, member, source))
    return members, moves


@pytest.mark.parametrize(("fraction", "key"), [(0.2, 0), (0.4, 7)])
def test_population_based_training_equals_reference(fraction, key):
    factors = (0.5, 2.0)
    members = population(
        PopulationBasedTraining("loss", ["learning_rate"], fraction=fraction, factors=factors, key=key)
    )
    members.fit(4)
    expected, moves = reference_pbt(RATES, 4, fraction, factors, key)
    decisions = members.callbacks[0].decisions
    assert [(d["epoch"], d["member"], d["source"]) for d in decisions] == moves
    for member, (params, rate) in zip(members, expected, strict=True):
        assert float(member.hyperparams.learning_rate) == pytest.approx(rate, rel=1e-6)
        for name in ("w", "b"):
            np.testing.assert_allclose(member.params[name], params[name], rtol=1e-5)


def test_members_rank_nan_last():
    members = Population(
        lambda learning_rate: testlearner(Metrics(), optimizer=fluxcb.inject(optax.sgd, learning_rate=learning_rate)),
        learning_rate=[0.1, 1e38, 0.01],
        callbacks=[PopulationBasedTraining("loss", ["learning_rate"], factors=(1.0,))],
        default_callbacks=False,
    )
    members.fit(1)
    assert members.callbacks[0].decisions == [
        {"epoch": 1, "member": 1, "source": 0, "hyperparams": {"learning_rate": pytest.approx(0.1)}}
    ]
    jax.tree.map(np.testing.assert_array_equal, members[1].params, members[0].params)


@pytest.mark.parametrize(("count", "eta", "epochs"), [(5, 2, 1), (9, 3, 1), (4, 2, 2), (3, 4, 1)])
def test_halving_keeps_as_many_as_formula(count, eta, epochs):
    rates = np.geomspace(1e-5, 1e-2, count).tolist()  # the higher, the better
    members = population(SuccessiveHalving("loss", eta=eta, epochs=epochs), rates=rates)
    last = 6
    histories = members.fit(last)
    kept, expected = count, [last] * count
    rung = 0
    while epochs * eta**rung <= last:
        now = max(1, count // eta ** (rung + 1))
        for member in range(count - kept, count - now):
            expected[member] = epochs * eta**rung
        kept, rung = now, rung + 1
    assert [history.epoch for history in histories] == expected
    rungs = members.callbacks[0].rungs
    assert [r["epoch"] for r in rungs] == [epochs * eta**k for k in range(rung)]
    assert [len(r["kept"]) for r in rungs] == [max(1, count // eta ** (k + 1)) for k in range(rung)]


def test_own_callback_shares_values_in_order():
    seen = []

    class Sum(PopulationCallback):
        def stateaccess(self):
            return {"progress": Read()}

        @on(Trigger, AbstractTrainingPhase)
        def share_numbers(self, event, phase, learner):
            seen.append((self.member, learner.progress.epoch, self.share(10 * self.member)))

    population(Sum(), rates=RATES[:3]).fit(2)
    everyone = {0: 0, 1: 10, 2: 20}
    assert seen == [(member, epoch, everyone) for epoch in (1, 2) for member in range(3)]


def test_members_in_different_epochs_are_not_compared():
    members = population(SuccessiveHalving("loss"), rates=RATES[:2])
    members[0].fit(1)
    with pytest.raises(DeclarationError) as caught:
        members.fit(2)
    assert str(caught.value) == (
        "SuccessiveHalving compares members that are in different epochs: member 0 in epoch 2, member 1 in epoch 1.\n"
        "  why:   their metrics belong to different amounts of training\n"
        "  fix:   train or restore all members to the same epoch, or use `population.fit(..., resume=True)`"
    )


def test_members_that_share_in_different_callbacks_are_refused():
    members = population(SuccessiveHalving("loss", epochs=2), rates=RATES[:2])
    members[0].fit(1)
    with pytest.raises(DeclarationError) as caught:
        members.fit(2)
    assert str(caught.value) == (
        "The members of a population share values in different callbacks: member 0 in SuccessiveHalving and member 1 "
        "in PopulationRecord.\n"
        "  why:   each callback compares all members, so all of them have to call `share` equally often\n"
        "  fix:   train all members to the same epoch before\n"
        "     or: call `share` whether or not the member has a value, and share None"
    )


def test_table_shows_best_median_and_worst(capsys):
    members = Population(make, learning_rate=RATES)
    histories = members.fit(2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["epoch", "validation/loss", "member", "median", "worst", "training"]
    for epoch, line in enumerate(lines[1:3], 1):
        losses = sorted(history["validation/loss"][epoch - 1] for history in histories)
        shown = [f"{losses[0]:.4f}", "4", f"{losses[2]:.4f}", f"{losses[-1]:.4f}"]
        assert line.split() == [str(epoch), *shown, "5", "of", "5"]
    assert lines[3].startswith("Training finished")  # see test_summary.py


def test_callback_of_population_is_refused_in_learner():
    with pytest.raises(DeclarationError) as caught:
        make(0.1, PopulationTable())
    assert str(caught.value) == (
        "PopulationTable('validation/loss') is in the callbacks of a Learner, but it compares the members of a "
        "population.\n"
        "  fix:   pass it to the population: `Population(make_learner, callbacks=[PopulationTable(...)], ...)`"
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: PopulationBasedTraining("loss", "learning_rate"),
            "`hyperparams` of `PopulationBasedTraining` must be a list of names of hyperparameters, not "
            "'learning_rate'.\n  fix:   write e.g. `hyperparams=[\"learning_rate\"]`",
        ),
        (
            lambda: PopulationBasedTraining("loss", [], fraction=0.6),
            "`fraction` of `PopulationBasedTraining` must be at most 0.5, not 0.6.\n"
            "  why:   a member cannot be among the best and the worst ones\n  fix:   write e.g. `fraction=0.2`",
        ),
        (
            lambda: PopulationBasedTraining("loss", [], factors=()),
            "`factors` of `PopulationBasedTraining` must be a list of numbers, not ().\n"
            "  fix:   write e.g. `factors=(0.8, 1.2)`",
        ),
        (
            lambda: SuccessiveHalving("loss", eta=1),
            "`eta` of `SuccessiveHalving` must be a whole number of at least 2, not 1.\n"
            "  fix:   give a whole number of at least 2",
        ),
    ],
)
def test_wrong_argument_is_explained(build, message):
    with pytest.raises(DeclarationError) as caught:
        build()
    assert str(caught.value) == message


def test_unknown_hyperparameter_names_the_argument():
    with pytest.raises(MissingStateError, match=r"needs `hyperparams\.lr`") as raised:
        population(PopulationBasedTraining("loss", ["lr"])).fit(1)
    fix = 'write `PopulationBasedTraining("validation/loss", ["learning_rate"])`'
    assert list(raised.value.fix) == [fix]
    members = population(PopulationBasedTraining("validation/loss", ["learning_rate"]))
    members.fit(1)
    assert len(members.callbacks[0].decisions) == 1
