"""Names allowed in a saved model: ASCII only, since Python folds other letters to ASCII in code."""

from __future__ import annotations

import keyword
import re
from typing import Any

from smcp_fx.errors import CheckpointError

_IDENTIFIER = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,499}")
#: Text between two quotes in generated code: no quote, backslash, line break or dot.
_PATH_ATOM = re.compile(r"(?!__)[A-Za-z0-9_ !#$%&()*+,/:;<=>?@\[\]^`{|}~-]{1,500}")
#: Names that generated code itself uses; an argument of the same name would shadow them.
_TAKEN = frozenset(
    "NoneType builtins device fx_pytree getattr inf math nan operator pytree self slice timm torch "
    "torchvision".split()
)


def is_identifier(name: Any) -> bool:
    """Whether the name may appear in generated code."""
    return isinstance(name, str) and bool(_IDENTIFIER.fullmatch(name)) and not keyword.iskeyword(name)


def check_identifier(name: Any, where: str) -> str:
    """Return a name if it may appear in generated code; `CheckpointError` for any other."""
    if is_identifier(name):
        return str(name)
    raise CheckpointError(
        f"{where}: {str(name)[:80]!a} is not a name that a saved model may hold; use an identifier of the letters "
        "a to z, digits and '_'"
    )


def check_argument(name: Any, where: str) -> str:
    """As `check_identifier`, for an argument of the model."""
    if name in _TAKEN:
        raise CheckpointError(
            f"{where}: the generated code needs the name {name!r} itself; rename the argument"
        )
    return check_identifier(name, where)


def check_path(path: Any, where: str) -> str:
    """Return a dotted module path if its parts may appear in generated code, or raise `CheckpointError`."""
    if isinstance(path, str) and all(_PATH_ATOM.fullmatch(atom) for atom in path.split(".")):
        return path
    raise CheckpointError(
        f"{where}: {str(path)[:80]!a} is not a path that a saved model may hold; name modules with ASCII letters, "
        "digits and signs other than quotes and backslashes, not beginning with '__'"
    )
