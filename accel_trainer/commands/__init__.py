"""What commands on runs are made of: the commands in `lab` use nothing else of this package.

They read runs, start them again with changes, compare what comes of it, and show it.
"""

from typing import TYPE_CHECKING, Any

from ..public_names import modules_by_name, public_name

_API = f"{__name__}.api"

if TYPE_CHECKING:
    from .api import *  # noqa: F403  # exactly the names of its `__all__`
else:

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted(modules_by_name(_API))
        return public_name(_API, name)

    def __dir__() -> list[str]:
        return sorted(modules_by_name(_API))
