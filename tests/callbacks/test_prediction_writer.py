"""`PredictionWriter`: predictions in the order of the data, in a file that is replaced atomically."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DataError, DeclarationError, Learner
from fluxcb.callbacks import InferenceRunner, PredictionWriter
from fluxcb.data import ArrayLoader
from fluxcb.testing import testlearner

XS = np.float32([[0.0], [1.0], [2.0], [5.0], [-3.0]])
BATCHES = [(XS[:2], XS[:2]), (XS[2:4], XS[2:4]), (XS[4:], XS[4:])]


class Claiming(list):
    """Batches whose length is too large."""

    more = 0

    def __len__(self):
        return super().__len__() + self.more


def line(learner, xs=XS):
    return float(learner.params["w"]) * xs + float(learner.params["b"])


def run(path, names="outputs", data=BATCHES, epochs=1):
    learner = testlearner(InferenceRunner(data, PredictionWriter(path, names)))
    learner.fit(epochs)
    return learner


def test_an_npz_has_all_samples_in_order(tmp_path):
    learner = run(tmp_path / "deep" / "p.npz", ["outputs", "ys"])
    with np.load(tmp_path / "deep" / "p.npz") as file:
        assert sorted(file.files) == ["outputs", "ys"]
        np.testing.assert_allclose(file["outputs"], line(learner), atol=1e-6)
        np.testing.assert_array_equal(file["ys"], XS)


@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
def test_a_jsonl_file_has_one_object_per_sample(tmp_path, name):
    learner = run(tmp_path / name)
    rows = [json.loads(text) for text in (tmp_path / name).read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose([row["outputs"] for row in rows], line(learner), atol=1e-6)


def test_each_round_replaces_the_file_and_leaves_no_other_files(tmp_path):
    learner = run(tmp_path / "p.npz", epochs=3)
    np.testing.assert_allclose(np.load(tmp_path / "p.npz")["outputs"], line(learner), atol=1e-6)
    assert os.listdir(tmp_path) == ["p.npz"]


def of_containers(writer, dtype=jnp.float32):
    """Return a Learner whose outputs are a dict of a square and a pair."""
    learner = Learner(
        (
            lambda key, xs: {"s": jnp.ones(())},
            lambda params, xs: {"square": params["s"] * xs**2, "parts": ((xs / 2).astype(dtype), xs / 0)},
        ),
        lambda outputs, ys: jnp.mean(outputs["square"]) * 0,
        optax.sgd(0.1),
        data=BATCHES[:1],
        callbacks=[InferenceRunner(BATCHES, writer)],
        default_callbacks=False,
    )
    learner.fit(1)


def test_parts_of_containers_have_names_and_bfloat16_becomes_float32(tmp_path):
    of_containers(PredictionWriter(tmp_path / "p.npz"), jnp.bfloat16)
    file = np.load(tmp_path / "p.npz")
    assert sorted(file.files) == ["outputs.parts.0", "outputs.parts.1", "outputs.square"]
    np.testing.assert_array_equal(file["outputs.square"], XS**2)
    assert file["outputs.parts.0"].dtype == np.float32
    np.testing.assert_array_equal(file["outputs.parts.0"], XS / 2)  # exact in bfloat16


def test_nan_and_infinity_are_null_in_json(tmp_path):
    of_containers(PredictionWriter(tmp_path / "p.jsonl"))
    rows = [json.loads(text) for text in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert rows[0] == {
        "index": 0,
        "outputs.square": [0.0],
        "outputs.parts.0": [0.0],
        "outputs.parts.1": [None],
    }  # 0 / 0
    assert rows[1]["outputs.parts.1"] == [None]  # 1 / 0
    assert rows[1]["outputs.square"] == [1.0]


@pytest.mark.parametrize("name", ["p.npz", "p.jsonl"])
def test_a_failed_round_keeps_the_previous_file(tmp_path, name):
    data = Claiming(BATCHES)
    learner = run(tmp_path / name, data=data)
    before = (tmp_path / name).read_bytes()
    data.more = 1
    with pytest.raises(DataError):
        learner.fit(1)
    assert (tmp_path / name).read_bytes() == before
    assert os.listdir(tmp_path) == [name]
    data.more = 0
    learner.fit(1)
    assert (tmp_path / name).read_bytes() != before


def test_a_failed_first_round_leaves_no_file(tmp_path):
    data = Claiming(BATCHES)
    data.more = 1
    with pytest.raises(DataError):
        run(tmp_path / "p.npz", data=data)
    assert os.listdir(tmp_path) == []


def test_a_killed_process_keeps_the_previous_file(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal
            import numpy as np
            from fluxcb.callbacks import PredictionWriter

            def go(writer, rounds):
                writer.before()
                writer.on_fetches({"outputs": np.ones((100_000, 1))}, 100_000)
                if rounds == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                writer.after()

            writer = PredictionWriter("p.jsonl")
            go(writer, 1)
            go(writer, 2)
            """
        )
    )
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert ended.returncode == -signal.SIGKILL
    rows = (tmp_path / "p.jsonl").read_text().splitlines()
    assert len(rows) == 100_000
    assert json.loads(rows[-1]) == {"index": 99_999, "outputs": [1.0]}
    run(tmp_path / "p.jsonl")  # the next process replaces the unfinished file
    assert sorted(os.listdir(tmp_path)) == ["p.jsonl", "script.py"]


def test_a_value_without_a_sample_axis_is_an_error(tmp_path):
    with pytest.raises(DeclarationError) as caught:
        run(tmp_path / "p.npz", "loss")
    assert str(caught.value) == (
        "`loss` has shape () in a batch of 2 samples, but `PredictionWriter` writes one value per sample.\n"
        "  fix:   name a value whose first axis is the axis of samples, such as `outputs`"
    )


def test_bad_arguments(tmp_path):
    with pytest.raises(DeclarationError) as caught:
        PredictionWriter(tmp_path / "p.csv")
    assert str(caught.value) == (
        "`PredictionWriter` writes .npz and .jsonl files, not `p.csv`.\n  fix:   name it `p.npz` or `p.jsonl`"
    )
    with pytest.raises(DeclarationError, match="takes the names of step values, not None"):
        PredictionWriter(tmp_path / "p.npz", [])
    (tmp_path / "file").touch()
    with pytest.raises(DeclarationError) as caught:
        PredictionWriter(tmp_path / "file" / "p.npz")
    assert str(caught.value) == (
        f"`PredictionWriter` cannot write to `{tmp_path / 'file' / 'p.npz'}`.\n"
        f"  why:   `{tmp_path / 'file'}` is not a writable folder\n"
        "  fix:   use another path"
    )
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(DeclarationError, match="it is a folder"):
        PredictionWriter(tmp_path / "folder.npz")


def test_loader_that_shuffles_is_an_error_whose_fix_works(tmp_path, refused):
    path, loader = tmp_path / "p.npz", ArrayLoader((XS, XS), batch_size=2)
    writer = PredictionWriter(path)
    with refused(
        DeclarationError,
        "The data of InferenceRunner('inference') is an `ArrayLoader` that shuffles.\n"
        f"  why:   {writer!r} would get the examples in random order, and not in the order of the arrays\n"
        "  fix:   build the loader with `shuffle=False`",
    ):
        InferenceRunner(fluxcb.data.map(lambda batch: batch, loader), writer)
    learner = run(path, data=ArrayLoader((XS, XS), batch_size=2, shuffle=False))
    np.testing.assert_allclose(np.load(path)["outputs"], line(learner), rtol=1e-6)
