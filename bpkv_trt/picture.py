"""Pictures that commands draw: PNG files, without a display."""

import io
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bpkv_trt.documents import write_whole
from bpkv_trt.errors import InputError

# Okabe and Ito's: told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
DPI = 130


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure as PNG. Raises InputError, naming the picture, where it cannot be; no part of it is left."""
    FigureCanvasAgg(figure)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=DPI, bbox_inches="tight")
    try:
        write_whole(path, picture.getvalue())
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"The picture {path} cannot be written ({reason}). The results are printed, and kept where --json is "
            "given: free space, then run the same command again."
        ) from None
