"""The parts of the Kubernetes client that a request needs. Call `defer` before the first import of `kubernetes`.

Its package imports every part (watches, informers, streams), and its kubeconfig reader the libraries of one way to log in. Each
costs a look at a cluster more time than the look itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_OAUTH = ("requests_oauthlib", "oauthlib", "oauthlib.oauth2")


class _Deferred(ModuleType):
    """Stands for a module until one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_loaded(self.__name__), name)


def _session(*arguments: Any, **options: Any) -> Any:
    return _loaded("requests_oauthlib").OAuth2Session(*arguments, **options)


def _loaded(name: str) -> ModuleType:
    """The module itself; from then on it is what an import gives."""
    for each in _OAUTH:
        if isinstance(sys.modules.get(each), _Deferred):
            del sys.modules[each]
    return import_module(name)


def defer() -> None:
    """Have the parts loaded when they are used. Does nothing if `kubernetes` is there already."""
    if "kubernetes" in sys.modules:
        return
    spec = find_spec("kubernetes")
    if spec is None:
        return
    # Without running the package's own module, which imports all others.
    sys.modules["kubernetes"] = module_from_spec(spec)
    for name in _OAUTH:
        sys.modules.setdefault(name, _Deferred(name))
    sessions, oauth = sys.modules["requests_oauthlib"], sys.modules["oauthlib"]
    if isinstance(sessions, _Deferred):
        sessions.OAuth2Session = _session  # type: ignore[attr-defined]
    if isinstance(oauth, _Deferred):
        oauth.oauth2 = sys.modules["oauthlib.oauth2"]  # type: ignore[attr-defined]
