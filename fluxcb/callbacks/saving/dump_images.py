"""`DumpImages`: write a value as PNG files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any

from fluxcb._declare.access import Append
from fluxcb._declare.learner_view import LearnerView
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import finite_number, function_of
from fluxcb.callbacks.saving.dump_arrays import FileDumper
from fluxcb.callbacks.saving.numbered_files import NumberedFiles
from fluxcb.logging.encoding import png_of
from fluxcb.logging.loggables import Image

__all__ = ["DumpImages"]


class DumpImages(FileDumper):
    """Write a named value as PNG files.

    Files are written after each training step if the path begins with `step`, and at Trigger otherwise. The value, or
    the result of `map_fn`, must be an image `[h, w]` or `[h, w, c]`, a batch of images `[n, h, w, c]`, or a list of
    images; `c` is 1, 3 (RGB) or 4 (RGBA). A pixel is `clip(value * scale, 0, 255)`, rounded down. A single image is
    written to `<folder>/<prefix>-00000012.png`, with the number of the step. Several images are written to
    `<prefix>-00000012-0.png`, `<prefix>-00000012-1.png` and so on. If there is a `Monitors`, the callback also logs the
    images under the name `<prefix>`.

    Files are written atomically. See `DumpArrays` for resumed runs. In a multi-host run, only process 0 writes files.

    Args:
        name: The path of the value, such as `step.fake` or `params.conv.kernel`.
        folder: The output directory. It is created if it does not exist.
        prefix: The beginning of the file names; the path by default.
        map_fn: `map_fn(value)` returns one image or several.
        scale: Factor from values to pixels: 255 for values between 0 and 1, or 1 for values between 0 and 255.
        keep: Number of most recent steps whose images are kept; None keeps all.

    Access:
        The path in `name`: Read.
        cbstate.monitors: Append (optional).

    Runs:
        FitBegin x AbstractTrainingPhase (host).
        StepEnd x AbstractTrainingPhase (host, if the path begins with `step`).
        Trigger x AbstractTrainingPhase (host, otherwise).

    Cost:
        The cost of `DumpArrays`. Compression takes about 10 ms per million pixels.

    Raises:
        DeclarationError: The path is invalid, the directory is not writable, or `scale` or `keep` is not positive. When
            a fit begins: the directory contains files of another run. During training: the value is not an image.
        OSError: During training, a file cannot be written.

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from pathlib import Path
        >>> from fluxcb.callbacks import DumpImages
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"filters": jnp.ones((2, 5, 5, 3))},
        ...     lambda params, batch, key: jnp.sum(params["filters"] * batch),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(())],
        ...     callbacks=[DumpImages("params.filters", "images", prefix="filters")],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(1)
        >>> [path.name for path in sorted(Path("images").iterdir())]
        ['filters-00000001-0.png', 'filters-00000001-1.png']

    Source:
        tensorpack, `DumpTensorAsImage` and `DumpParamAsImage`.
    """

    def __init__(
        self,
        name: str,
        folder: str | os.PathLike[str],
        *,
        prefix: str | None = None,
        map_fn: Callable[[Any], Any] | None = None,
        scale: float = 255.0,
        keep: int | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise DeclarationError(
                f"`DumpImages` takes the path of one value, not {name!r}.", fix="use one `DumpImages` per value"
            )
        super().__init__(name, NumberedFiles(folder, name if prefix is None else prefix, keep, "DumpImages"))
        if map_fn is not None:
            example = "lambda kernel: kernel.transpose(3, 0, 1, 2)"
            function_of(map_fn, "`map_fn` of `DumpImages`", "value", example=example)
        self.map_fn = map_fn
        self.scale = finite_number(scale, "`scale` of `DumpImages`", above=0)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        access = self._values.access()
        return {**access, "cbstate": {**access.get("cbstate", {}), "monitors": Append(optional=True)}}

    def process(self, learner: LearnerView, values: Mapping[str, Any]) -> None:
        """Write the images, and log them if there is a `Monitors`."""
        (value,) = values.values()
        images = self._images(value if self.map_fn is None else self.map_fn(value))
        single = [Image(pixels) for image in images for pixels in image.data]
        endings = [".png"] if len(single) == 1 else [f"-{i}.png" for i in range(len(single))]
        self._files.write(
            learner.progress.step, {e: partial(_write, image) for e, image in zip(endings, single, strict=True)}
        )
        if "monitors" in learner.cbstate:
            for i, image in enumerate(images):
                name = self._files.prefix if len(images) == 1 else f"{self._files.prefix}/{i}"
                learner.cbstate.monitors.put(name, image)

    def _images(self, value: Any) -> list[Image]:
        """Return the images of a value. A list of images with equal shapes becomes a single batch."""
        import numpy as np

        several = isinstance(value, list | tuple)
        pixels = [self._pixels(item) for item in (value if several else [value])]
        if not pixels:
            raise DeclarationError(f"`map_fn` of {self!r} returned no images.", fix="return at least one image")
        if several and len(pixels) > 1 and len({p.shape for p in pixels}) == 1:
            return [Image(np.concatenate([Image(p).data for p in pixels]))]
        return [Image(p) for p in pixels]

    def _pixels(self, value: Any) -> Any:
        import numpy as np

        array = np.asarray(value)
        if array.dtype.kind not in "biuf" and array.dtype.kind != "V":
            raise DeclarationError(f"{self!r} can only write arrays of real numbers as images, not {array.dtype}.")
        scaled = np.nan_to_num(array.astype(np.float32) * self.scale, nan=0.0)
        return np.clip(scaled, 0, 255).astype(np.uint8)


def _write(image: Image, file: IO[bytes]) -> None:
    file.write(png_of(image))
