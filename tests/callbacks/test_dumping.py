"""ProcessArrays, PrintArrays, DumpArrays and DumpImages: which values they process and when, and what they write."""

import io
import struct
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError, MissingStateError, UnknownStateError, every
from fluxcb.callbacks import DumpArrays, DumpImages, Monitors, PrintArrays, ProcessArrays
from fluxcb.testing import testlearner

PERIODS = "  why:   periods and counts are whole numbers of steps or epochs\n  fix:   pass a positive int"


def followed(params):
    """Return 0, and let the loss depend on the parameters, as a loss must."""
    return 0 * sum(leaf.sum() for leaf in jax.tree.leaves(params))


def counting(*callbacks, batches=4, params=None, **kwargs):
    """Build a Learner whose loss is the number of the step, and that changes no parameter."""
    return fluxcb.Learner.from_loss(
        {"w": jnp.zeros(())} if params is None else params,
        lambda params, batch, key: (
            batch + followed(params),
            {"double": 2 * batch, "row": jnp.stack([batch, -batch])},
        ),
        optax.sgd(0.0),
        data=[jnp.float32(i + 1) for i in range(batches)],
        callbacks=list(callbacks),
        default_callbacks=False,
        **kwargs,
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- ProcessArrays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_a_function_gets_the_values_of_each_step_in_the_order_of_the_names(steps_per_call):
    seen = []
    callback = ProcessArrays(["step.aux.double", "step.loss"], lambda double, loss: seen.append((double, loss)))
    counting(callback, batches=5, steps_per_call=steps_per_call).fit(1)
    assert seen == [(2.0, 1.0), (4.0, 2.0), (6.0, 3.0), (8.0, 4.0), (10.0, 5.0)]


def test_only_named_values_are_fetched():
    learner = counting(ProcessArrays(["step.aux.double", "step.aux.row"], lambda double, row: None))
    fetch = learner._core.window_plan(learner.phases[0]).fetch
    assert sorted(fetch.each) == [("step", "aux", "double"), ("step", "aux", "row")]


def test_paths_into_the_train_state_are_processed_at_trigger():
    seen = []
    params = {"layers": [{"w": jnp.arange(3.0)}, {"w": jnp.arange(2.0)}]}
    callback = ProcessArrays(["params.layers.1.w", "params"], lambda w, whole: seen.append((w.tolist(), len(whole))))
    counting(callback, params=params).fit(2)
    assert seen == [([0.0, 1.0], 1), ([0.0, 1.0], 1)]
    assert [handler.title() for handler in callback.handlers()] == ["(Trigger, AbstractTrainingPhase)"]


def test_an_error_in_the_function_ends_the_training():
    def fails(loss):
        if loss == 3:
            raise RuntimeError("three")

    learner = counting(ProcessArrays("step.loss", fails))
    with pytest.raises(RuntimeError, match="three"):
        learner.fit(1)


TAKES = "expects paths that begin with `step`, `params`, `model_state`, `opt_state`, `hyperparams` or `cbstate`"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("loss", f"`ProcessArrays` {TAKES}; got 'loss'.\n"
         '  fix:   for a value of the step, write `"step.loss"`\n     or: write e.g. `"params.w"`'),
        ("prams.w", f"`ProcessArrays` {TAKES}; got 'prams.w'. Did you mean `params`?\n"
         '  fix:   write e.g. `"step.loss"`\n     or: write e.g. `"params.w"`'),
        ("step", f"`ProcessArrays` {TAKES}; got 'step'.\n"
         '  fix:   write e.g. `"step.loss"`\n     or: write e.g. `"params.w"`'),
        ((), f"`ProcessArrays` {TAKES}; got ().\n"
         '  fix:   write e.g. `"step.loss"`\n     or: write e.g. `"params.w"`'),
        (3, f"`ProcessArrays` {TAKES}; got 3.\n"
         '  fix:   write e.g. `"step.loss"`\n     or: write e.g. `"params.w"`'),
        (["step.loss"] * 2, "`ProcessArrays` received the path `step.loss` twice.\n  fix:   name each value once"),
    ],
)  # fmt: skip
def test_invalid_paths_are_rejected(refused, given, text):
    with refused(DeclarationError, text):
        ProcessArrays(given, print)


def takes_one(value):
    return value


def test_a_function_with_the_wrong_number_of_parameters_is_rejected(refused):
    with refused(
        DeclarationError,
        f"`ProcessArrays` calls its function with 2 values, one per name; {takes_one!r} does not take them.\n"
        "  why:   too many positional arguments\n"
        "  fix:   write a function that takes one argument per name, in the same order",
    ):
        ProcessArrays(["step.loss", "step.ys"], takes_one)


