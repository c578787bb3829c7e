"""The declaration that grants a handler's access, as errors name it, and the edit that adds a path to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Permission, line_to_add, lookup, recommended, writes
from fluxcb._declare.callback import Callback
from fluxcb._declare.declared import BoundHandler, Declared
from fluxcb._declare.proxy import ProxyCallback, access_declarer
from fluxcb._typing import StatePath

__all__ = ["HandlerAccess", "access_source"]


def access_source(handler: BoundHandler) -> Declared:
    """Return the declarations to name in errors about the access of a handler.

    These are the ones of its callback, except for a handler with its own `access`, and for a handler of a wrapper class
    that has no `stateaccess`: an edit of the callback's `stateaccess` would not help there.
    """
    owner = handler.handler.owner or handler.declared.callback
    inherits = isinstance(owner, ProxyCallback) and access_declarer(owner) is not owner
    if handler.handler.access is None and not inherits:
        return handler.declared
    return HandlerAccess(handler, owner, inherits=inherits)


class HandlerAccess(Declared):
    """The declarations of a callback, with the access of one handler in place of that of the class.

    Args:
        handler: The handler.
        owner: The callback or the wrapper that defines the handler.
        inherits: Whether `owner` is a wrapper whose access is that of the wrapped callback.
    """

    def __init__(self, handler: BoundHandler, owner: Callback, *, inherits: bool) -> None:
        vars(self).update(vars(handler.declared))
        self._whole, self._owner, self._inherits = handler.declared, owner, inherits
        self._narrowed_access = handler.handler.access is not None
        # `where` is `Class.method  file:line`, and the sentences need the method alone.
        self._method = handler.where.partition("  ")[0]
        self.access = handler.access
        self.where = f"access of {handler.where}" if self._narrowed_access else handler.where

    @property
    def access_owner(self) -> str:
        """The place of the access declaration, for messages."""
        return f"`access` in the `@on` of `{self._method}`" if self._narrowed_access else self._whole.access_owner

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edits that add a path to the access of the handler, and to that of the class if it is missing."""
        granted = lookup(self._whole.access, path)
        added = f"add `{line_to_add(path, permission)}` to"
        edits: list[str] = []
        # The access of a handler can only narrow that of its class, so the class must grant the path first.
        if granted is None or (writes(permission) and not writes(granted)):
            edits.append(self._edit_of_class(path, permission))
        if self._narrowed_access:
            # If both edits add the same line, the sentence has it once.
            start = "to" if edits and edits[0].startswith(added) else added
            edits.append(f"{start} the `access` in the `@on` of `{self._method}`")
        return ", and ".join(edits)

    def _edit_of_class(self, path: StatePath, permission: Permission) -> str:
        if self._inherits:
            mapping = _extended("super().stateaccess()", self._owner.stateaccess(), path, recommended(path, permission))
            return f"add `def stateaccess(self): return {mapping}` to `{type(self._owner).__name__}`"
        edit = self._whole.how_to_declare(path, permission)
        added = f"add `{line_to_add(path, permission)}` to"
        # With the name of the class, because the sentence can also name the `access` of the handler.
        return f"{added} {self._whole.access_place}" if edit == f"{added} `stateaccess`" else edit


def _extended(code: str, access: Mapping[str, Any], path: StatePath, permission: Permission) -> str:
    """Return code for a mapping with one more path.

    Args:
        code: Code for the mapping.
        access: Its value.
        path: The path to add.
        permission: The permission of the path.
    """
    name, inside = path[0], access.get(path[0])
    # A permission on the whole must not be replaced by one on a part.
    if len(path) == 1 or isinstance(inside, Permission):
        value = f"{type(permission).__name__}()"
    # `{**outer, name: {...}}` alone would drop the other parts of `name`.
    elif isinstance(inside, Mapping):
        value = _extended(f'{code}["{name}"]', inside, path[1:], permission)
    else:
        value = line_to_add(path[1:], permission)
    return f'{{**{code}, "{name}": {value}}}'
