"""`DumpImages`: a value as PNG files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any

from fluxcb._declare.access import Append
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import number_above
from fluxcb.callbacks.dump_arrays import DumpsFiles
from fluxcb.callbacks.numbered_files import NumberedFiles
from fluxcb.logging.encoding import png_of
from fluxcb.logging.loggables import Image

__all__ = ["DumpImages"]


class DumpImages(DumpsFiles):
    """Write a value as PNG: after each training step if it is the step's, else at Trigger.

    The value, or what `map_fn` makes of it, is an image `[h, w]` or `[h, w, c]`, several `[n, h, w, c]`, or a list of
    images; `c` is 1, 3 (RGB) or 4 (RGBA). A pixel is `clip(value * scale, 0, 255)`, rounded down. One image goes to
    `<folder>/<prefix>-00000012.png`, with the number of the step; several go to `-0.png`, `-1.png` and so on. If there
    is a `Monitors`, the same pixels are put as `<prefix>`.

    Files are complete or not there; what happens where a run resumes is told in `DumpArrays`. Under several processes,
    process 0 writes.

    Args:
        name: Path of the value: `step.fake`, `params.conv.kernel`.
        folder: Where to; made if it does not exist.
        prefix: What the files' names begin with; the path by default.
        map_fn: `map_fn(value)` returns the image or images.
        scale: What 1 is as a pixel; 1 for values that go up to 255.
        keep: Of how many steps images are kept, the newest; None for all.

    Access:
        What the name says: Read.
        cbstate.monitors: Append (optional).

    Runs:
        FitBegin x AbstractTrainingPhase (host).
        StepEnd x AbstractTrainingPhase (host, if the name is a step's).
        Trigger x AbstractTrainingPhase (host, if it is not).

    Cost:
        As `DumpArrays`. Compressing takes about 10 ms per million pixels.

    Raises:
        DeclarationError: The name is no path, the folder cannot be written to, or `scale` or `keep` is no number above
            0; when a fit begins, there are files of another run; while training, the value is no image.
        OSError: While training, a file cannot be written.

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
        if map_fn is not None and not callable(map_fn):
            raise DeclarationError(
                f"`map_fn` of `DumpImages` must be a function of the value, not {map_fn!r}.",
                fix="e.g. `lambda kernel: kernel.transpose(3, 0, 1, 2)`",
            )
        self.map_fn = map_fn
        self.scale = number_above(0, scale, "`scale` of `DumpImages`")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        access = self._values.access()
        return {**access, "cbstate": {**access.get("cbstate", {}), "monitors": Append(optional=True)}}

    def process(self, learner: Any, values: Mapping[str, Any]) -> None:
        """Write the images, and put them."""
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
        """Return a value as images; a list of images of one size as one."""
        import numpy as np

        several = isinstance(value, list | tuple)
        pixels = [self._pixels(item) for item in (value if several else [value])]
        if not pixels:
            raise DeclarationError(f"`map_fn` of {self!r} returned no images.", fix="return at least one")
        if several and len(pixels) > 1 and len({p.shape for p in pixels}) == 1:
            return [Image(np.concatenate([Image(p).data for p in pixels]))]
        return [Image(p) for p in pixels]

    def _pixels(self, value: Any) -> Any:
        import numpy as np

        array = np.asarray(value)
        if array.dtype.kind not in "biuf" and array.dtype.kind != "V":
            raise DeclarationError(f"{self!r} makes images of real numbers, not of {array.dtype}.")
        scaled = np.nan_to_num(array.astype(np.float32) * self.scale, nan=0.0)
        return np.clip(scaled, 0, 255).astype(np.uint8)


def _write(image: Image, file: IO[bytes]) -> None:
    file.write(png_of(image))
