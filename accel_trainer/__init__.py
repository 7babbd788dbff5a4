"""A thin, exact training toolkit over HuggingFace accelerate.

The public names are those of `api`, which is imported when the first of them is used: commands that
only read files start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .removed import refuse_removed

if TYPE_CHECKING:
    from .api import *  # noqa: F403  # exactly the names of its `__all__`
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        refuse_removed(name)
        return getattr(import_module(f"{__name__}.api"), name)

    def __dir__() -> list[str]:
        return sorted(import_module(f"{__name__}.api").__all__)
