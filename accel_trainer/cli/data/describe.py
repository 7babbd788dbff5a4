"""`accel-trainer data SOURCE`: check photos: classes, sizes, formats, duplicates, broken files.

SOURCE is read in the same way as `recipes/images.py --dataset`, and every photo is decoded. The
exit code is 65 if a broken photo or the layout of the data would stop a run, else 0.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median_low

import numpy as np
import torch
from tqdm import tqdm

from ...core.errors import DataError, ExitCode, UserError
from ...core.wording import counted
from ...vision import EvalTransform, PhotoSplit, load_photos
from ...vision.data.photo_decode import decode_photo, format_of, opened_image
from ...vision.data.pixel_range import PixelRange, range_of
from ...vision.sources.photo_splits import PhotoSplits, load_splits
from ..common.output import both_ends, format_table, tell
from ..common.own_files import refuse_other_file, write_own_file
from ..common.parser import CommandParser
from ..common.threads import decoding_threads, in_order
from .page import draw_page

_NUM_LISTED = 5
_EXAMPLE = (
    "example: accel-trainer data photos --val-fraction 0.1 --html photos.html --image-size 128"
)


@dataclass(frozen=True)
class Photo:
    """What is known of a photo, or the problem that makes it unusable.

    `height` and `width` are measured after the photo is turned upright, `kind` is its format and
    mode, and `sha256` the hash of its bytes. `pixels` is the range of its pixels after decoding;
    `is_plain` is true if they all have one colour, and `has_more` if there are frames or pages
    behind the one that is read.
    """

    name: str
    height: int
    width: int
    kind: str
    sha256: bytes
    problem: str | None
    pixels: PixelRange = PixelRange()
    is_plain: bool = False
    has_more: bool = False


def main(argv: Sequence[str]) -> int:
    """Print the description; return 65 if a run would stop."""
    parser = CommandParser(__doc__, _EXAMPLE)
    parser.add_argument(
        "source", help="photos, parquet or tar files, the output of save_to_disk, or OWNER/NAME"
    )
    fraction_help = "set this fraction of the photos aside, as the run will"
    parser.add_argument("--val-fraction", type=float, default=0.0, metavar="F", help=fraction_help)
    html_help = "write an offline page of photos as the model sees them"
    parser.add_path("--html", "FILE", html_help)
    size_help = "the size of the photos on that page; default: 224"
    parser.add_number("--image-size", size_help, default=224)
    parser.add_data_options()
    options = parser.parse_args(argv)
    transform = EvalTransform(size=options.image_size)
    if options.html is not None:
        refuse_other_file(options.html, "--html")
    columns = {"image_column": options.image_column, "label_column": options.label_column}
    found = load_splits(options.source, **columns, cache_dir=options.cache_dir)
    torch.set_num_threads(1)
    with decoding_threads(options.num_workers) as threads:
        photos = {
            name: list(_examine(name, split, threads)) for name, split in found.splits.items()
        }
    tell("\n\n".join(describe(options.source, found, photos)))
    if options.html is not None:
        page = draw_page(options.source, found, transform)
        write_own_file(options.html, page.encode(), "--html")
        tell(f"\n{options.html}")
    try:
        chosen = load_photos(
            options.source,
            **columns,
            val_fraction=options.val_fraction,
            cache_dir=options.cache_dir,
        )
    except UserError as error:
        tell(f"\na run would stop: {error}")
        return int(error.exit_code)
    for note in chosen.notes:
        if note not in found.notes:
            tell(f"\n{note}")
    is_broken = any(photo.problem for split in photos.values() for photo in split)
    return ExitCode.DATA if is_broken else ExitCode.DONE


def _examine(name: str, split: PhotoSplit, threads: ThreadPoolExecutor) -> Iterator[Photo]:
    numbers = tqdm(range(len(split)), desc=f"reading {name}", unit="photo", disable=None)
    return in_order(threads, partial(examine_photo, split), numbers)


def examine_photo(split: PhotoSplit, index: int) -> Photo:
    """Decode a photo and return what is known of it."""
    name = split.name_of(index)
    try:
        data = split.encoded_at(index)
        pixels = decode_photo(data, name)
        kind = format_of(data, name)
        with opened_image(data, name) as image:
            # The second picture of an MPO, which cameras write, is a preview or a depth map.
            has_more = getattr(image, "is_animated", False) and image.format != "MPO"
    except DataError as error:
        return Photo(name, 0, 0, "", b"", error.message)
    height, width, _ = pixels.shape
    return Photo(
        name,
        height,
        width,
        kind,
        hashlib.sha256(data).digest(),
        problem=None,
        pixels=range_of(pixels),
        is_plain=bool((pixels == pixels[0, 0]).all()),
        has_more=has_more,
    )


def describe(
    source: str, found: PhotoSplits, photos: Mapping[str, Sequence[Photo]]
) -> Iterator[str]:
    """Yield the paragraphs of the description."""
    everything = [photo for split in photos.values() for photo in split]
    intact = [photo for photo in everything if photo.problem is None]
    problems = [photo.problem for photo in everything if photo.problem]
    yield f"{source}: {len(everything):,} photos of {len(found.class_names):,} classes"
    yield format_table(["class", *photos], _class_rows(found))
    if intact:
        yield _describe_sizes(intact)
        yield "\n".join(_describe_pixels(intact))
    yield _describe_duplicates(photos)
    yield "\n".join([*found.facts, *found.notes])
    if problems:
        yield _first_lines(f"{len(problems):,} broken:", problems)


def _class_rows(found: PhotoSplits) -> list[list[str]]:
    """Return a row per class with its photos in each split, the largest class first.

    Of many classes only the largest and the smallest are shown.
    """
    num_classes = len(found.class_names)
    by_split = [np.bincount(split.labels, minlength=num_classes) for split in found.splits.values()]
    counts = np.stack(by_split, axis=1)
    order = np.argsort(-counts.sum(1), kind="stable").tolist()
    rows = [[found.class_names[at], *(f"{count:,}" for count in counts[at])] for at in order]
    totals = ["(all)", *(f"{count:,}" for count in counts.sum(0))]
    return [*both_ends(rows), totals]


def _describe_sizes(photos: Sequence[Photo]) -> str:
    shorter = [min(photo.height, photo.width) for photo in photos]
    sizes = Counter((photo.width, photo.height) for photo in photos)
    (width, height), count = sizes.most_common(1)[0]
    by_kind = Counter(photo.kind for photo in photos).most_common()
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in by_kind)
    return (
        f"shorter side: {min(shorter):,} to {max(shorter):,} pixels, "
        f"median {median_low(shorter):,}\n"
        f"sizes: {len(sizes):,}, most often {width:,}x{height:,} ({count:,} times)\n"
        f"formats: {kinds}"
    )


def _describe_pixels(photos: Sequence[Photo]) -> Iterator[str]:
    """Yield lines on the range of the pixels, and on photos of which little is seen."""
    ranges: dict[str, PixelRange] = defaultdict(PixelRange)
    for photo in photos:
        ranges[photo.kind] |= photo.pixels
    listed = ", ".join(f"{found.low} to {found.high} in {kind}" for kind, found in ranges.items())
    yield f"pixel values, between 0 and 255: {listed}"
    plain = [photo.name for photo in photos if photo.is_plain]
    longer = [photo.name for photo in photos if photo.has_more]
    for what, names in (
        ("one colour", plain),
        ("several frames or pages, of which the first is read", longer),
    ):
        if names:
            yield _first_lines(f"{what}: {len(names):,}", names)


def _describe_duplicates(photos: Mapping[str, Sequence[Photo]]) -> str:
    """Return lines that name photos with the same bytes, first those in different splits.

    A photo in two splits makes an evaluation look better than it is.
    """
    places: dict[bytes, list[tuple[str, str]]] = defaultdict(list)
    for split, members in photos.items():
        for photo in members:
            if photo.problem is None:
                places[photo.sha256].append((split, photo.name))
    groups = [group for group in places.values() if len(group) > 1]
    if not groups:
        return "duplicates: none"
    leaks = [group for group in groups if len({split for split, _ in group}) > 1]
    num_more = sum(len(group) - 1 for group in groups)
    counts = (
        f"duplicates: {counted(num_more, 'photo')} identical to an earlier one, "
        f"{len(leaks):,} of them in a different split"
    )
    others = [group for group in groups if group not in leaks]
    shown = [" = ".join(name for _, name in group[:3]) for group in [*leaks, *others]]
    return _first_lines(counts, shown)


def _first_lines(heading: str, lines: Sequence[str]) -> str:
    """Return the first lines below a heading, indented, and the number of the others."""
    num_more = len(lines) - _NUM_LISTED
    more = [f"and {num_more:,} more"] if num_more > 0 else []
    return "\n  ".join([heading, *lines[:_NUM_LISTED], *more])