def test_missing_values_are_errors_when_the_learner_is_built():
    # tensorpack fetches None for a name without ":0"
    with pytest.raises(UnknownStateError, match=r"`step.los`, which no phase provides.*Did you mean `loss`"):
        testlearner(ProcessArrays("step.los", print))
    with pytest.raises(MissingStateError, match=r"needs `hyperparams.lr`, .* It has `learning_rate`"):
        testlearner(ProcessArrays("hyperparams.lr", print))
    with pytest.raises(DeclarationError) as caught:
        counting(ProcessArrays("params.layers.2.w", print), params={"layers": [{"w": jnp.zeros(1)}]})
    assert str(caught.value) == (
        "`params.layers` has no `2`.\n  where: the path `params.layers.2.w`\n"
        "  fix:   use the whole value: `params.layers`"
    )


# --- PrintArrays ------------------------------------------------------------------------------------------------------


def test_printed_lines_have_the_step_and_the_paths():
    file = io.StringIO()
    counting(every(PrintArrays(["step.loss", "step.aux"], file), steps=3), batches=6).fit(1)
    assert file.getvalue() == (
        "step 3  step.loss: 3.\nstep 3  step.aux.double: 6.\nstep 3  step.aux.row: [ 3. -3.]\n"
        "step 6  step.loss: 6.\nstep 6  step.aux.double: 12.\nstep 6  step.aux.row: [ 6. -6.]\n"
    )


def test_matrices_begin_on_a_new_line_and_long_ones_are_shortened():
    file = io.StringIO()
    params = {"long": jnp.zeros(1000), "matrix": jnp.eye(2)}
    counting(PrintArrays("params", file), params=params).fit(1)
    assert file.getvalue() == (
        "step 4  params.long: [0. 0. 0. ... 0. 0. 0.]\nstep 4  params.matrix:\n[[1. 0.]\n [0. 1.]]\n"
    )


# --- DumpArrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_each_step_has_a_file_with_the_values_by_path(tmp_path, steps_per_call):
    folder = tmp_path / "new" / "dumps"
    counting(DumpArrays(["step.loss", "step.aux", "params"], folder), steps_per_call=steps_per_call).fit(1)
    assert names(folder) == [f"arrays-0000000{step}.npz" for step in (1, 2, 3, 4)]
    found = dict(np.load(folder / "arrays-00000003.npz"))
    assert {name: array.tolist() for name, array in found.items()} == {
        "step.loss": 3.0, "step.aux.double": 6.0, "step.aux.row": [3.0, -3.0], "params.w": 0.0,
    }  # fmt: skip


def test_bfloat16_is_written_as_float32(tmp_path):
    counting(DumpArrays("params.w", tmp_path), params={"w": jnp.array([1.5, 3.0], jnp.bfloat16)}).fit(1)
    found = np.load(tmp_path / "arrays-00000004.npz")["params.w"]
    assert (found.dtype, found.tolist()) == (np.float32, [1.5, 3.0])


def test_the_newest_files_are_kept(tmp_path):
    (tmp_path / "notes.npz").touch()
    counting(every(DumpArrays("step.loss", tmp_path, prefix="loss", keep=2), steps=3), batches=13).fit(1)
    assert names(tmp_path) == ["loss-00000009.npz", "loss-00000012.npz", "notes.npz"]


def test_a_rewound_run_writes_its_files_again(tmp_path):
    dump = DumpArrays("step.loss", tmp_path, keep=3)
    learner = counting(dump, batches=2)
    learner.fit(1)
    saved, state = learner.state, dump.state_dict()
    learner.fit(2)  # up to step 6, and here the process is killed, with a file half written
    (tmp_path / ".arrays-00000007.npz.unfinished").touch()

    dump = DumpArrays("step.loss", tmp_path, keep=3)
    learner = counting(dump, batches=2)
    learner.state = saved
    dump.load_state_dict(state)
    learner.fit(1)
    assert names(tmp_path) == ["arrays-00000003.npz", "arrays-00000004.npz"]  # 1 and 2 were gone when 5 was written


def test_files_of_another_run_are_not_replaced(tmp_path, refused):
    counting(DumpArrays("params", tmp_path)).fit(1)
    before = (tmp_path / "arrays-00000004.npz").read_bytes()
    with refused(
        DeclarationError,
        f"`DumpArrays` would write to `{tmp_path}`, which contains files of another run.\n"
        f"  where: {tmp_path / 'arrays-00000004.npz'}\n"
        "  why:   this is a new run, which would overwrite them\n"
        "  fix:   use another folder, e.g. one per run\n"
        "     or: move the old files away",
    ):
        counting(DumpArrays("params", tmp_path)).fit(1)
    assert (tmp_path / "arrays-00000004.npz").read_bytes() == before
    counting(DumpArrays("params", tmp_path, prefix="others")).fit(1)


