"""Tenant: on whose behalf a request is made.

For: frontends, which know whose API key came with a request; everything in the host that keeps what one client may not
see or end of another. Does not know: keys, protocols. Invariants: a client has no way to choose any of it, since it is
no part of a request's parameters, headers or tensors; a request that a model makes for another request has that
request's tenant.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Tenant:
    """`key_name`: the name of the API key, "" without one. `is_operator`: it may end the requests of others.

    `cache_name`: only requests with the same one share what the prefix cache and the response cache hold: the key's
    name, or "" where keys share.
    """

    key_name: str = ""
    is_operator: bool = False
    cache_name: str = ""

    def may_end(self, request_of: Tenant) -> bool:
        """Whether it may stop that tenant's requests by their ids."""
        return self.is_operator or self.key_name == request_of.key_name


NO_TENANT: Final = Tenant()
"""Of a server without API keys, and of what the host and its models ask for themselves."""


def common_tenant(tenants: frozenset[Tenant]) -> Tenant:
    """The tenant of work done for all of these at once. For several it is one that shares nothing with anybody: it may
    end no request, and what is computed for it is found by no other."""
    if not tenants:
        return NO_TENANT
    if len(tenants) == 1:
        return next(iter(tenants))
    return Tenant(key_name=(name := f"#{secrets.token_hex(8)}"), cache_name=name)  # no key's name holds a #
