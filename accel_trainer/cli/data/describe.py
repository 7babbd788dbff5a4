"""`accel-trainer data SOURCE`: check photos: classes, sizes, formats, duplicates, broken files.

SOURCE is read in the same way as `recipes/images.py --dataset`, and every photo is decoded. The
exit code is 65 if a broken photo or the layout of the data would stop a run, else 0.

example: accel-trainer data photos --val-fraction 0.1 --html photos.html --image-size 128
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low

import numpy as np
import torch
from tqdm import tqdm

from ...core.errors import DataError, ExitCode, UserError
from ...core.wording import counted
from ...vision import EvalTransform, Photos, PhotoSplit, load_photos
from ...vision.data.eval_transform import shrink_for
from ...vision.data.photo_decode import Pixels, decode_photo, format_of, opened_image, read_header
from ...vision.data.pixel_range import range_of
from ...vision.sources.photo_splits import PhotoSplits, load_splits
from ..common.output import both_ends, format_table, tell
from ..common.own_files import refuse_other_file, write_own_file
from ..common.parser import CommandParser
from ..common.threads import decoding_threads, in_order
from .page import draw_page

_NUM_LISTED = 5


@dataclass(frozen=True)
class Photo:
    """What is known of a photo, or the problem that makes it unusable.

    `height` and `width` are measured after the photo is turned upright, `kind` is its format and
    mode, and `sha256` the hash of its pixels after decoding. `is_plain` is true if
    these have one colour, `is_narrow` if they use less than an eighth of their range, and
    `has_more` if there are frames or pages behind the one that is read, and `can_shrink` if it may
    be decoded at a smaller size.
    """

    name: str
    height: int
    width: int
    kind: str
    sha256: bytes
    problem: str | None
    label: int = -1
    is_plain: bool = False
    is_narrow: bool = False
    has_more: bool = False
    can_shrink: bool = False


def main(argv: Sequence[str]) -> int:
    """Print the description; return 65 if a run would stop."""
    parser = CommandParser(__doc__)
    parser.add_source()
    fraction_help = "hold out this fraction of the photos, as the run will"
    parser.add_argument("--val-fraction", type=float, default=0.0, metavar="F", help=fraction_help)
    html_help = "write an offline page of photos as the model sees them"
    parser.add_path("--html", "FILE", html_help)
    size_help = "the size of the model's input, also on that page; default: 224"
    parser.add_number("--image-size", size_help, default=224)
    parser.add_data_options()
    options = parser.parse_args(argv)
    transform = EvalTransform(size=options.image_size)
    if options.html is not None:
        refuse_other_file(options.html, "--html")
    found = load_splits(
        options.source,
        image_column=options.image_column,
        label_column=options.label_column,
        cache_dir=options.cache_dir,
    )
    chosen = _load_as_a_run(options)
    if options.val_fraction > 0 and isinstance(chosen, Photos):
        sides = {"train": chosen.train, "validation": chosen.val}
        found = replace(found, splits={**found.splits, **sides})
    torch.set_num_threads(1)
    with decoding_threads(options.num_workers) as threads:
        photos = {
            name: list(_examine(name, split, threads)) for name, split in found.splits.items()
        }
    tell("\n\n".join(describe(options.source, found, photos, transform)))
    if options.html is not None:
        page = draw_page(options.source, found, transform)
        write_own_file(options.html, page.encode(), "--html")
        tell(f"\n{options.html}")
    if isinstance(chosen, UserError):
        tell(f"\na run would stop: {chosen}")
        return int(chosen.exit_code)
    for note in chosen.notes:
        if note not in found.notes:
            tell(f"\n{note}")
    is_broken = any(photo.problem for split in photos.values() for photo in split)
    return ExitCode.DATA if is_broken else ExitCode.DONE


def _load_as_a_run(options: argparse.Namespace) -> Photos | UserError:
    """Return the photos of a run with these options, or the error that would stop it."""
    try:
        return load_photos(
            options.source,
            image_column=options.image_column,
            label_column=options.label_column,
            val_fraction=options.val_fraction,
            cache_dir=options.cache_dir,
        )
    except UserError as error:
        return error


def _examine(name: str, split: PhotoSplit, threads: ThreadPoolExecutor) -> Iterator[Photo]:
    numbers = tqdm(range(len(split)), desc=f"reading {name}", unit="photo", disable=None)
    return in_order(threads, partial(examine_photo, split), numbers)


def examine_photo(split: PhotoSplit, index: int) -> Photo:
    """Decode a photo and return what is known of it."""
    name = split.name_of(index)
    try:
        data = split.encoded_at(index)
        header = read_header(data, name)
        pixels = decode_photo(data, name, header=header)
        kind = format_of(data, name)
        with opened_image(data, name) as image:
            # The second picture of an MPO, which cameras write, is a preview or a depth map.
            has_more = getattr(image, "is_animated", False) and image.format != "MPO"
    except DataError as error:
        return Photo(name, 0, 0, "", b"", problem=error.message)
    height, width, _ = pixels.shape
    return Photo(
        name,
        height,
        width,
        kind,
        hash_of(pixels),
        problem=None,
        label=int(split.labels[index]),
        is_narrow=range_of(pixels).is_narrow,
        is_plain=bool((pixels == pixels[0, 0]).all()),
        has_more=has_more,
        can_shrink=header.is_plain_jpeg,
    )


def hash_of(pixels: Pixels) -> bytes:
    """Return the SHA-256 of a photo's size and pixels [H, W, 3], however they are encoded."""
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()