def test_an_incomplete_file_is_removed(tmp_path, monkeypatch):
    def full(file, **arrays):
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    learner = counting(DumpArrays("step.loss", tmp_path))
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        learner.fit(1)
    assert names(tmp_path) == []


def test_dump_arrays_rejects_invalid_arguments(tmp_path, refused):
    file = tmp_path / "file"
    file.touch()
    with refused(
        DeclarationError,
        f"`DumpArrays` cannot write to the folder `{file / 'dumps'}`.\n"
        f"  why:   `{file}` is not a writable folder\n"
        "  fix:   use another folder",
    ):
        DumpArrays("params", file / "dumps")
    with refused(DeclarationError, f"`keep` of `DumpArrays` must be a whole number of at least 1, not 0.\n{PERIODS}"):
        DumpArrays("params", tmp_path, keep=0)
    with refused(
        DeclarationError,
        "`prefix` of `DumpArrays` must be the beginning of a file name, not 'a/b'.\n  fix:   write e.g. `\"samples\"`",
    ):
        DumpArrays("params", tmp_path, prefix="a/b")


# --- DumpImages -------------------------------------------------------------------------------------------------------


def pixels(path):
    """Return what a PNG of 8 bits without filters holds."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    at, packed = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += length + 12
    assert depth == 8
    channels = {0: 1, 2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    return rows[:, 1:].reshape(height, width, channels)


def test_pixels_are_scaled_and_clipped_and_the_same_image_is_logged(tmp_path):
    params = {"image": jnp.array([[0.0, 0.5, 1.0], [2.0, -1.0, jnp.nan]])}
    learner = counting(DumpImages("params.image", tmp_path), Monitors(), params=params)
    learner.fit(1)
    assert names(tmp_path) == ["params.image-00000004.png"]
    expected = [[0, 127, 255], [255, 0, 0]]
    assert pixels(tmp_path / "params.image-00000004.png")[..., 0].tolist() == expected
    assert learner.cbstate["monitors"].latest("params.image").data[0, ..., 0].tolist() == expected


def test_several_images_are_numbered_and_colors_are_rgb(tmp_path):
    params = {"images": jnp.array([[[[10, 20, 30]]], [[[40, 50, 60]]]], jnp.float32)}  # [2, 1, 1, 3]
    counting(DumpImages("params.images", tmp_path, prefix="two", scale=1), params=params).fit(1)
    assert names(tmp_path) == ["two-00000004-0.png", "two-00000004-1.png"]
    assert pixels(tmp_path / "two-00000004-1.png").tolist() == [[[40, 50, 60]]]


def test_a_function_may_return_a_list_of_images(tmp_path):
    # in tensorpack the files are written, and then `put_image` fails
    def split(batch):
        return [np.full((2, 2), batch / 10), np.ones((2, 2))]

    learner = counting(every(DumpImages("step.loss", tmp_path, prefix="a", map_fn=split), steps=2), Monitors())
    learner.fit(1)
    assert names(tmp_path) == [f"a-0000000{step}-{i}.png" for step in (2, 4) for i in (0, 1)]
    assert pixels(tmp_path / "a-00000002-0.png")[0, 0, 0] == int(0.2 * 255)
    assert learner.cbstate["monitors"].latest("a").data.shape == (2, 2, 2, 1)


def test_images_of_different_sizes_are_logged_separately_and_the_newest_steps_are_kept(tmp_path):
    def two(loss):
        return [np.zeros((1, 1)), np.zeros((2, 2))]

    learner = counting(DumpImages("step.loss", tmp_path, prefix="a", map_fn=two, keep=1), Monitors())
    learner.fit(1)
    assert names(tmp_path) == ["a-00000004-0.png", "a-00000004-1.png"]
    assert learner.cbstate["monitors"].names() == ["a/0", "a/1"]


def test_values_that_are_not_images_are_rejected(tmp_path):
    learner = counting(DumpImages("params.w", tmp_path))
    with pytest.raises(DeclarationError, match=r"^An image has the shape \[h, w\], .* not uint8 of shape \(\)\."):
        learner.fit(1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": ["params"]}, "`DumpImages` takes the path of one value, not ['params'].\n"
         "  fix:   use one `DumpImages` per value"),
        ({"scale": 0}, "`scale` of `DumpImages` must be a number above 0, not 0.\n"
"  fix:   give a finite number above 0"),
        ({"map_fn": 3}, "`map_fn` of `DumpImages` must be a function of the value, not 3.\n"
         "  fix:   write e.g. `lambda kernel: kernel.transpose(3, 0, 1, 2)`"),
    ],
)  # fmt: skip
def test_dump_images_rejects_invalid_arguments(tmp_path, refused, arguments, text):
    with refused(DeclarationError, text):
        DumpImages(**{"name": "params.w", "folder": tmp_path, **arguments})
