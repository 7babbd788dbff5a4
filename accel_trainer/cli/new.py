"""`accel-trainer new FOLDER`: create a project with a recipe, configs, a README and a test.

example: accel-trainer new my-photos
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..core import filesystem
from ..core.errors import ConfigError, OutputError
from .common.output import tell
from .common.parser import CommandParser

_PACKAGE = Path(__file__).parents[1]
_PRESETS = "accelerate_configs"


class _Template(NamedTuple):
    """The flags of a first training, the data it needs, and the flags and setup of a small test.

    `look` are commands for what it has learned.
    """

    flags: str
    data: str
    test_flags: str
    test_setup: str = ""
    look: str = ""


_MAKE_PHOTOS = """    for index in range(16):
        path = tmp_path / "photos" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80 + index, 70), (index, 0, 0)).save(path)
"""
_PHOTOS = """Put your photos into `photos/`, in a folder for each class: `photos/cat/1.jpg`, `photos/dog/1.jpg`.

```bash
accel-trainer data photos --val-fraction 0.1      # sizes, duplicates and broken files
```
"""  # noqa: E501  # lines of the new file
_PREDICT = """accel-trainer evaluate runs/...                       # loss and accuracy
accel-trainer predict runs/... photos/cat             # the class of each photo in a folder
"""
_DIGITS = """Try it on scikit-learn's digits first. Then replace `--dataset digits` with
`cifar10` or `cifar100`, which are downloaded, or with a folder of small images of one size.
"""
_OWN = """`train.py` trains on a dataset of scikit-learn. Your data, model and loss go
into its three marked lines.
"""
_TEMPLATES = {
    "images": _Template(
        "--dataset photos --val-fraction 0.1",
        _PHOTOS,
        "--dataset photos --val-fraction 0.5 --image-size 64 --batch-size 2",
        _MAKE_PHOTOS,
        _PREDICT,
    ),
    "cifar": _Template("--dataset digits", _DIGITS, "--dataset digits"),
    "minimal": _Template("", _OWN, ""),
}
TEMPLATES = tuple(_TEMPLATES)

_README = """# {name}

## 1. The data

{data}
## 2. Train

```bash
accel-trainer plan train.py {flags}      # estimate its time and memory
python train.py {flags}
```

Each run has a folder in `runs/`. Press Ctrl-C to stop it; the same command resumes it.
`python train.py --help` lists the everyday flags, and `--dry-run` tries a few steps, a save and a resume.

## 3. Look at the results

```bash
accel-trainer runs                                    # all runs as a table
accel-trainer watch runs --open                       # follow them in the browser while they train
accel-trainer report runs --open                      # the same page, as a file to keep or send
{look}accel-trainer export runs/... --to model              # the weights for plain torch, with a model card
```

## 4. Make it yours

`train.py` is yours: the model, the data and the task. `config.yaml` holds your settings, and `pytest` checks
that training still takes a step, evaluates, saves and resumes. On several GPUs:

```bash
accel-trainer launch --config_file accelerate_configs/multi_gpu.yaml train.py --config config.yaml {flags}
```
"""  # noqa: E501  # lines of the new file

_CONFIG = """# python train.py --config config.yaml
# `python train.py --help-all` lists all settings, and the config.yaml of a run's folder has their values.
trainer:
  num_epochs: 10
batch:
  global_batch_size: 64
"""  # noqa: E501  # lines of the new file

_TEST = '''"""The recipe takes a step, evaluates, saves and continues."""

import subprocess
import sys
from pathlib import Path

{imports}
TRAIN = Path(__file__).parent / "train.py"


def test_a_dry_run_succeeds(tmp_path):
{setup}    flags = "{flags} --dry-run".split()
    subprocess.run([sys.executable, TRAIN, *flags], cwd=tmp_path, check=True)
'''


def main(argv: Sequence[str]) -> int:
    """Write the files of a new project into a folder that does not exist yet."""
    parser = CommandParser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to create")
    parser.add_argument(
        "--template", choices=TEMPLATES, default="images", help="the recipe to start from"
    )
    options = parser.parse_args(argv)
    folder: Path = options.folder
    if re.search(r"[\x00-\x1f\x7f]", str(folder)):
        raise ConfigError("NEW_FOLDER", f"{str(folder)!r} has a control character: leave it out")
    if os.path.lexists(folder):
        raise ConfigError("NEW_EXISTS", f"{folder} exists: choose a folder that does not")
    if not folder.parent.is_dir():
        raise ConfigError("NEW_FOLDER", f"{folder.parent} does not exist: create it first")
    files = _files(folder.resolve().name, options.template)
    try:
        (folder / _PRESETS).mkdir(parents=True)
        for path, data in files.items():
            (folder / path).write_bytes(data)
    except OSError as error:
        raise OutputError(
            "NEW_FOLDER",
            f"{folder} cannot be written ({error.strerror}): choose a different folder",
        ) from error
    flags = _TEMPLATES[options.template].flags
    command = f"cd {shlex.quote(str(folder))} && python train.py {flags}"
    tell(f"created {folder}: {command.rstrip()}")
    tell("next: see README.md for the layout of the data and the first commands")
    return 0


def _files(name: str, template: str) -> dict[str, bytes]:
    """Return the content of each file of a project, by its path."""
    flags, data, test_flags, setup, look = _TEMPLATES[template]
    recipe = _read(_template("recipes") / f"{template}.py").decode()
    imports = "from PIL import Image\n" if setup else ""
    texts = {
        "train.py": recipe.replace(f"recipes/{template}.py", "train.py"),
        "config.yaml": _CONFIG,
        "README.md": _README.format(name=name, data=data, flags=flags, look=look).replace(
            " \n", "\n"
        ),
        "test_train.py": _TEST.format(imports=imports, setup=setup, flags=test_flags),
        ".gitignore": "runs/\n__pycache__/\n",
    }
    presets = {
        f"{_PRESETS}/{path.name}": _read(path)
        for path in sorted(_template(_PRESETS).glob("*.yaml"))
    }
    return {path: text.encode() for path, text in texts.items()} | presets


def _read(path: Path) -> bytes:
    return filesystem.read_file(path, max_bytes=1 << 20)


def _template(name: str) -> Path:
    """Return the path of a folder of the repository, which a wheel holds inside the package."""
    inside = _PACKAGE / "templates" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