def describe(
    source: str,
    found: PhotoSplits,
    photos: Mapping[str, Sequence[Photo]],
    transform: EvalTransform,
) -> Iterator[str]:
    """Yield the paragraphs of the description."""
    everything = [photo for split in photos.values() for photo in split]
    intact = [photo for photo in everything if photo.problem is None]
    problems = [photo.problem for photo in everything if photo.problem]
    yield f"{source}: {len(everything):,} photos of {len(found.class_names):,} classes"
    yield format_table(["class", *photos], _class_rows(found))
    if intact:
        yield _describe_sizes(intact, transform)
        if lines := list(_describe_pixels(intact, found.class_names)):
            yield "\n".join(lines)
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


def _describe_sizes(photos: Sequence[Photo], transform: EvalTransform) -> str:
    shorter = [min(photo.height, photo.width) for photo in photos]
    sizes = Counter((photo.width, photo.height) for photo in photos)
    (width, height), count = sizes.most_common(1)[0]
    by_kind = Counter(photo.kind for photo in photos).most_common()
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in by_kind)
    num_shrunk = sum(
        photo.can_shrink
        and shrink_for(transform.box(photo.height, photo.width), transform.size) > 1
        for photo in photos
    )
    return (
        f"shorter side: {min(shorter):,} to {max(shorter):,} pixels, "
        f"median {median_low(shorter):,}\n"
        f"sizes: {len(sizes):,}, most often {width:,}x{height:,} ({count:,} times)\n"
        f"formats: {kinds}\n"
        f"decoded at 1/2, 1/4 or 1/8 of their size, for {transform.size} pixels: {num_shrunk:,}"
    )


def _describe_pixels(photos: Sequence[Photo], class_names: Sequence[str]) -> Iterator[str]:
    """Yield lines on photos of which little is seen."""
    for what, found in (
        ("one colour", [photo for photo in photos if photo.is_plain]),
        ("almost no contrast", [photo for photo in photos if photo.is_narrow]),
        (
            "several frames or pages, of which the first is read",
            [photo for photo in photos if photo.has_more],
        ),
    ):
        if found:
            ((label, count),) = Counter(photo.label for photo in found).most_common(1)
            heading = f"{what}: {len(found):,} ({count:,} of class {class_names[label]})"
            yield _first_lines(heading, [photo.name for photo in found])


def _describe_duplicates(photos: Mapping[str, Sequence[Photo]]) -> str:
    """Return lines that name photos with the same pixels.

    First come those in different classes, one of which is wrong, then those in different splits,
    which make an evaluation look better than it is.
    """
    places: dict[bytes, list[tuple[str, Photo]]] = defaultdict(list)
    for split, members in photos.items():
        for photo in members:
            if photo.problem is None:
                places[photo.sha256].append((split, photo))
    groups = [group for group in places.values() if len(group) > 1]
    if not groups:
        return "duplicates: none"
    pairs = [(group[0], other) for group in groups for other in group[1:]]
    num_leaks = sum(first[0] != other[0] for first, other in pairs)
    num_mistakes = sum(first[1].label != other[1].label for first, other in pairs)
    counts = (
        f"duplicates: {counted(len(pairs), 'photo')} identical to an earlier one, "
        f"{num_leaks:,} of them in a different split, {num_mistakes:,} in a different class"
    )
    groups.sort(key=_rank_of_copies)
    return _first_lines(
        counts, [" = ".join(photo.name for _, photo in group[:3]) for group in groups]
    )


def _rank_of_copies(group: Sequence[tuple[str, Photo]]) -> tuple[bool, bool]:
    """Return a key that is smallest for copies in two classes, then for those in two splits."""
    return len({photo.label for _, photo in group}) < 2, len({split for split, _ in group}) < 2


def _first_lines(heading: str, lines: Sequence[str]) -> str:
    """Return the first lines below a heading, indented, and the number of the others."""
    num_more = len(lines) - _NUM_LISTED
    more = [f"and {num_more:,} more"] if num_more > 0 else []
    return "\n  ".join([heading, *lines[:_NUM_LISTED], *more])
