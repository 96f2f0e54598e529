"""Pictures that commands draw: PNG files, without a display."""

import io
from collections.abc import Iterable
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from bpkv_trt.documents import check_directory, write_whole
from bpkv_trt.errors import InputError

# Okabe and Ito's: told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
DPI = 130
MARK = {"Software": "bpkv-trt"}  # in the file


def check_pictures(directory: Path, names: Iterable[str]) -> None:
    """Refuse, before any work is done, a directory where pictures could not or must not be written; raises InputError.

    names: of the pictures, as patterns without `.png`. Those that are there are replaced where we drew them.
    """
    check_directory(directory)
    for path in (path for name in names for path in directory.glob(f"{name}.png")):
        if not _is_ours(path):
            raise InputError(
                f"{path} is there and was not drawn by bpkv, so it is left as it is; give --plot another directory, or "
                "move that file away."
            )


def _is_ours(path: Path) -> bool:
    try:
        with Image.open(path) as picture:
            return bool(MARK.items() <= picture.info.items())
    except (OSError, ValueError, SyntaxError):  # what Pillow makes of files that are no pictures
        return False


def save_pictures(figures: Iterable[tuple[str, Figure]], directory: Path) -> list[Path]:
    """Write figures by their names into `directory`, which is made where it is missing; returns the files.

    Raises InputError, naming the picture, where one cannot be written; no part of it is left.
    """
    directory.mkdir(exist_ok=True)
    files = []
    for name, figure in figures:
        files.append(directory / f"{name}.png")
        _save(figure, files[-1])
    return files


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=DPI, bbox_inches="tight", metadata=MARK)
    try:
        write_whole(path, picture.getvalue())
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"The picture {path} cannot be written ({reason}). The results are printed, and kept where --json is "
            "given: free space, then run the same command again."
        ) from None
