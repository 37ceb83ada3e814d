"""Planning: from a host and a request to a plan. Pure and deterministic."""

from homenode.callable_package import make_callable

make_callable(__name__)
