"""A thin, exact training toolkit over HuggingFace accelerate.

The public names are in `api`; `commands` and `vision` have more.
"""

import os
from typing import TYPE_CHECKING, Any

from .core.version import package_version
from .public_names import modules_by_name, public_name

_API = f"{__name__}.api"

# Otherwise OpenMP's threads keep their cores while they wait for each other: a small net then takes
# several times as long where anything else runs. OpenMP looks when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    __version__: str
    from .api import *  # noqa: F403  # exactly the names of its `__all__`
else:

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted(modules_by_name(_API))
        if name == "__version__":
            return package_version()
        return public_name(_API, name)

    def __dir__() -> list[str]:
        return sorted(modules_by_name(_API))
