"""What an object still holds: for tests that nothing is kept of what has ended."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, FunctionType, ModuleType


def held(root: object) -> set[str]:
    """Return all strings that are reachable from an object, but not through modules, classes and functions."""
    seen, todo, found = dict[int, object](), [root], set[str]()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | BuiltinFunctionType):
            continue
        seen[id(one)] = one
        if isinstance(one, str):
            found.add(one)
        todo += [*gc.get_referents(one), *(one if isinstance(one, dict) else ())]  # it leaves out keys of text
    return found
